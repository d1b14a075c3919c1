/** An answer on the page: every token a span, laid out line by line while it comes. */

import { isFence, readLine } from "./markdown.js";
import { make, makeButton } from "./page.js";
import { PieceMaker } from "./pieces.js";

const BOUNDS = [0.05, 0.2, 0.4, 0.6, 0.8];
const MARKUP = /[`*#\n]/;
const MAY_BE_MARKER = /^\s*\S{0,6}$/; // what has just begun could become a list or a heading

/** The class that gives a probability its colour: p0 (unlikely) to p5. */
function tintOf(probability) {
  const index = BOUNDS.findIndex((bound) => probability < bound);
  return `p${index < 0 ? BOUNDS.length : index}`;
}

/** Writes an answer into an element. Only the last line is ever laid out again; `element.textContent` is the text. */
export class AnswerView {
  /** Texts with their tokens; a span's `data-piece` is the index here. */
  pieces = [];
  text = "";
  #maker = new PieceMaker();
  #element;
  #block; // where lines go: the element, or a block of code in it
  #isCode = false;
  #line = null; // the last line's element
  #fragments = []; // the last line's parts of pieces: {text, piece}
  #isSimple = false; // whether the last line is so plain that more can be put behind it
  #tail = make("span", "", ""); // text that no token accounts for yet

  constructor(element) {
    this.#element = element;
    this.#block = element;
  }

  /** Add what an event brought. */
  add(text, tokens) {
    this.text += text;
    this.#show(this.#maker.feed(text, tokens), this.#maker.rest);
  }

  /** Nothing more will come. */
  finish() {
    this.#show(this.#maker.finish(), "");
    this.#endLine();
  }

  /** The spans of a piece: more than one where a style or a line ends within it. */
  spansOf(index) {
    return this.#element.querySelectorAll(`[data-piece="${index}"]`);
  }

  #show(pieces, rest) {
    this.#tail.remove();
    for (const piece of pieces) {
      const index = this.pieces.push(piece) - 1;
      const parts = piece.text.split("\n");
      parts.forEach((part, i) => {
        const isLast = i === parts.length - 1;
        this.#addFragment({ text: isLast ? part : `${part}\n`, piece: index });
        if (!isLast) this.#endLine();
      });
    }
    if (this.#fragments.length) this.#layOut();
    this.#tail.textContent = rest;
    if (rest) (this.#line ?? this.#block).append(this.#tail);
  }

  #addFragment(fragment) {
    if (!fragment.text) return;
    this.#fragments.push(fragment);
    this.#isSimple &&= !MARKUP.test(fragment.text);
    if (this.#isSimple) this.#line.append(this.#makeSpan(fragment.text, fragment.piece, ""));
  }

  #endLine() {
    if (!this.#fragments.length) return;
    this.#layOut();
    const line = textOf(this.#fragments);
    if (isFence(line)) {
      this.#isCode = !this.#isCode;
      if (this.#isCode) this.#openCode(line);
      else this.#block = this.#element;
    }
    this.#line = null;
    this.#fragments = [];
    this.#isSimple = false;
  }

  /** Make the last line's spans anew, unless all were put behind it. */
  #layOut() {
    if (this.#isSimple) return;
    if (!this.#line) {
      this.#line = make("div", "", "");
      this.#block.append(this.#line);
    }
    const text = textOf(this.#fragments).replace(/\n$/, "");
    const { kind, depth, runs } = this.#read(text);
    this.#line.className = `line ${kind} depth${depth}`;
    this.#line.replaceChildren(...this.#makeSpans(runs));
    this.#isSimple = (kind === "text" || kind === "source") && !MARKUP.test(text) && !MAY_BE_MARKER.test(text);
  }

  #read(text) {
    const style = isFence(text) ? "mark" : "";
    if (style || this.#isCode) return { kind: style ? "fence" : "source", depth: 0, runs: [{ end: text.length, style }] };
    return readLine(text);
  }

  /** The fragments, cut where styles change. */
  #makeSpans(runs) {
    const spans = [];
    let at = 0;
    let run = 0;
    for (const { text, piece } of this.#fragments) {
      let rest = text;
      while (rest) {
        while (run < runs.length && runs[run].end <= at) run += 1;
        const { end, style } = runs[run] ?? { end: at + rest.length, style: "break" };
        const part = rest.slice(0, end - at);
        spans.push(this.#makeSpan(part, piece, style));
        rest = rest.slice(part.length);
        at += part.length;
      }
    }
    return spans;
  }

  #makeSpan(text, index, style) {
    const [token] = this.pieces[index].tokens;
    if (!token) return make("span", style, text);
    const span = make("span", `token ${tintOf(Math.exp(token.logprob))} ${style}`, text);
    span.dataset.piece = index;
    return span;
  }

  #openCode(fence) {
    const block = make("div", "code-block", "");
    block.dataset.language = fence.replace(/[`~]/g, "").trim().slice(0, 20);
    const copy = makeButton("copy-code plain", ""); // its label is in the style sheet: here is only the answer's text
    copy.setAttribute("aria-label", "Copy this code");
    block.append(copy);
    this.#element.append(block);
    this.#block = block;
  }
}

function textOf(fragments) {
  return fragments.map((fragment) => fragment.text).join("");
}
