// One message of a conversation: its text, its reasoning folded away, its figures, and what can be done with it.

import { copyFrom, el, iconButton, problemNote } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { tokensView } from "./tokens.js";

const ENDINGS = { length: "stopped at the token limit", cancelled: "stopped by you", unfinished: "the page was left before it ended" };

/** The line beneath an answer. Rates are tokens per second, times seconds. */
export function figuresOf(progress) {
  const parts = [`${progress.tokens} tokens`];
  if (progress.rate !== null) parts.push(`${progress.rate.toFixed(1)} tok/s`);
  if (progress.first_token_s !== null) parts.push(`first token after ${progress.first_token_s.toFixed(2)} s`);
  if (progress.prompt_tokens) parts.push(`prompt ${progress.prompt_tokens} tokens`);
  if (progress.cached_tokens) parts.push(`${progress.cached_tokens} of them cached`);
  if (ENDINGS[progress.reason]) parts.push(ENDINGS[progress.reason]);
  return parts.join(" · ");
}

/** An article for a message of the person's. */
export class QuestionView {
  /** @param handlers {edit(text)}; null where it can't be changed now */
  constructor(message, handlers) {
    this.text = el("div", { class: "pw-text" }, message.text);
    const copy = iconButton("copy", "Copy message", () => copyFrom(copy, message.text));
    const edit = iconButton("edit", "Edit message", () => editInPlace(this.node, this.text, message.text, "Ask again", handlers.edit));
    const files = (message.attachments ?? []).map((file) => el("span", { class: "pw-chip" }, `📄 ${file.name}`));
    this.node = el(
      "article",
      { class: "user message", "aria-label": "You" },
      el("div", { class: "pw-bubble" }, this.text, files.length ? el("div", { class: "pw-chips" }, ...files) : null),
      el("div", { class: "pw-actions" }, edit, copy),
    );
  }
}

/** An article for an answer, which grows while it streams. */
export class AnswerView {
  /**
   * @param message of the conversation
   * @param handlers {retry(), undo(), edit(text)}; null: it is only looked at
   * @param isLast whether retry and undo make sense
   * @param details its tokens with alternatives; null where they are not known (any more)
   */
  constructor(message, handlers, isLast, details) {
    this.body = el("div", { class: "pw-markdown" });
    this.markdown = new MarkdownView(this.body);
    this.reasoningBody = el("div", { class: "pw-markdown" });
    this.reasoningMarkdown = new MarkdownView(this.reasoningBody);
    this.summary = el("summary", {}, "Reasoning");
    this.reasoning = el("details", { class: "pw-reasoning", hidden: true }, this.summary, this.reasoningBody);
    this.error = problemNote();
    this.figures = el("div", { class: "pw-figures" });
    this.tokens = el("div", { class: "pw-answer-tokens", hidden: true });
    const copy = iconButton("copy", "Copy answer", () => copyFrom(copy, message.text));
    this.actions = el("div", { class: "pw-actions" }, copy);
    if (isLast) {
      this.actions.append(
        iconButton("retry", "Ask again (retry)", handlers.retry),
        iconButton("undo", "Undo: take the last message back", handlers.undo),
      );
    }
    if (handlers) {
      const edit = () => editInPlace(this.node, this.body, message.text, "Keep", handlers.edit);
      this.actions.append(iconButton("edit", "Edit answer", edit));
    }
    if (details?.length) this.actions.append(this.tokensButton(details));
    this.node = el(
      "article",
      { class: "bot message", "aria-label": message.model ? `Answer of ${message.model}` : "Answer" },
      this.reasoning,
      this.body,
      this.error,
      this.tokens,
      el("div", { class: "pw-foot" }, this.figures, this.actions),
    );
    this.show(message, false);
  }

  tokensButton(details) {
    const toggle = iconButton(
      "tokens",
      "Tokens and their alternatives",
      () => {
        const open = this.tokens.hidden;
        if (open && !this.tokens.firstChild) this.tokens.append(tokensView(details, "Tokens of the answer"));
        this.tokens.hidden = !open;
        this.body.hidden = open;
        toggle.setAttribute("aria-expanded", String(open));
      },
      { "aria-expanded": "false", class: "pw-tokens-button" },
    );
    return toggle;
  }

  /** Draws the message as it is now. */
  show(message, streaming) {
    this.node.classList.toggle("streaming", streaming);
    this.reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      this.reasoningMarkdown.show(message.reasoning);
      this.summary.textContent = streaming && !message.text ? "Thinking …" : "Reasoning";
    }
    this.markdown.show(message.text);
    this.node.classList.toggle("waiting", streaming && !message.text);
    this.figures.textContent = [message.model, message.figures].filter(Boolean).join(" · ");
    this.error.textContent = message.error ?? "";
    this.error.hidden = !message.error;
    this.actions.hidden = streaming;
  }
}

function editInPlace(article, shown, text, verb, done) {
  if (article.querySelector(".pw-edit")) return;
  const area = el("textarea", { rows: String(Math.min(12, text.split("\n").length + 1)), "aria-label": "Edit text" });
  area.value = text;
  const close = () => {
    form.remove();
    shown.hidden = false;
  };
  const form = el(
    "form",
    {
      class: "pw-edit",
      onsubmit: (event) => {
        event.preventDefault();
        if (area.value.trim() && done(area.value) !== false) close();
      },
      onkeydown: (event) => {
        if (event.key === "Escape") close();
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      },
    },
    area,
    el(
      "div",
      { class: "pw-edit-buttons" },
      el("button", { type: "button", class: "pw-button", onclick: close }, "Cancel"),
      el("button", { type: "submit", class: "pw-button primary" }, verb),
    ),
  );
  shown.hidden = true;
  shown.after(form);
  area.focus();
}
