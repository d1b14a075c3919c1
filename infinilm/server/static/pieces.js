/** Finds the tokens that wrote each part of an answer's text. */

/**
 * Aligns tokens with the text. The text decides. It arrives later than its tokens if the server holds it back (a
 * character's first bytes, or a possible stop string). It lacks special tokens, and the space that some tokenizers put
 * before the first word. A piece is a text with the tokens that wrote it: one token, or several that make up a
 * character.
 */
export class PieceMaker {
  #utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  #unfinished = []; // tokens whose bytes do not end a character
  #waiting = []; // pieces whose text has not arrived
  #isFirst = true;
  /** Text whose tokens are not known yet. */
  rest = "";

  /** Add an event's text and tokens. Returns the pieces that are now final. */
  feed(text, tokens) {
    this.rest += text;
    for (const token of tokens) this.#add(token);
    const pieces = [];
    if (!tokens.length && !this.#waiting.length && !this.#unfinished.length) this.#takeRest(pieces);
    while (this.#waiting.length && !this.#mayStillCome(this.#waiting[0].text)) this.#place(this.#waiting.shift(), pieces);
    return pieces;
  }

  /** The remaining pieces of a complete answer. */
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

  /** Whether the text so far is a proper beginning of this one, so that the rest may follow. */
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
