/** Shows an answer on the page: each token is a span, and lines are laid out as they arrive. */

import { CodeReader } from "./colours.js";
import { hasCells, isFence, readLine, readRow, readRuler } from "./markdown.js";
import { make, makeButton } from "./page.js";
import { PieceMaker } from "./pieces.js";

const BOUNDS = [0.05, 0.2, 0.4, 0.6, 0.8];
const MARKUP = /[`*#\n[\]|:]/;
const MAY_BE_MARKER = /^\s*\S{0,6}$/; // a line that has just begun could become a list or a heading
const LONG_LINE = 2000; // characters; laying out a longer line for each token would take long

/** The class that gives a probability its colour: p0 (unlikely) to p5. */
function tintOf(probability) {
  const index = BOUNDS.findIndex((bound) => probability < bound);
  return `p${index < 0 ? BOUNDS.length : index}`;
}

/** Writes an answer into an element. Only the last line may be laid out again; `element.textContent` is the text. */
export class AnswerView {
  /** Texts with their tokens. A span's `data-piece` is an index into this array. */
  pieces = [];
  text = "";
  #maker = new PieceMaker();
  #element;
  #block; // where lines go: the element, or a block of code in it
  #code = null; // in a block of code: its CodeReader
  #open = null; // the opener, such as a comment's, that earlier lines of code have left open
  #table = null; // while rows of a table may follow: {element, alignments}
  #head = null; // the line before, which may be a table's head: {line, fragments, text}
  #line = null; // the last line's element
  #fragments = []; // the last line's parts of pieces: {text, piece}
  #isSimple = false; // whether text can be appended to the last line without a new layout: it is plain or long
  #isLong = false;
  #tail = make("span", "", ""); // text whose tokens are not known yet

  constructor(element) {
    this.#element = element;
    this.#block = element;
  }

  /** Add an event's text and tokens. */
  add(text, tokens) {
    this.text += text;
    this.#show(this.#maker.feed(text, tokens), this.#maker.rest);
  }

  /** Show the rest: the answer is complete. */
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
    this.#isSimple &&= this.#isLong || !MARKUP.test(fragment.text);
    if (this.#isSimple) this.#line.append(this.#makeSpan(fragment.text, fragment.piece, ""));
  }

  #endLine() {
    if (!this.#fragments.length) return;
    this.#layOut();
    const line = textOf(this.#fragments).replace(/\n$/, "");
    if (isFence(line)) {
      if (!this.#code) this.#openCode(line);
      else [this.#code, this.#block] = [null, this.#element];
    } else if (this.#code) {
      this.#open = this.#code.read(line, this.#open).open;
    } else {
      this.#endTableLine(line);
    }
    this.#line = null;
    this.#fragments = [];
    this.#isSimple = this.#isLong = false;
  }

  /** End a line of text. It may begin a table together with the line before, or end one. */
  #endTableLine(line) {
    const head = this.#head;
    const alignments = head && readRuler(line, head.text);
    if (alignments) {
      this.#table = { element: make("div", "table", ""), alignments };
      head.line.before(this.#table.element);
      this.#table.element.append(head.line, this.#line);
      head.line.className = "line row head";
      head.line.replaceChildren(...this.#makeCells(readRow(head.text).runs, head.fragments));
      this.#line.className = "line ruler";
    } else if (!hasCells(line)) {
      this.#table = null;
    }
    this.#head = this.#table ? null : { line: this.#line, fragments: this.#fragments, text: line };
  }

  /** Make the last line's spans again, unless all of them could be appended. */
  #layOut() {
    if (this.#isSimple) return;
    const text = textOf(this.#fragments).replace(/\n$/, "");
    const { kind, depth, runs } = this.#read(text);
    const isRow = kind === "row";
    const parent = isRow ? this.#table.element : this.#block;
    this.#line ??= make("div", "", "");
    if (this.#line.parentElement !== parent) parent.append(this.#line);
    this.#line.className = `line ${kind} depth${depth}`;
    this.#line.replaceChildren(...(isRow ? this.#makeCells(runs, this.#fragments) : this.#makeSpans(runs, this.#fragments)));
    const isPlain = kind === "text" && !MARKUP.test(text) && !MAY_BE_MARKER.test(text);
    this.#isLong = text.length > LONG_LINE && !isRow;
    this.#isSimple = isPlain || this.#isLong;
  }

  #read(text) {
    if (isFence(text)) return { kind: "fence", depth: 0, runs: [{ end: text.length, style: "mark" }] };
    if (this.#code) return { kind: "source", depth: 0, runs: this.#code.read(text, this.#open).runs };
    return this.#table && hasCells(text) ? readRow(text) : readLine(text);
  }

  /** The cells of a row, each with its spans. */
  #makeCells(runs, fragments) {
    const cells = [make("span", "cell", "")];
    for (const span of this.#makeSpans(runs, fragments)) {
      cells.at(-1).append(span);
      if (span.classList.contains("pipe")) cells.push(make("span", "cell", ""));
    }
    cells.forEach((cell, i) => cell.classList.add(this.#table.alignments[i] ?? "left"));
    return cells;
  }

  /** The spans of the fragments, cut where styles change. */
  #makeSpans(runs, fragments) {
    const spans = [];
    let at = 0;
    let run = 0;
    for (const { text, piece } of fragments) {
      let rest = text;
      while (rest) {
        while (run < runs.length && runs[run].end <= at) run += 1;
        const { end, style, href } = runs[run] ?? { end: at + rest.length, style: "break" };
        const part = rest.slice(0, end - at);
        spans.push(this.#makeSpan(part, piece, style, href));
        rest = rest.slice(part.length);
        at += part.length;
      }
    }
    return spans;
  }

  #makeSpan(text, index, style, href = null) {
    const span = make(href ? "a" : "span", style, text);
    if (href) Object.assign(span, { href, target: "_blank", rel: "noopener noreferrer" });
    const [token] = this.pieces[index].tokens;
    if (!token) return span;
    span.classList.add("token", tintOf(Math.exp(token.logprob)));
    span.dataset.piece = index;
    return span;
  }

  #openCode(fence) {
    const block = make("div", "code-block", "");
    block.dataset.language = fence.replace(/[`~]/g, "").trim().slice(0, 20);
    const copy = makeButton("copy-code plain", ""); // its label is in the style sheet: no text but the answer's here
    copy.setAttribute("aria-label", "Copy this code");
    block.append(copy);
    this.#element.append(block);
    this.#block = block;
    this.#code = new CodeReader(block.dataset.language);
    this.#open = this.#head = this.#table = null;
  }
}

function textOf(fragments) {
  return fragments.map((fragment) => fragment.text).join("");
}
