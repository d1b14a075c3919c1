/** The conversation: its turns on the page, and the one request that may be at work. */

import { streamChat } from "./api.js";
import { byId, make } from "./page.js";
import { AnswerWriter } from "./writer.js";

const NEAR_BOTTOM_PX = 48;
const COPIED_MS = 1500;

export class Chat {
  #settings;
  #onLocked;
  #onWork;
  #turns = []; // {role, content, element}
  #views = new WeakMap(); // answers' elements to their AnswerViews
  #controller = null; // of the request at work

  #log = byId("log");
  #input = byId("input");

  /** `onLocked` is called when the server wants a key, `onWork` when a request begins and ends. */
  constructor(settings, { onLocked, onWork }) {
    this.#settings = settings;
    this.#onLocked = onLocked;
    this.#onWork = onWork;
    byId("turns").addEventListener("click", (event) => this.#act(event.target));
  }

  viewOf(element) {
    return this.#views.get(element);
  }

  stop() {
    this.#controller?.abort();
  }

  /** Forget the conversation; what is typed stays. */
  clear() {
    this.stop();
    this.#turns = [];
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    this.#input.focus();
  }

  /** Send what is in the composer, unless an answer is still coming. */
  send() {
    const text = this.#input.value;
    if (this.#controller || !text.trim()) return;
    this.#input.value = "";
    this.#ask(text);
  }

  async #ask(text) {
    byId("welcome").hidden = true;
    byId("turns").querySelector(".failed")?.remove();
    const question = this.#addTurn("user", text);
    question.element.append(make("p", "question", text));
    this.#scrollDown();
    let request;
    try {
      request = this.#makeRequest();
    } catch (error) {
      this.#fail(question, error);
      return;
    }
    const answer = this.#addTurn("assistant", "");
    const writer = new AnswerWriter(answer.element, (change) => this.#grow(change));
    this.#views.set(writer.body, writer.view);
    this.#scrollDown();
    const end = await this.#run(request, writer);
    if (!answer.element.isConnected) return; // the conversation was cleared meanwhile
    writer.end(end);
    answer.content = writer.view.text;
    if (answer.content || end === writer.finishReason) return;
    this.#turns.pop();
    answer.element.remove();
    this.#fail(question, end);
  }

  #makeRequest() {
    const system = this.#settings.systemPrompt;
    const messages = this.#turns.map(({ role, content }) => ({ role, content }));
    if (system) messages.unshift({ role: "system", content: system });
    const stream = { stream: true, stream_options: { include_usage: true } };
    return { messages, ...stream, ...this.#settings.toRequest() };
  }

  /** Read the answer; returns how it ended: a finish reason, "stopped", or an error. */
  async #run(request, writer) {
    const controller = new AbortController();
    this.#setWork(controller);
    try {
      for await (const event of streamChat(request, controller.signal)) writer.take(event);
      return writer.finishReason;
    } catch (error) {
      return error.name === "AbortError" ? "stopped" : error;
    } finally {
      if (this.#controller === controller) this.#setWork(null);
    }
  }

  #setWork(controller) {
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    this.#controller = controller;
    byId("send").hidden = Boolean(controller);
    byId("stop").hidden = !controller;
    this.#log.setAttribute("aria-busy", String(Boolean(controller)));
    if (hadFocus) this.#input.focus();
    this.#onWork();
  }

  /** Take a question that got no answer back into the composer, and say why. */
  #fail(question, reason) {
    this.#turns.pop();
    question.element.remove();
    if (!this.#input.value) this.#input.value = question.content;
    if (reason === "stopped") return;
    if (reason.needsKey) {
      this.#onLocked();
      return;
    }
    const note = make("p", "failed", reason.message);
    note.setAttribute("role", "alert");
    byId("turns").append(note);
    this.#settings.showError(reason.param, reason.message);
    this.#scrollDown();
  }

  #addTurn(role, content) {
    const element = make("article", `turn ${role}`, "");
    element.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    byId("turns").append(element);
    const turn = { role, content, element };
    this.#turns.push(turn);
    return turn;
  }

  #act(target) {
    const turn = target.closest(".turn");
    if (target.matches(".copy")) copy(target, this.#views.get(turn.querySelector(".answer")).text);
    else if (target.matches(".copy-code")) copy(target, codeOf(target.parentElement));
    else if (target.matches(".regenerate")) this.#regenerate();
  }

  /** Ask the last question again. */
  #regenerate() {
    if (this.#controller) return;
    const [question, answer] = this.#turns.splice(-2);
    question.element.remove();
    answer.element.remove();
    this.#ask(question.content);
  }

  /** Change the page, and go along with it unless the reader is elsewhere. */
  #grow(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    const isAtBottom = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM_PX;
    change();
    if (isAtBottom) this.#scrollDown();
  }

  #scrollDown() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}

function codeOf(block) {
  return [...block.querySelectorAll(".source")].map((line) => line.textContent).join("");
}

async function copy(button, text) {
  await putOnClipboard(text);
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), COPIED_MS);
}

async function putOnClipboard(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = make("textarea", "unseen", text); // over plain HTTP from another machine there is only this way
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
