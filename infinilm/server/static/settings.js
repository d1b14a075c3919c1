/** The fields beside the chat: a request's settings besides its messages. This browser remembers them. */

import { byId } from "./page.js";

const STORE = "infinilm.settings";
const DEFAULTS = {
  system: "",
  temperature: "",
  top_p: "",
  min_p: "",
  top_k: "",
  max_tokens: "512",
  seed: "",
  top_logprobs: "5",
  stop: "",
};
const NUMBERS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"];

/** A field has a value that no request can have. */
export class FieldError extends Error {
  constructor(message, param) {
    super(message);
    this.param = param;
  }
}

export class Settings {
  #form = byId("fields");

  constructor() {
    this.#fill({ ...DEFAULTS, ...remembered() });
    this.#form.addEventListener("input", (event) => this.#change(event.target));
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => {
      this.#fill(DEFAULTS);
      this.#keep();
    });
  }

  /** Show the model's own values in fields that are empty. */
  showModelDefaults(values) {
    for (const [name, value] of Object.entries(values)) {
      const input = this.#input(name);
      if (input) input.placeholder = name === "top_k" && value < 1 ? "all" : String(value);
    }
    this.#moveSliders();
  }

  get systemPrompt() {
    return this.#value("system").trim();
  }

  /** The fields of a request. Empty fields are left to the server. */
  toRequest() {
    this.clearErrors();
    const request = {};
    for (const name of NUMBERS) {
      const number = this.#number(name);
      if (number !== null) request[name] = number;
    }
    const stops = this.#value("stop").split("\n").filter(Boolean);
    if (stops.length) request.stop = stops.map(unescape);
    const numAlternatives = this.#number("top_logprobs");
    if (numAlternatives !== null) Object.assign(request, { logprobs: true, top_logprobs: numAlternatives });
    return request;
  }

  /** Show an error at the field with this name. Returns false if there is no such field. */
  showError(param, message) {
    const input = this.#form.elements.namedItem(param ?? "");
    if (!input) return false;
    const note = document.createElement("p");
    note.className = "wrong";
    note.id = `${input.id}-wrong`;
    note.textContent = message;
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", note.id);
    input.closest(".field").append(note);
    return true;
  }

  clearErrors() {
    for (const note of this.#form.querySelectorAll(".wrong")) note.remove();
    for (const input of this.#form.querySelectorAll("[aria-invalid]")) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
    }
  }

  #input(name) {
    return this.#form.elements.namedItem(name);
  }

  #value(name) {
    return this.#input(name).value;
  }

  #number(name) {
    const input = this.#input(name);
    if (input.validity.badInput) throw new FieldError(`${name}: this is not a number`, name);
    return input.value.trim() ? Number(input.value) : null;
  }

  #fill(values) {
    this.clearErrors();
    for (const name of Object.keys(DEFAULTS)) this.#input(name).value = values[name];
    this.#moveSliders();
  }

  #change(input) {
    if (input.dataset.for) this.#input(input.dataset.for).value = input.value;
    else this.#moveSliders();
    this.#keep();
  }

  /** Set each slider to its number, or without one to its placeholder. */
  #moveSliders() {
    for (const slider of this.#form.querySelectorAll("[data-for]")) {
      const input = this.#input(slider.dataset.for);
      slider.value = input.value || input.placeholder;
    }
  }

  #keep() {
    const values = Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, this.#value(name)]));
    localStorage.setItem(STORE, JSON.stringify(values));
  }
}

function remembered() {
  try {
    return JSON.parse(localStorage.getItem(STORE)) ?? {};
  } catch {
    return {}; // not written by this page: use the defaults
  }
}

/** The text that a line of the field stands for. */
function unescape(text) {
  const meanings = { n: "\n", t: "\t", "\\": "\\" };
  return text.replace(/\\([nt\\])/g, (_, letter) => meanings[letter]);
}
