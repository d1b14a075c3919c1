/** Which token wrote which part of an answer's text. */

/**
 * Lays tokens along the text. The text is what counts: it comes a little later than its tokens where the server holds
 * it back (a character's first bytes, what may become a stop string), lacks special tokens and the space that
 * some tokenizers put before the first word. A piece is a text with the tokens that wrote it: one, or the several that
 * make up a character.
 */
export class PieceMaker {
  #utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  #unfinished = []; // tokens whose bytes do not end a character
  #waiting = []; // pieces whose text has not come
  #isFirst = true;
  /** Text that no token accounts for yet. */
  rest = "";

  /** Take in what an event brought; returns the pieces that are now certain. */
  feed(text, tokens) {
    this.rest += text;
    for (const token of tokens) this.#add(token);
    const pieces = [];
    if (!tokens.length && !this.#waiting.length && !this.#unfinished.length) this.#takeRest(pieces);
    while (this.#waiting.length && !this.#mayStillCome(this.#waiting[0].text)) this.#place(this.#waiting.shift(), pieces);
    return pieces;
  }

  /** What is left when the answer is over. */
  finish() {
    const pieces = [];
    const last = this.#utf8.decode();
    if (last) this.#waiting.push({ text: last, tokens: this.#unfinished });
    for (const piece of this.#waiting) this.#place(piece, pieces);
    this.#waiting = [];
    this.#takeRest(pieces);
    return pieces;
  }

  #add(token) {
    this.#unfinished.push(token);
    const text = this.#utf8.decode(Uint8Array.from(token.bytes ?? []), { stream: true });
    if (text) {
      this.#waiting.push({ text, tokens: this.#unfinished });
      this.#unfinished = [];
    }
  }

  /** Whether the text so far ends before this one does. */
  #mayStillCome(text) {
    return this.rest.length < text.length && text.startsWith(this.rest);
  }

  #place({ text, tokens }, pieces) {
    if (this.#isFirst && text[0] === " " && !this.rest.startsWith(text)) text = text.slice(1);
    const start = this.rest.indexOf(text);
    if (start < 0 || !text) return; // a special token, or one that a stop string cut off
    if (start > 0) pieces.push({ text: this.rest.slice(0, start), tokens: [] });
    pieces.push({ text, tokens });
    this.rest = this.rest.slice(start + text.length);
    this.#isFirst = false;
  }

  #takeRest(pieces) {
    if (this.rest) pieces.push({ text: this.rest, tokens: [] });
    this.rest = "";
  }
}
