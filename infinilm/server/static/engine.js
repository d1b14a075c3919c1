/** The live view of the engine. Reads `/health` once a second while the page is visible. */

import { readHealth } from "./api.js";
import { byId } from "./page.js";

const INTERVAL_MS = 1000;
const SOON_MS = 250;
const NUM_POINTS = 60;
const HEIGHT = 20;
const NUMBERS = ["running", "waiting", "memory", "rate"];
const MIN_SECONDS = 0.5; // a rate over a shorter time is noise
const AT_WORK = ["ready", "draining"];
const STATES = {
  starting: "loading",
  ready: "ready",
  restarting: "restarting",
  draining: "shutting down",
  stopped: "stopped",
  locked: "needs a key",
  unreachable: "not reachable",
};

export class EngineMonitor {
  #onLocked;
  #onReady;
  #timer = 0;
  #before = null; // {time, numTokens} at the last look
  #rates = [];

  /** `onLocked` is called when the server wants a key; call `look` after that. `onReady`: the engine is ready. */
  constructor({ onLocked, onReady }) {
    this.#onLocked = onLocked;
    this.#onReady = onReady;
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Look now, and again soon: a request has begun or ended, which the engine may not have noticed yet. */
  async lookSoon() {
    if (await this.look()) this.#plan(SOON_MS);
  }

  /** Look now and then at intervals. Returns false if the page is hidden or the server wants a key. */
  async look() {
    clearTimeout(this.#timer);
    if (document.hidden) {
      this.#before = null;
      return false;
    }
    try {
      this.#show(await readHealth());
    } catch (error) {
      this.#showNothing();
      this.#showState(error.needsKey ? "locked" : "unreachable", error.message);
      if (error.needsKey) {
        this.#onLocked();
        return false;
      }
    }
    this.#plan(INTERVAL_MS);
    return true;
  }

  #plan(milliseconds) {
    clearTimeout(this.#timer); // another look may have begun meanwhile
    this.#timer = setTimeout(() => this.look(), milliseconds);
  }

  #show({ status, model, cause, engine }) {
    this.#showState(status, cause);
    byId("model").textContent = byId("model").title = byId("welcome-model").textContent = model;
    document.title = `${model} – infinilm`;
    if (!AT_WORK.includes(status)) {
      this.#showNothing();
      return;
    }
    const numUsed = engine.num_blocks - engine.num_free_blocks;
    byId("running").textContent = write(engine.num_running);
    byId("waiting").textContent = write(engine.num_waiting + engine.num_queued);
    this.#showMemory(numUsed / Math.max(1, engine.num_blocks));
    this.#showRate(engine.num_output_tokens);
  }

  /** Clear the numbers: there is no engine whose state could be shown. */
  #showNothing() {
    this.#before = null;
    for (const id of NUMBERS) byId(id).textContent = "–";
    byId("memory-bar").style.width = 0;
  }

  /** The share of the memory for conversations (the KV cache) that is in use. */
  #showMemory(share) {
    const percent = 100 * share;
    byId("memory").textContent = percent > 0 && percent < 1 ? "< 1 %" : `${Math.round(percent)} %`;
    byId("memory-bar").style.width = `${percent}%`;
  }

  #showRate(numTokens) {
    const now = { time: performance.now(), numTokens };
    const before = (this.#before ??= now);
    const seconds = (now.time - before.time) / 1000;
    if (seconds < MIN_SECONDS) return;
    const rate = Math.max(0, (numTokens - before.numTokens) / seconds);
    this.#before = now;
    this.#rates = [...this.#rates, rate].slice(-NUM_POINTS);
    byId("rate").textContent = rate < 100 ? rate.toFixed(1) : write(Math.round(rate));
    this.#draw();
  }

  #draw() {
    const peak = Math.max(...this.#rates);
    const start = NUM_POINTS - this.#rates.length;
    const points = this.#rates.map((rate, i) => `${start + i},${HEIGHT - 1 - (rate / Math.max(peak, 1)) * (HEIGHT - 2)}`);
    byId("history-line").setAttribute("points", points.join(" "));
    byId("history-area").setAttribute("points", `${start},${HEIGHT} ${points.join(" ")} ${NUM_POINTS - 1},${HEIGHT}`);
    byId("peak").textContent = peak >= 1 ? `peak ${write(Math.round(peak))}` : "";
  }

  #showState(state, cause) {
    const pill = byId("status");
    if (pill.dataset.state === state && byId("notice").title === (cause ?? "")) return;
    if (state === "ready" && pill.dataset.state !== "ready") this.#onReady();
    pill.dataset.state = state;
    pill.textContent = STATES[state] ?? state;
    const notice = byId("notice");
    const isTrouble = state !== "ready" && state !== "locked";
    notice.hidden = !isTrouble;
    notice.title = cause ?? "";
    notice.textContent = isTrouble ? [`The engine is ${pill.textContent}`, cause].filter(Boolean).join(": ") : "";
  }
}

function write(number) {
  return number.toLocaleString("en");
}
