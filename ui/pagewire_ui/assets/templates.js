// The list of chat templates, and what is done with the text in the editor. All of it is decided here, by what the editor
// and the list hold at that moment: the server only tells which templates a model has.

import { useTemplate } from "./chat.js";
import { download, pickText } from "./dom.js";
import { problem, said, update } from "./outputs.js";
import * as store from "./store.js";

const OWN = "Model: ";
const SAVED = "Saved: ";

// What the server told, {templates: {name: source}, note}, and the text that the list put into the editor.
let library = { templates: {}, note: "" };
let loaded = null;

// All templates by the name that the list shows.
function named() {
  const saved = Object.entries(store.templates()).map(([name, source]) => [SAVED + name, source]);
  return { ...library.templates, ...Object.fromEntries(saved) };
}

function listed(chosen) {
  return update({ choices: Object.keys(named()).map((name) => [name, name]), value: chosen });
}

// The editor has its own line ends.
function same(one, other) {
  const plain = (text) => (text ?? "").replace(/\r\n?/g, "\n");
  return plain(one) === plain(other);
}

/**
 * Outputs list, editor and note, after the server told a model's templates. A text that nobody changed follows the model;
 * one that somebody wrote stays.
 * @param told {templates, note}; templates are null where they are not known
 */
export function took(told, [chosen, source]) {
  if (!told.templates) return [undefined, undefined, told.note];
  library = told;
  const all = named();
  const name = chosen in all ? chosen : Object.keys(all)[0];
  if (source && !same(source, loaded)) return [listed(name), undefined, told.note];
  loaded = all[name];
  return [listed(name), loaded, told.note];
}

/** Outputs editor and name, after a template was chosen or is to be restored. */
export function chose(chosen) {
  const source = named()[chosen];
  if (source === undefined) return [];
  loaded = source;
  return [source, chosen.startsWith(SAVED) ? chosen.slice(SAVED.length) : ""];
}

/** Outputs list and note, after the text is to be saved. */
export function save(name, source) {
  try {
    store.saveTemplate(name ?? "", source ?? "");
  } catch (error) {
    return [undefined, problem(error.message)];
  }
  return [listed(SAVED + name.trim()), said("Saved in this browser.")];
}

/** Outputs list and note, after a saved template is to be deleted. */
export function remove(chosen) {
  const name = (chosen ?? "").slice(SAVED.length);
  if (!chosen?.startsWith(SAVED) || !(name in store.templates())) return [undefined, problem("Only saved templates can be deleted.")];
  store.removeTemplate(name);
  return [listed(Object.keys(named())[0]), said(`Deleted ${name}.`)];
}

/** Outputs editor, name and note, after a file was chosen. */
export async function importFile(maxBytes) {
  try {
    const file = await pickText(".jinja,.jinja2,.j2,.txt", maxBytes);
    if (!file) return [];
    const stem = file.name.replace(/\.(jinja2?|j2|txt)$/, "").slice(0, store.MAX_TEMPLATE_NAME);
    return [file.text, stem, said(`Imported ${file.name}.`)];
  } catch (error) {
    return [undefined, undefined, problem(error.message)];
  }
}

/** Saves the text as a file. */
export function exportFile(source, name) {
  const stem = (name || "chat_template").replace(/[^\w .-]/g, "_");
  download(`${stem}.jinja`, source ?? "", "text/plain");
  return [];
}

/** Outputs tabs and note, after the chat's prompts are to be made by the text. */
export function useForChat(chosen, source) {
  if (!source?.trim()) return [undefined, problem("The template is empty.")];
  const own = Object.keys(library.templates).find((name) => name.startsWith(OWN) && same(library.templates[name], source));
  const argument = own ? own.slice(OWN.length) : source;
  // For the model's own one there is nothing to say.
  useTemplate(argument === "default" ? null : { name: titleOf(chosen, source), source: argument });
  return [update({ selected: "chat" }), library.note];
}

// What people call the text: the name in the list that it began as.
function titleOf(chosen, source) {
  const templates = named();
  if (!(chosen in templates)) return "edited";
  const name = chosen.slice(chosen.indexOf(": ") + 2);
  return same(templates[chosen], source) ? name : `${name} (edited)`;
}
