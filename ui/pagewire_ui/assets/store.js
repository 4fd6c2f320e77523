// Conversations and chat templates in this browser's localStorage, each under a key of its own, so that two tabs that
// write different ones never touch each other's. Nothing of it is kept on the server.

import { newId } from "./dom.js";

export const FORMAT = "pagewire.conversations";
export const MAX_FILE_BYTES = 20e6;
export const MAX_TEMPLATE_NAME = 80;
const PREFIX = "pagewire.conversation.";
const TEMPLATE_PREFIX = "pagewire.template.";
const MAX_TEMPLATES = 100;
const MAX_TEMPLATE = 500_000;
const MAX_TEXT = 2_000_000;
const MAX_MESSAGES = 5000;
const MAX_CONVERSATIONS = 2000;
const ROLES = ["user", "assistant"];

/**
 * Tells "changed" when conversations were written (with the key as detail: by another tab), and of this tab's doings
 * "opened" {id}, "renamed" {id, title} and "removed" {id}.
 */
export const events = new EventTarget();
const parsed = new Map();

/** A conversation without messages. */
export function emptyConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, messages: [], settings: null, template: null };
}

/** What the list shows of each conversation, the newest first. */
export function list() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const key = localStorage.key(index);
    if (!key.startsWith(PREFIX)) continue;
    const conversation = load(key.slice(PREFIX.length));
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** A conversation; null where there is none, or what is stored is not one. */
export function load(id) {
  const text = localStorage.getItem(PREFIX + id);
  if (text === null) return null;
  // The list is drawn anew with each change: what has not changed is not parsed again.
  if (parsed.get(id)?.text !== text) parsed.set(id, { text, conversation: parse(id, text) });
  const { conversation } = parsed.get(id);
  return conversation && structuredClone(conversation);
}

function parse(id, text) {
  try {
    return { ...checkConversation(JSON.parse(text), "it"), id };
  } catch {
    return null;
  }
}

/**
 * Keeps a conversation.
 * @returns {string} what to tell the person where the browser does not keep it, else ""
 */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
  } catch {
    return "This browser has no room left for conversations: export some and delete them.";
  }
  events.dispatchEvent(new Event("changed"));
  return "";
}

export function rename(id, title) {
  const conversation = load(id);
  if (!conversation) return;
  save({ ...conversation, title });
  events.dispatchEvent(new CustomEvent("renamed", { detail: { id, title } }));
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
  parsed.delete(id);
  events.dispatchEvent(new CustomEvent("removed", { detail: { id } }));
  events.dispatchEvent(new Event("changed"));
}

/** The saved chat templates, {name: source}, by name. */
export function templates() {
  const keys = Array.from({ length: localStorage.length }, (_, index) => localStorage.key(index));
  const names = keys.filter((key) => key.startsWith(TEMPLATE_PREFIX)).map((key) => key.slice(TEMPLATE_PREFIX.length));
  return Object.fromEntries(names.sort().map((name) => [name, localStorage.getItem(TEMPLATE_PREFIX + name)]));
}

/** Keeps a chat template, in place of one of the same name. Raises an Error that says why it can't be. */
export function saveTemplate(name, source) {
  const kept = name.trim();
  if (!kept) throw new Error("Give the template a name to save it.");
  if (kept.length > MAX_TEMPLATE_NAME) throw new Error(`A name may have ${MAX_TEMPLATE_NAME} characters.`);
  if (!source.trim()) throw new Error("The template is empty.");
  if (source.length > MAX_TEMPLATE) throw new Error(`A template may have ${MAX_TEMPLATE} characters.`);
  const others = Object.keys(templates()).filter((each) => each !== kept);
  if (others.length >= MAX_TEMPLATES) throw new Error(`At most ${MAX_TEMPLATES} templates are kept; delete one.`);
  try {
    localStorage.setItem(TEMPLATE_PREFIX + kept, source);
  } catch {
    throw new Error("This browser has no room left for templates: delete some, or old conversations.");
  }
}

export function removeTemplate(name) {
  localStorage.removeItem(TEMPLATE_PREFIX + name);
}

/** Which conversation this tab shows; kept over a reload, and no other tab's business. */
export const current = {
  get: () => sessionStorage.getItem("pagewire.current"),
  set(id) {
    sessionStorage.setItem("pagewire.current", id);
    events.dispatchEvent(new CustomEvent("opened", { detail: { id } }));
  },
};

/** The message that this tab's person has begun to write; kept over a reload, by whoever. */
export const draft = {
  get: () => sessionStorage.getItem("pagewire.draft") ?? "",
  set(text) {
    try {
      sessionStorage.setItem("pagewire.draft", text);
    } catch {
      sessionStorage.removeItem("pagewire.draft"); // no room for so much
    }
  },
};

/** The text of an export file. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * Takes the conversations of an export file in; those that are here already get a new id.
 * @returns {number} how many
 * Raises an Error that says what is wrong with the file; then nothing of it was taken.
 */
export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  if (!isObject(file) || file.format !== FORMAT)
    throw new Error(`The file is no export of conversations: its "format" must be "${FORMAT}".`);
  if (file.version !== 1) throw new Error(`The file's version is ${JSON.stringify(file.version)}; this page knows version 1.`);
  if (!Array.isArray(file.conversations)) throw new Error('"conversations" must be a list.');
  if (file.conversations.length > MAX_CONVERSATIONS)
    throw new Error(`The file has ${file.conversations.length} conversations; at most ${MAX_CONVERSATIONS} are taken.`);
  const checked = file.conversations.map((item, index) => checkConversation(item, `conversations[${index}]`));
  const written = [];
  for (const conversation of checked) {
    const id = conversation.id && localStorage.getItem(PREFIX + conversation.id) === null ? conversation.id : newId();
    const problem = save({ ...conversation, id });
    if (problem) {
      written.forEach(remove);
      throw new Error(problem);
    }
    written.push(id);
  }
  return checked.length;
}

/** A conversation with the fields that this page knows and no others. Raises an Error that names what is wrong. */
export function checkConversation(item, path) {
  if (!isObject(item)) throw new Error(`${path} must be an object.`);
  if (!Array.isArray(item.messages)) throw new Error(`${path}.messages must be a list.`);
  if (item.messages.length > MAX_MESSAGES) throw new Error(`${path}.messages has more than ${MAX_MESSAGES}.`);
  return {
    id: typeof item.id === "string" && /^[\w-]{1,64}$/.test(item.id) ? item.id : "",
    title: text(item.title ?? "", `${path}.title`),
    created: time(item.created),
    updated: time(item.updated),
    messages: item.messages.map((message, index) => checkMessage(message, `${path}.messages[${index}]`)),
    settings: checkSettings(item.settings ?? null, `${path}.settings`),
    template: checkTemplate(item.template ?? null, `${path}.template`),
  };
}

function checkMessage(message, path) {
  if (!isObject(message)) throw new Error(`${path} must be an object.`);
  if (!ROLES.includes(message.role)) throw new Error(`${path}.role must be "user" or "assistant".`);
  const checked = { role: message.role, text: text(message.text, `${path}.text`) };
  for (const name of ["reasoning", "error", "figures", "model"])
    if (message[name] !== undefined) checked[name] = text(message[name], `${path}.${name}`);
  if (message.attachments !== undefined) {
    if (!Array.isArray(message.attachments)) throw new Error(`${path}.attachments must be a list.`);
    checked.attachments = message.attachments.map((file, index) => ({
      name: text(file?.name, `${path}.attachments[${index}].name`),
      text: text(file?.text, `${path}.attachments[${index}].text`),
    }));
  }
  return checked;
}

// Values of the page's controls, which check them again: flat, and nothing but text and numbers.
function checkSettings(settings, path) {
  if (settings === null) return null;
  if (!isObject(settings)) throw new Error(`${path} must be an object.`);
  for (const [name, value] of Object.entries(settings))
    if (value !== null && !["string", "number", "boolean"].includes(typeof value))
      throw new Error(`${path}.${name} must be text or a number.`);
  return settings;
}

function checkTemplate(template, path) {
  if (template === null) return null;
  if (!isObject(template)) throw new Error(`${path} must be an object.`);
  return { name: text(template.name, `${path}.name`), source: text(template.source, `${path}.source`) };
}

function text(value, path) {
  if (typeof value !== "string") throw new Error(`${path} must be text.`);
  if (value.length > MAX_TEXT) throw new Error(`${path} is too long.`);
  return value;
}

function time(value) {
  return Number.isFinite(value) ? value : Date.now();
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

// Another tab wrote.
addEventListener("storage", (event) => {
  if (event.key === null || event.key.startsWith(PREFIX)) events.dispatchEvent(new CustomEvent("changed", { detail: event.key }));
});
