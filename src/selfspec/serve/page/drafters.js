// Who drafted a token, and the mark of each: a colour and a kind of line, in the order in which they were first seen.

export const FULL_MODEL = "full model";
const MARKS = 8; // classes mark-1 to mark-8 of style.css
const seen = new Map();

/** The name of who chose a token: one who drafts, or the full model. `method` drafts where it has no parts. */
export function chooser(token, method) {
  return token.origin === "draft" ? (token.drafted_by ?? method) : FULL_MODEL;
}

/** The class of the mark. Later ones than the last mark share it. */
export function mark(name) {
  if (name === FULL_MODEL) return "mark-0";
  if (!seen.has(name)) seen.set(name, Math.min(seen.size + 1, MARKS));
  return `mark-${seen.get(name)}`;
}
