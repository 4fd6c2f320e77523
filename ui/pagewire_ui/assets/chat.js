// The conversation. It lives in this page and in the browser's storage; the server sees the turns of a question and
// streams the answer, and keeps nothing of either.

import { Composer, turnText } from "./composer.js";
import { el, newId, problemNote } from "./dom.js";
import { AnswerView, QuestionView, figuresOf } from "./message_view.js";
import * as store from "./store.js";

// Python tells at once that it asks; the model's first word may take any time.
const ANSWER_MS = 60_000;
const STOP_MS = 3_000;
const SAVE_MS = 2_000;
const NEAR_END_PX = 80;
const MAX_TITLE = 60;

class ChatRoom {
  /** @param bridge {ask(data), halt(data), opened()}: events that Python answers, or another script */
  constructor(element, bridge) {
    this.bridge = bridge;
    this.log = el("div", { id: "conversation", role: "log", tabindex: "0", "aria-label": "Conversation" });
    this.status = el("div", { id: "status", role: "status" });
    this.template = el("div", { class: "pw-chips pw-template" });
    this.composer = new Composer({
      send: (text, attachments) => this.send(text, attachments),
      stop: () => this.halt(),
      editLast: () => this.editLast(),
      problem: (text) => this.say(text, true),
    });
    element.replaceChildren(this.log, this.status, this.template, this.composer.node);
    // The answer that is on its way: {id, conversation, message, previous, view, savedAt, watchdog}.
    this.running = null;
    // Tokens of answers with their alternatives: too large to be kept over a reload.
    this.details = new WeakMap();
    store.events.addEventListener("opened", (event) => this.open(event.detail.id));
    store.events.addEventListener("changed", (event) => this.reload(event.detail));
    store.events.addEventListener("renamed", ({ detail }) => this.held(detail.id).forEach((held) => (held.title = detail.title)));
    store.events.addEventListener("removed", ({ detail }) => this.drop(detail.id));
    addEventListener("pagehide", () => this.leave());
    const id = store.current.get();
    this.conversation = (id && store.load(id)) || store.emptyConversation();
    if (id !== this.conversation.id) store.current.set(this.conversation.id);
    else this.open(id);
    this.composer.restore();
    this.composer.focusIfFree();
    // The tabs above take one line, or more on a phone.
    const measure = () => {
      if (!element.offsetParent) return; // another tab is shown
      document.documentElement.style.setProperty("--pw-above", `${element.getBoundingClientRect().top + scrollY}px`);
    };
    new ResizeObserver(measure).observe(document.querySelector("#tabs") ?? element);
    measure();
  }

  get messages() {
    return this.conversation.messages;
  }

  open(id) {
    if (this.conversation.id !== id || !this.messages.length) {
      const running = this.running?.conversation;
      this.conversation = running?.id === id ? running : (store.load(id) ?? { ...store.emptyConversation(), id });
    }
    if (this.conversation.settings) this.bridge.opened();
    this.say("");
    this.draw();
  }

  // Another tab wrote this very conversation.
  reload(key) {
    if (!key?.endsWith(this.conversation.id) || this.running) return;
    this.conversation = store.load(this.conversation.id) ?? { ...store.emptyConversation(), id: this.conversation.id };
    this.draw();
  }

  // The conversations of this id in the page's memory: the one that is shown, the one that is being answered.
  held(id) {
    return [this.conversation, this.running?.conversation].filter((held) => held?.id === id);
  }

  drop(id) {
    if (this.running?.conversation.id !== id) return;
    this.running.dropped = true;
    this.halt();
  }

  draw() {
    const last = this.messages.length - 1;
    this.views = this.messages.map((message, index) => this.viewOf(message, index, index === last));
    this.log.replaceChildren(...(this.views.length ? this.views.map((view) => view.node) : [placeholder()]));
    if (this.running?.conversation === this.conversation) this.running.view = this.views.at(-1);
    this.drawTemplate();
    this.log.scrollTop = this.log.scrollHeight;
  }

  // How the conversation ends, drawn anew. What stands before it stays: the person may just be changing it.
  drawEnd() {
    const last = this.messages.length - 1;
    if (last < 0) return this.draw();
    const atEnd = this.isAtEnd();
    this.views.splice(last + 1).forEach((view) => view.node.remove());
    const view = this.viewOf(this.messages[last], last, true);
    this.views[last].node.replaceWith(view.node);
    this.views[last] = view;
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
  }

  viewOf(message, index, isLast) {
    if (message.role === "user") return new QuestionView(message, { edit: (text) => this.editQuestion(index, text) });
    const handlers = {
      retry: () => this.retry(),
      undo: () => this.undo(),
      edit: (text) => {
        this.messages[index] = { role: "assistant", text, model: message.model, figures: "edited" };
        this.keep();
        this.draw();
      },
    };
    return new AnswerView(message, handlers, isLast, this.details.get(message));
  }

  drawTemplate() {
    const template = this.conversation.template;
    this.template.replaceChildren(
      ...(template
        ? [
            el(
              "span",
              { class: "pw-chip" },
              `Chat template: ${template.name}`,
              el("button", { type: "button", "aria-label": "Use the model's own template again", onclick: () => this.useTemplate(null) }, "×"),
            ),
          ]
        : []),
    );
  }

  /** Makes this conversation's prompts by another template; null: the model's own. */
  useTemplate(template) {
    this.conversation.template = template;
    if (this.messages.length) this.keep();
    this.drawTemplate();
  }

  send(text, attachments) {
    if (this.running) return;
    this.messages.push({ role: "user", text, ...(attachments.length && { attachments }) });
    this.conversation.title ||= (text.trim() || attachments[0].name).split("\n")[0].slice(0, MAX_TITLE);
    this.ask(null);
  }

  retry() {
    if (this.running) return;
    this.ask(this.messages.pop());
  }

  undo() {
    if (this.running) return;
    this.messages.pop();
    const question = this.messages.pop();
    this.keep();
    this.draw();
    if (!question) return;
    this.composer.fill(question.text, question.attachments);
    this.composer.area.focus();
  }

  /** False where it must wait for the answer that is on its way. */
  editQuestion(index, text) {
    if (this.running) return false;
    const kept = this.messages[index].attachments;
    this.messages.splice(index);
    this.send(text, kept ?? []);
  }

  editLast() {
    [...this.log.querySelectorAll(".user.message [aria-label^=Edit]")].at(-1)?.click();
  }

  ask(previous) {
    const id = newId();
    const turns = this.messages.map((message) => ({ role: message.role, text: turnText(message) }));
    const message = { role: "assistant", text: "" };
    this.messages.push(message);
    this.running = { id, conversation: this.conversation, message, previous, view: null, savedAt: Date.now() };
    this.running.watchdog = setTimeout(() => this.lost(id), ANSWER_MS);
    this.draw();
    this.running.view.show(message, true);
    this.log.setAttribute("aria-busy", "true");
    this.composer.setBusy(true);
    this.say("");
    this.keep();
    this.bridge.ask({ answer: id, turns, template: this.conversation.template?.source ?? null });
  }

  halt() {
    if (!this.running) return;
    const id = this.running.id;
    this.bridge.halt({ answer: id });
    setTimeout(() => {
      if (this.running?.id === id) this.finish({ ...this.running.last, answer: id, over: true, reason: "cancelled" });
    }, STOP_MS);
  }

  lost(id) {
    if (this.running?.id !== id) return;
    this.finish({ answer: id, over: true, error: "The page's server does not answer. Reload the page, or try again in a moment." });
  }

  /** What Python sent: {answer, text, reasoning, tokens, ..., over, error}. */
  progress(value) {
    const running = this.running;
    if (!running || value?.answer !== running.id) return;
    clearTimeout(running.watchdog);
    running.last = value;
    if (value.settings) running.conversation.settings = value.settings;
    if (value.over) {
      this.finish(value);
      return;
    }
    fill(running.message, value);
    if (Date.now() - running.savedAt > SAVE_MS) {
      running.savedAt = Date.now();
      store.save({ ...running.conversation, updated: Date.now() });
    }
    // A browser calls this as often as it draws; what came between two pictures is drawn once.
    if (document.hidden) this.drawRunning();
    else this.frame ??= requestAnimationFrame(() => this.drawRunning());
  }

  drawRunning() {
    this.frame = null;
    if (!this.running || this.running.conversation !== this.conversation) return;
    const atEnd = this.isAtEnd();
    this.running.view.show(this.running.message, true);
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  finish(value) {
    const { conversation, message, previous, watchdog, dropped } = this.running;
    clearTimeout(watchdog);
    this.running = null;
    this.log.removeAttribute("aria-busy");
    this.composer.setBusy(false);
    const shown = conversation === this.conversation;
    if (value.text || value.reasoning) {
      fill(message, value);
      if (value.error) message.error = value.error;
      if (value.details?.length) this.details.set(message, value.details);
    } else {
      this.takeBack(conversation, previous, shown && !previous);
    }
    if (!dropped) this.keep(conversation);
    if (!shown) return;
    this.drawEnd();
    const nothing = value.reason === "cancelled" ? "Stopped by you before the first word." : "The model answered with nothing.";
    const answered = value.text || value.reasoning;
    // Beneath what came of it, an answer tells its error itself.
    this.say((!answered && value.error) || (answered ? message.figures : nothing), Boolean(value.error && !answered));
  }

  // Nothing came: the question goes back into the box, ready to be sent again; a retried answer comes back.
  takeBack(conversation, previous, refill) {
    conversation.messages.pop();
    if (previous) {
      conversation.messages.push(previous);
      return;
    }
    const question = conversation.messages.pop();
    if (!conversation.messages.length) conversation.title = "";
    if (!refill || !this.composer.isEmpty) return;
    this.composer.fill(question.text, question.attachments);
    this.composer.focusIfFree();
  }

  keep(conversation = this.conversation) {
    conversation.updated = Date.now();
    if (!conversation.messages.length) {
      store.remove(conversation.id);
      return;
    }
    const problem = store.save(conversation);
    if (problem) this.say(problem, true);
  }

  leave() {
    if (!this.running) return;
    this.running.message.figures = "the page was left before it ended";
    store.save({ ...this.running.conversation, updated: Date.now() });
  }

  say(text, isProblem = false) {
    this.status.className = isProblem && text ? "" : "pw-sr";
    this.status.replaceChildren(isProblem && text ? problemNote(text) : text);
  }
}

function fill(message, value) {
  message.text = value.text;
  if (value.reasoning) message.reasoning = value.reasoning;
  if (value.model) message.model = value.model;
  message.figures = figuresOf(value);
}

function placeholder() {
  return el(
    "div",
    { class: "placeholder" },
    el("h2", {}, "How can I help?"),
    el("p", {}, "Your messages go to the model on this server, and nowhere else. Conversations are kept in this browser."),
  );
}

let room = null;

/** The turns of the conversation that is shown, for previews of its prompt. */
export function currentTurns() {
  const messages = room?.messages ?? [];
  return messages.map((message) => ({ role: message.role, text: turnText(message) }));
}

/** The settings that the conversation was last asked with; null: none. */
export function currentSettings() {
  return room?.conversation.settings ?? null;
}

/** Makes the conversation's prompts by this template {name, source} from now on; null: by the model's own. */
export function useTemplate(template) {
  room.useTemplate(template);
}

/** Puts the conversation into a gr.HTML component. */
export function mount(element, { trigger, props, watch }) {
  room = new ChatRoom(element, {
    ask: (data) => trigger("ask", data),
    halt: (data) => trigger("halt", data),
    opened: () => trigger("opened"),
  });
  watch("value", () => room.progress(props.value));
}
