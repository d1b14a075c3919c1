/** Shows a token's probability and its alternatives, on mouse, touch and arrow keys. */

import { make } from "./page.js";

const MARGIN = 8;
const STEPS = { ArrowRight: 1, ArrowLeft: -1 };

/** Shows the tokens of answers. `viewOf` finds the AnswerView of an answer's element (class `answer`). */
export class TokenPopover {
  #box;
  #viewOf;
  #answer = null;
  #index = -1;

  constructor(box, log, viewOf) {
    this.#box = box;
    this.#viewOf = viewOf;
    log.addEventListener("pointerover", (event) => event.pointerType === "mouse" && this.#showAt(event.target));
    log.addEventListener("pointerout", (event) => event.pointerType === "mouse" && this.hide());
    log.addEventListener("click", (event) => this.#showAt(event.target));
    log.addEventListener("keydown", (event) => this.#walk(event));
    log.addEventListener("focusout", () => this.hide());
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    window.addEventListener("resize", () => this.hide());
  }

  hide() {
    this.#mark(false);
    this.#box.hidden = true;
    this.#answer = null;
  }

  #showAt(target) {
    const span = target.closest?.(".token");
    if (span) this.#show(span.closest(".answer"), Number(span.dataset.piece));
    else this.hide();
  }

  /** Go from token to token of the answer that has the focus, with the arrow keys. */
  #walk(event) {
    const answer = event.target;
    if (!answer.classList.contains("answer") || event.ctrlKey || event.metaKey || event.altKey) return;
    const { pieces } = this.#viewOf(answer);
    const step = STEPS[event.key] ?? 0;
    let index = answer === this.#answer ? this.#index + step : 0;
    if (event.key === "Home") index = 0;
    else if (event.key === "End") index = pieces.length - 1;
    else if (!step) return;
    while (pieces[index] && !pieces[index].tokens.length) index += step || 1;
    event.preventDefault();
    if (!pieces[index]) return;
    this.#viewOf(answer).spansOf(index)[0].scrollIntoView({ block: "nearest" });
    // Show it after the scroll event, which hides it.
    requestAnimationFrame(() => requestAnimationFrame(() => this.#show(answer, index)));
    this.#answer = answer;
    this.#index = index;
  }

  #show(answer, index) {
    this.#mark(false);
    this.#answer = answer;
    this.#index = index;
    this.#mark(true);
    const { tokens } = this.#viewOf(answer).pieces[index];
    this.#box.replaceChildren(...tokens.slice(0, 4).map(describe));
    this.#box.hidden = false;
    this.#place();
  }

  #mark(isShown) {
    if (!this.#answer) return;
    for (const span of this.#viewOf(this.#answer).spansOf(this.#index)) span.classList.toggle("shown", isShown);
  }

  /** Place the box above the token, or below it if there is no room, always within the window. */
  #place() {
    const span = [...this.#viewOf(this.#answer).spansOf(this.#index)].find((each) => each.getClientRects().length);
    const [anchor] = span ? span.getClientRects() : [this.#answer.getBoundingClientRect()];
    const { width, height } = this.#box.getBoundingClientRect();
    const left = Math.min(anchor.left, document.documentElement.clientWidth - width - MARGIN);
    const above = anchor.top - height - MARGIN;
    const top = above >= MARGIN ? above : anchor.bottom + MARGIN;
    this.#box.style.left = `${Math.max(MARGIN, left)}px`;
    this.#box.style.top = `${Math.max(MARGIN, Math.min(top, window.innerHeight - height - MARGIN))}px`;
  }
}

function describe(token) {
  const section = document.createElement("section");
  const head = make("p", "chosen", "");
  head.append(make("code", "", visible(token.token)), make("strong", "", percent(Math.exp(token.logprob))));
  section.append(head);
  const top = token.top_logprobs ?? [];
  if (!top.length) return section;
  const list = document.createElement("ol");
  list.append(...top.map((other) => describeOther(other, other.token === token.token)));
  const known = top.reduce((sum, other) => sum + Math.exp(other.logprob), 0);
  section.append(list, make("p", "others", `all others ${percent(Math.max(0, 1 - known))}`));
  return section;
}

function describeOther({ token, logprob }, isChosen) {
  const item = make("li", isChosen ? "is-chosen" : "", "");
  const bar = make("span", "share", "");
  bar.style.width = `${Math.exp(logprob) * 100}%`;
  item.append(bar, make("code", "", visible(token)), make("span", "", percent(Math.exp(logprob))));
  return item;
}

/** A token's text with visible spaces and line breaks. */
function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(nothing)";
}

function percent(probability) {
  const value = probability * 100;
  if (value > 0 && value < 0.005) return "< 0.01 %";
  return `${value.toFixed(value < 0.995 ? 2 : 1)} %`;
}
