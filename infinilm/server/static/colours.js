/** Colours for code: comments, strings, numbers, keywords and names of functions, line by line. */

const WORDS = {
  python:
    "and as assert async await break case class continue def del elif else except False finally for from global if import " +
    "in is lambda match None nonlocal not or pass raise return self True try while with yield",
  shell:
    "case cd do done echo elif else esac exit export fi for function if in local read return set sudo then unset until while",
  curly:
    "abstract as async auto await bool boolean break case catch char class const constexpr continue def default defer delete " +
    "do double else enum export extends false final finally float fn for from func function go if impl implements import in " +
    "instanceof int interface let long match mod mut namespace new nil null nullptr override package private protected pub " +
    "public range return self short signed sizeof static string struct super switch template this throw throws trait true try " +
    "type typedef typeof undefined unsigned use using var virtual void where while yield",
  sql:
    "add all alter and as asc between by case create delete desc distinct drop else end exists foreign from full group " +
    "having in index inner insert into is join key left like limit not null offset on or order outer primary references " +
    "right select set table then union unique update values view when where with",
};
const FAMILIES = {
  python: { names: "python py python3", comment: /#.*/y, long: ['"""', "'''"], words: WORDS.python },
  shell: { names: "bash sh shell zsh console yaml yml toml ruby rb r perl dockerfile makefile", comment: /#.*/y, words: WORDS.shell },
  sql: { names: "sql sqlite postgresql mysql lua haskell hs", comment: /--.*/y, words: WORDS.sql, ignoresCase: true },
  markup: { names: "html xml svg vue", long: ["<!--"], words: "", isMarkup: true },
  curly: {
    names: "javascript js jsx typescript ts tsx json json5 java c cpp c++ cc h hpp cs csharp go golang rust rs swift kotlin kt php css scss scala dart",
    comment: /\/\/.*/y,
    long: ["/*", "`"],
    words: WORDS.curly,
  },
};
const CLOSERS = { "/*": "*/", "<!--": "-->" }; // other openers close with themselves
const STRING = /"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'/y;
const NUMBER = /\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/y;
const NAME = /[\p{L}_$][\p{L}\d_$]*/uy;
const TAG = /<\/?[\w-]+|\/?>/y;

/** The language family of a name such as "py"; null if it is unknown. */
function findFamily(language) {
  return Object.values(FAMILIES).find(({ names }) => names.split(" ").includes(language.toLowerCase())) ?? null;
}

/** Reads the lines of a code block, one after the other. */
export class CodeReader {
  #family;
  #words;

  constructor(language) {
    this.#family = findFamily(language);
    this.#words = new Set((this.#family?.words ?? "").split(" "));
  }

  /** The runs of a line, and the opener that it leaves open, such as "/*": pass it as `open` with the next line. */
  read(line, open = null) {
    const runs = [];
    let at = 0;
    while (this.#family && at < line.length) {
      const [length, style, opener] = open ? close(line, at, open) : this.#next(line, at);
      runs.push({ end: at + length, style });
      at += length;
      open = opener;
    }
    return { runs: [...runs, { end: line.length, style: "" }], open };
  }

  /** The run that begins at a place: its length, its style, and the opener that it leaves open. */
  #next(line, at) {
    const { comment, long = [], isMarkup } = this.#family;
    const opener = long.find((each) => line.startsWith(each, at));
    if (opener) return close(line, at, opener, opener.length);
    const remark = comment && matchAt(comment, line, at);
    if (remark) return [remark.length, "code-comment", null];
    const string = matchAt(STRING, line, at);
    if (string) return [string.length, "code-string", null];
    const tag = isMarkup && matchAt(TAG, line, at);
    if (tag) return [tag.length, "code-keyword", null];
    const name = matchAt(NAME, line, at);
    if (name) return [name.length, this.#styleOf(name, line[at + name.length]), null];
    const number = matchAt(NUMBER, line, at);
    return number ? [number.length, "code-number", null] : [1, "", null];
  }

  #styleOf(name, following) {
    const word = this.#family.ignoresCase ? name.toLowerCase() : name;
    return this.#words.has(word) ? "code-keyword" : following === "(" ? "code-name" : "";
  }
}

/** The run up to the closer of an opener, or up to the end of the line. */
function close(line, at, opener, length = 0) {
  const closer = CLOSERS[opener] ?? opener;
  const style = opener in CLOSERS ? "code-comment" : "code-string";
  const end = line.indexOf(closer, at + length);
  return end < 0 ? [line.length - at, style, opener] : [end + closer.length - at, style, null];
}

function matchAt(pattern, line, at) {
  pattern.lastIndex = at;
  return pattern.exec(line)?.[0] ?? "";
}
