// The box that messages are written in, with files beside the text.

import { el, icon, iconButton, readText, size } from "./dom.js";
import { draft } from "./store.js";

const MAX_FILE_BYTES = 256_000;
const MAX_FILES = 8;
const MAX_HEIGHT = 220;

export class Composer {
  /** @param handlers {send(text, attachments), stop(), editLast(), problem(text)} */
  constructor(handlers) {
    this.handlers = handlers;
    this.attachments = [];
    this.busy = false;
    this.area = el("textarea", {
      rows: "1",
      "aria-label": "Message",
      placeholder: innerWidth < 640 ? "Message the model" : "Message the model. Enter sends, Shift+Enter makes a new line.",
      oninput: () => this.written(),
      onkeydown: (event) => this.key(event),
      onpaste: (event) => event.clipboardData.files.length && this.take(event, event.clipboardData.files),
    });
    this.chips = el("div", { class: "pw-chips" });
    this.input = el("input", {
      type: "file",
      multiple: true,
      class: "pw-hidden",
      "aria-label": "Files to attach",
      tabindex: "-1",
      onchange: () => {
        this.attach([...this.input.files]);
        this.input.value = "";
      },
    });
    this.submit = el("button", { type: "submit", class: "submit-button", title: "Send", "aria-label": "Send" }, icon("send"));
    this.stop = iconButton("stop", "Stop", () => handlers.stop(), { class: "stop-button", hidden: true });
    this.node = el(
      "form",
      {
        id: "message",
        onsubmit: (event) => {
          event.preventDefault();
          this.send();
        },
        ondragover: (event) => event.preventDefault(),
        ondrop: (event) => this.take(event, event.dataTransfer.files),
      },
      this.chips,
      el(
        "div",
        { class: "pw-compose" },
        iconButton("attach", "Attach a text file", () => this.input.click(), { class: "attach-button" }),
        this.input,
        this.area,
        this.submit,
        this.stop,
      ),
    );
  }

  /** Puts in what was written before the page was loaded anew. */
  restore() {
    if (!this.area.value) this.area.value = draft.get();
    this.fit();
  }

  /** Shows whether an answer is on its way. */
  setBusy(busy) {
    this.busy = busy;
    this.submit.hidden = busy;
    this.stop.hidden = !busy;
  }

  /** Puts a message back, to be changed or sent again. */
  fill(text, attachments = []) {
    this.area.value = text;
    this.attachments = [...attachments];
    this.draw();
    this.written();
  }

  /** Takes what is typed, unless the person is at another place of the page by now. */
  focusIfFree() {
    const at = document.activeElement;
    if (!at || at === document.body || this.node.contains(at)) this.area.focus({ preventScroll: true });
  }

  get isEmpty() {
    return !this.area.value.trim() && !this.attachments.length;
  }

  send() {
    if (this.busy || this.isEmpty) return;
    const text = this.area.value;
    const attachments = this.attachments;
    this.area.value = "";
    this.attachments = [];
    this.draw();
    this.written();
    this.handlers.send(text, attachments);
  }

  key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "Escape" && this.busy) {
      this.handlers.stop();
    } else if (event.key === "ArrowUp" && !this.area.value && !this.busy) {
      event.preventDefault();
      this.handlers.editLast();
    }
  }

  take(event, files) {
    event.preventDefault();
    this.attach([...files]);
  }

  async attach(files) {
    const problems = [];
    for (const file of files) {
      try {
        this.attachments.push(await readAttachment(file, this.attachments.length));
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.draw();
    this.handlers.problem(problems.join(" "));
  }

  draw() {
    this.chips.replaceChildren(
      ...this.attachments.map((file, index) =>
        el(
          "span",
          { class: "pw-chip" },
          `📄 ${file.name} (${size(new Blob([file.text]).size)})`,
          iconButton("close", `Remove ${file.name}`, () => {
            this.attachments.splice(index, 1);
            this.draw();
            this.area.focus();
          }),
        ),
      ),
    );
  }

  written() {
    draft.set(this.area.value);
    this.fit();
  }

  fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(MAX_HEIGHT, this.area.scrollHeight)}px`;
  }
}

// The models that pagewire serves read text; whatever else a file is, they can't take it.
async function readAttachment(file, numAttached) {
  const kind = /^(image|audio|video)\//.exec(file.type)?.[1];
  if (kind) throw new Error(`${file.name} is ${kind === "video" ? "a video" : kind === "image" ? "an image" : "a sound"}; this model reads text only.`);
  if (numAttached >= MAX_FILES) throw new Error(`At most ${MAX_FILES} files go with a message; ${file.name} was left out.`);
  try {
    return { name: file.name, text: await readText(file, MAX_FILE_BYTES) };
  } catch (error) {
    throw new Error(`${error.message} This model reads text only.`);
  }
}

/** What the model reads of a message: its text, and each file beneath it, fenced. */
export function turnText(message) {
  const files = (message.attachments ?? []).map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${file.name}:\n${fence}\n${file.text}\n${fence}`;
  });
  return [message.text, ...files].filter(Boolean).join("\n\n");
}
