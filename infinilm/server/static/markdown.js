/** Reads the supported part of Markdown: the kind of a line, and the styles in it. Nothing here makes HTML. */

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^#{1,6}\s+/;
const BULLET = /^\s*[-*+]\s+/;
const NUMBERED = /^\s*\d{1,3}[.)]\s+/;
const QUOTE = /^\s*(?:>\s?)+/;
const RULE = /^\s*(?:-{3,}|\*{3,}|_{3,})\s*$/;
const RULER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/; // the line below a table's head
const PIPE = /(?<!\\)\|/g;
const INLINE = new RegExp(
  [
    "(?<ticks>`+)(?<code>[^`]+)\\k<ticks>",
    "\\*\\*(?=\\S)(?<bold>[^*]+?)\\*\\*",
    "\\*(?=\\S)(?<italic>[^*]+?)\\*",
    "\\[(?<label>[^[\\]]+)\\]\\((?<target>[^()\\s]+)\\)",
    "(?<bare>https?:[/]{2}[^\\s<>\"'`|]*[^\\s<>\"'`|.,;:!?)\\]*])",
  ].join("|"),
  "g",
);
const MARKERS = [
  ["rule", RULE],
  ["heading", HEADING],
  ["bullet", BULLET],
  ["quote", QUOTE],
];
const SAFE_SCHEMES = ["http:", "https:", "mailto:"];

export function isFence(line) {
  return FENCE.test(line);
}

/** Whether a line may be part of a table. */
export function hasCells(line) {
  return line.search(PIPE) >= 0;
}

/** The alignment of each column if this line and its head begin a table, else null. */
export function readRuler(line, head) {
  if (!RULER.test(line) || !hasCells(line) || !hasCells(head)) return null;
  const cells = line.trim().replace(/^\||\|$/g, "").split("|");
  return cells.map((cell) => (/:\s*$/.test(cell) ? (/^\s*:/.test(cell) ? "center" : "right") : "left"));
}

/** The kind of a line of text, and the styles in it, in order: {kind, depth, runs: [{end, style, href}]}. */
export function readLine(line) {
  if (!line.trim()) return { kind: "blank", depth: 0, runs: [{ end: line.length, style: "" }] };
  const depth = Math.min(3, Math.floor(line.match(/^\s*/)[0].length / 2));
  for (const [kind, pattern] of MARKERS) {
    const marker = line.match(pattern);
    if (marker) return { kind, depth, runs: readMarked(line, marker[0].length) };
  }
  return { kind: NUMBERED.test(line) ? "numbered" : "text", depth, runs: readInline(line, 0) };
}

/** The same for a row of a table. A run of style "mark pipe" ends a cell. */
export function readRow(line) {
  const runs = [];
  let start = 0;
  for (const { index } of line.matchAll(PIPE)) {
    const isOuter = !line.slice(0, index).trim() || !line.slice(index + 1).trim();
    runs.push(...readInline(line.slice(start, index), start), { end: index + 1, style: isOuter ? "mark" : "mark pipe" });
    start = index + 1;
  }
  return { kind: "row", depth: 0, runs: [...runs, ...readInline(line.slice(start), start)] };
}

function readMarked(line, length) {
  return [{ end: length, style: "mark" }, ...readInline(line.slice(length), length)];
}

/** The styles within a text that begins at `offset` of its line. */
function readInline(text, offset) {
  const runs = [];
  for (const found of text.matchAll(INLINE)) {
    const { ticks = "", code, bold, italic, label, target, bare } = found.groups;
    const href = safeLink(target ?? bare);
    if ((target ?? bare) && !href) continue;
    const inner = code ?? bold ?? italic ?? label ?? bare;
    const style = code ? "code" : bold ? "bold" : italic ? "italic" : "link";
    const start = offset + found.index;
    const innerStart = start + (code ? ticks.length : bold ? 2 : italic || label ? 1 : 0);
    runs.push({ end: start, style: "" }, { end: innerStart, style: "mark" });
    runs.push({ end: innerStart + inner.length, style, href });
    runs.push({ end: start + found[0].length, style: "mark" });
  }
  return [...runs, { end: offset + text.length, style: "" }];
}

/** The address of a link that may be followed; null for others, such as scripts. */
function safeLink(target) {
  try {
    const url = new URL(target);
    return SAFE_SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null; // not a complete address
  }
}
