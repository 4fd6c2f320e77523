// What a script's outputs may be, beside plain values: a change of a component, and HTML for one that tells something.

import { el, problemNote } from "./dom.js";

/** What Gradio's own gr.update makes in Python. */
export const update = (changes) => ({ __type__: "update", ...changes });

// A gr.HTML component takes HTML: the text is escaped by the browser itself.

/** Something that was done. */
export function said(text) {
  return el("p", { class: "pw-hint", role: "status" }, text).outerHTML;
}

/** Something that went wrong. */
export function problem(text) {
  return problemNote(text).outerHTML;
}
