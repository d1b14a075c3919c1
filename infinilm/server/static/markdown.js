/** The little of Markdown that is shown: what a line is, and what stands out in it. Nothing here makes HTML. */

const FENCE = /^\s*(```|~~~)/;
const HEADING = /^#{1,6}\s+/;
const BULLET = /^\s*[-*+]\s+/;
const NUMBERED = /^\s*\d{1,3}[.)]\s+/;
const INLINE = /(`+)([^`]+)\1|(\*\*)(?=\S)([^*]+?)\*\*|(\*)(?=\S)([^*]+?)\*/g;
const INLINE_KINDS = { "`": "code", "**": "bold", "*": "italic" };

export function isFence(line) {
  return FENCE.test(line);
}

/** What a line of text is, and where in it which styles hold: {kind, depth, runs: [{end, style}]}, in order. */
export function readLine(line) {
  if (!line.trim()) return { kind: "blank", depth: 0, runs: [{ end: line.length, style: "" }] };
  const depth = Math.min(3, Math.floor(line.match(/^\s*/)[0].length / 2));
  for (const [kind, pattern] of [["heading", HEADING], ["bullet", BULLET]]) {
    const marker = line.match(pattern);
    if (marker) return { kind, depth, runs: readInline(line, marker[0].length) };
  }
  return { kind: NUMBERED.test(line) ? "numbered" : "text", depth, runs: readInline(line, 0) };
}

/** The styles within a line, of which the first `start` characters are a marker. */
function readInline(line, start) {
  const runs = [{ end: start, style: "mark" }];
  INLINE.lastIndex = start;
  for (const found of line.matchAll(INLINE)) {
    const mark = found[1] ?? found[3] ?? found[5];
    const end = found.index + found[0].length;
    runs.push({ end: found.index, style: "" });
    runs.push({ end: found.index + mark.length, style: "mark" });
    runs.push({ end: end - mark.length, style: INLINE_KINDS[mark] ?? "code" });
    runs.push({ end, style: "mark" });
  }
  runs.push({ end: line.length, style: "" });
  return runs;
}
