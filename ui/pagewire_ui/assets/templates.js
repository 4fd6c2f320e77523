// Chat templates as files, and for the chat. A file's text goes into the editor and nowhere else.

import { useTemplate } from "./chat.js";
import { download, el, pickText } from "./dom.js";

/** The editor's text, its name and a note, after a file was chosen. */
export async function importFile(source, name, maxBytes) {
  try {
    const file = await pickText(".jinja,.jinja2,.j2,.txt", maxBytes);
    if (!file) return [source, name, ""];
    const stem = file.name.replace(/\.(jinja2?|j2|txt)$/, "").slice(0, 80);
    return [file.text, stem, note("pw-note", "status", `Imported ${file.name}.`)];
  } catch (error) {
    return [source, name, note("problem", "alert", error.message)];
  }
}

/** Saves the editor's text as a file. */
export function exportFile(source, name) {
  const stem = (name || "chat_template").replace(/[^\w .-]/g, "_");
  download(`${stem}.jinja`, source ?? "", "text/plain");
  return [];
}

/** Makes the chat's prompts by the template; for the model's own one there is nothing to say. */
export function useForChat(title, argument) {
  if (argument === "default") useTemplate(null);
  else if (argument) useTemplate({ name: title || "edited", source: argument });
  return [title, argument];
}

// A gr.HTML component takes HTML: the text is escaped by the browser itself.
function note(style, role, text) {
  return el("div", { class: style, role }, text).outerHTML;
}
