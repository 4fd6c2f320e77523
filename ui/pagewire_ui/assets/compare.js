// Two answers to one question, side by side.

import { el, problemNote } from "./dom.js";
import { AnswerView, figuresOf } from "./message_view.js";

class Side {
  constructor(name) {
    this.heading = el("h2", {});
    this.holder = el("div", { class: "pw-holder" });
    this.node = el("section", { class: "pw-side", "aria-label": name }, this.heading, this.holder);
    this.over = true;
  }

  /** Draws an answer so far; one that has ended is left as it is while the other goes on. */
  show(value) {
    const same = JSON.stringify(value);
    if (same === this.last) return;
    this.last = same;
    const message = {
      text: value.text,
      reasoning: value.reasoning,
      error: value.error,
      figures: value.over || value.tokens ? figuresOf(value) : "",
    };
    this.heading.textContent = value.model;
    if (this.over || value.over) {
      this.view = new AnswerView(message, null, false, value.details);
      this.holder.replaceChildren(this.view.node);
    }
    this.over = value.over;
    this.view.show(message, !value.over);
  }
}

/** Puts the two into a gr.HTML component. */
export function mount(element, { props, watch }) {
  const sides = { left: new Side("Left answer"), right: new Side("Right answer") };
  const problem = problemNote();
  const both = el("div", { class: "pw-sides", hidden: true }, sides.left.node, sides.right.node);
  element.replaceChildren(problem, both);
  let shown = 0;
  watch("value", () => {
    const value = props.value;
    // What is left of the answers to an earlier question comes late, or never.
    if (!value || value.number < shown) return;
    shown = value.number;
    problem.hidden = !value.error;
    problem.textContent = value.error ?? "";
    if (value.error) return;
    both.hidden = false;
    for (const [name, side] of Object.entries(sides)) side.show(value[name]);
  });
}
