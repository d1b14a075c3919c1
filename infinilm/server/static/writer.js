/** One answer of the conversation, with the note below it. */

import { AnswerView } from "./answer.js";
import { make, makeButton } from "./page.js";

const INTERVAL_MS = 40;
const ENDS = { length: "cut off at max tokens", stopped: "stopped" };

/** Writes an answer as its events arrive. It updates the page at intervals: the engine may use the same processor. */
export class AnswerWriter {
  /** Where the text goes. */
  body = make("div", "answer", "");
  view = new AnswerView(this.body);
  finishReason = null;
  #note = make("p", "note", "waiting for the first token");
  #grow;
  #text = "";
  #thought = ""; // reasoning that is not shown yet
  #thoughts = null; // the element with the reasoning
  #tokens = [];
  #timer = 0;
  #numTokens = 0;
  #firstTime = 0;
  #lastTime = 0;
  #timings = null;

  /** `grow` is called with each change of the page. */
  constructor(element, grow) {
    this.#grow = grow;
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
    const actions = make("div", "actions", "");
    actions.append(this.#note, makeButton("copy plain", "Copy"), makeButton("regenerate plain", "Retry"));
    element.append(this.body, actions);
    element.classList.add("coming");
  }

  /** Add an event. */
  take({ choices: [choice], usage, timings }) {
    if (choice) {
      this.#text += choice.delta.content ?? "";
      this.#thought += choice.delta.reasoning_content ?? "";
      if (choice.delta.reasoning_content === undefined) this.#tokens.push(...(choice.logprobs?.content ?? []));
      this.#count(choice);
      this.finishReason = choice.finish_reason ?? this.finishReason;
    }
    if (usage) this.#numTokens = usage.completion_tokens;
    this.#timings = timings ?? this.#timings;
    this.#timer ||= setTimeout(() => this.#flush(), INTERVAL_MS);
  }

  /** All text so far, shown or not. */
  get text() {
    return this.view.text + this.#text;
  }

  /** End the answer with a finish reason, with "stopped", or with an error. Returns the note below it. */
  end(reason) {
    clearTimeout(this.#timer);
    this.#flush();
    this.#finish(this.#sumUp(reason), reason instanceof Error);
    return this.#note.textContent;
  }

  /** Show a saved answer. The probabilities of its tokens are not known any more. */
  restore(text, note) {
    this.view.add(text, []);
    this.#finish(note ?? "", false);
  }

  #finish(note, isWrong) {
    this.#grow(() => {
      this.view.finish();
      this.#note.textContent = note;
      this.#note.classList.toggle("wrong", isWrong);
      this.body.parentElement.classList.remove("coming");
    });
  }

  /** Count an event's tokens. It has them if alternatives were requested; else it counts as one until the end. */
  #count({ logprobs, delta }) {
    const numTokens = logprobs?.content?.length ?? (delta.content || delta.reasoning_content ? 1 : 0);
    if (!numTokens) return;
    this.#lastTime = performance.now();
    this.#firstTime ||= this.#lastTime;
    this.#numTokens += numTokens;
  }

  /** Tokens per second between the first token and the latest one. */
  get #rate() {
    const seconds = (this.#lastTime - this.#firstTime) / 1000;
    return seconds > 0.5 ? (this.#numTokens - 1) / seconds : null;
  }

  #flush() {
    this.#timer = 0;
    if (!this.#text && !this.#thought && !this.#tokens.length) return;
    const [text, thought, tokens] = [this.#text, this.#thought, this.#tokens];
    [this.#text, this.#thought, this.#tokens] = ["", "", []];
    this.#grow(() => {
      if (thought) this.#think(thought);
      if (text && this.#thoughts) this.#thoughts.parentElement.open = false;
      this.view.add(text, tokens);
      this.#note.textContent = this.#describe(this.#rate);
    });
  }

  /** Show more of the reasoning, above the answer. It is collapsed when the answer begins. */
  #think(thought) {
    if (!this.#thoughts) {
      const details = make("details", "reasoning", "");
      this.#thoughts = make("p", "", "");
      details.append(make("summary", "", "Reasoning"), this.#thoughts);
      details.open = true;
      this.body.before(details);
    }
    this.#thoughts.append(thought);
  }

  #sumUp(reason) {
    if (reason instanceof Error) return reason.message;
    const { ttft_s: wait = null, itl_s: gap = null } = this.#timings ?? {};
    const parts = [this.#describe(gap ? 1 / gap : this.#rate)];
    if (wait !== null) parts.push(`first after ${wait < 1 ? `${Math.round(wait * 1000)} ms` : `${wait.toFixed(1)} s`}`);
    if (ENDS[reason]) parts.push(ENDS[reason]);
    return parts.join(" · ");
  }

  #describe(rate) {
    const count = `${this.#numTokens.toLocaleString("en")} ${this.#numTokens === 1 ? "token" : "tokens"}`;
    return rate ? `${count} · ${rate < 100 ? rate.toFixed(1) : Math.round(rate)}/s` : count;
  }
}
