/** The conversation: its turns on the page, and its one request in progress. */

import { streamChat } from "./api.js";
import { byId, make, makeButton } from "./page.js";
import { loadChats, saveChat } from "./store.js";
import { AnswerWriter } from "./writer.js";

const NEAR_BOTTOM_PX = 48;
const COPIED_MS = 1500;
const UNLOAD_MS = 100;
const OPEN_STORE = "infinilm.chat"; // the conversation that is open in this tab

export class Chat {
  #settings;
  #onLocked;
  #onWork;
  #onChange;
  #turns = []; // {role, content, note, element}
  #writer = null; // of the answer in progress
  #views = new WeakMap(); // answers' elements to their AnswerViews
  #controller = null; // of the request in progress

  #log = byId("log");
  #input = byId("input");

  /** `onLocked` is called when the server wants a key, `onWork` when a request begins and ends, `onChange` when the
      conversation has been saved or another one opened. */
  constructor(settings, { onLocked, onWork, onChange }) {
    this.#settings = settings;
    this.#onLocked = onLocked;
    this.#onWork = onWork;
    this.#onChange = onChange;
    byId("turns").addEventListener("click", (event) => this.#act(event.target));
    window.addEventListener("pagehide", () => this.#keep());
  }

  /** The id of the open conversation in the store. */
  get id() {
    return sessionStorage.getItem(OPEN_STORE);
  }

  /** Show the conversation that was open before the page was loaded again. */
  restore() {
    const before = loadChats().find(({ id }) => id === this.id);
    if (before) this.open(before.id, before.turns);
    else this.clear();
  }

  /** Show a saved conversation. */
  open(id, turns) {
    this.clear();
    sessionStorage.setItem(OPEN_STORE, id);
    byId("welcome").hidden = turns.length > 0;
    for (const { role, content, note } of turns) {
      const turn = this.#addTurn(role, content);
      if (role === "user") this.#showQuestion(turn);
      else this.#addWriter(turn).restore(content, note);
      turn.note = note;
    }
    this.#scrollDown();
    this.#onChange();
  }

  viewOf(element) {
    return this.#views.get(element);
  }

  stop() {
    this.#controller?.abort();
  }

  /** Begin a new conversation. The text in the composer stays, and the old conversation is saved. */
  clear() {
    this.#keep();
    this.discard();
  }

  /** Begin a new conversation without saving the old one. */
  discard() {
    this.stop();
    this.#writer = null;
    this.#turns = [];
    sessionStorage.setItem(OPEN_STORE, newId());
    byId("turns").replaceChildren();
    byId("welcome").hidden = false;
    this.#input.focus();
    this.#onChange();
  }

  /** Send the text in the composer, unless an answer is in progress. */
  send() {
    const text = this.#input.value;
    if (this.#controller || !text.trim()) return;
    this.#input.value = "";
    this.#ask(text);
  }

  /** Send a text that is not in the composer. */
  sendText(text) {
    if (!this.#controller) this.#ask(text);
  }

  /** Write the conversation to the store, with the answer so far. */
  #keep() {
    if (!this.#turns.length) return;
    if (this.#writer) Object.assign(this.#turns.at(-1), { content: this.#writer.text, note: "interrupted" });
    saveChat(this.id, this.#turns.filter(({ role, content }) => role === "user" || content));
    this.#onChange();
  }

  async #ask(text) {
    byId("welcome").hidden = true;
    byId("turns").querySelector(".failed")?.remove();
    const question = this.#addTurn("user", text);
    this.#showQuestion(question);
    this.#scrollDown();
    let request;
    try {
      request = this.#makeRequest();
    } catch (error) {
      this.#fail(question, error);
      return;
    }
    const answer = this.#addTurn("assistant", "");
    const writer = (this.#writer = this.#addWriter(answer));
    this.#scrollDown();
    this.#keep();
    const end = await this.#run(request, writer);
    if (end instanceof Error) await pause(UNLOAD_MS); // when a page is left, its connections are cut before it ends
    if (!answer.element.isConnected) return; // another conversation was opened meanwhile
    this.#writer = null;
    answer.note = writer.end(end);
    answer.content = writer.text;
    if (answer.content || end === writer.finishReason) {
      this.#keep();
      return;
    }
    this.#turns.pop();
    answer.element.remove();
    this.#fail(question, end);
  }

  #addWriter({ element }) {
    const writer = new AnswerWriter(element, (change) => this.#grow(change));
    this.#views.set(writer.body, writer.view);
    return writer;
  }

  #showQuestion({ element, content }) {
    const actions = make("div", "actions", "");
    actions.append(makeButton("edit plain", "Edit"));
    element.replaceChildren(make("p", "question", content), actions);
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

  /** Put a question without an answer back into the composer, and show the reason. */
  #fail(question, reason) {
    this.#turns.pop();
    question.element.remove();
    saveChat(this.id, this.#turns);
    this.#onChange();
    byId("welcome").hidden = this.#turns.length > 0 || reason !== "stopped";
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
    else if (this.#controller) return; // the buttons below change the conversation
    else if (target.matches(".regenerate")) this.#askAgain(this.#turns.length - 2);
    else if (target.matches(".edit")) this.#edit(this.#turns.findIndex(({ element }) => element === turn));
  }

  /** Ask a question again, with another text if one is given. Later turns are dropped. */
  #askAgain(index, text = this.#turns[index].content) {
    for (const { element } of this.#turns.splice(index)) element.remove();
    this.#ask(text);
  }

  /** Replace a question by a field in which it can be edited. */
  #edit(index) {
    const turn = this.#turns[index];
    const form = make("form", "editor", "");
    const field = make("textarea", "", "");
    field.value = turn.content;
    field.rows = Math.min(12, turn.content.split("\n").length + 1);
    field.setAttribute("aria-label", "Your message");
    const send = make("button", "primary", "Send");
    const cancel = makeButton("plain", "Cancel");
    form.append(field, cancel, send);
    cancel.addEventListener("click", () => this.#showQuestion(turn));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim() && !this.#controller) this.#askAgain(index, field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel.click();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    turn.element.replaceChildren(form);
    field.focus();
  }

  /** Change the page, and scroll down with it unless the reader has scrolled elsewhere. */
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

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

function newId() {
  return `${Date.now()}-${Math.random().toString(36).slice(2)}`; // randomUUID needs HTTPS or this machine
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
  const area = make("textarea", "unseen", text); // the only way over plain HTTP from another machine
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
