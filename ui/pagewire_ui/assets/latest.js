// Answers to a page's events can come late and out of order. Each question gets a number when it is asked, and an answer
// is taken in only if no answer to a later question was.

const asked = new Map();
const taken = new Map();

/** The number of the next question of this kind. */
export function next(kind) {
  const number = (asked.get(kind) ?? 0) + 1;
  asked.set(kind, number);
  return number;
}

/** The number of the last question of this kind. */
export function last(kind) {
  return asked.get(kind) ?? 0;
}

/** Whether an answer with this number tells something new; true once for each. */
export function isNew(kind, number) {
  if (number <= (taken.get(kind) ?? 0)) return false;
  taken.set(kind, number);
  return true;
}
