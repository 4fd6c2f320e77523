// The list of the conversations that this browser keeps.

import { download, el, iconButton, pickText, problemNote } from "./dom.js";
import * as store from "./store.js";

/** Puts the list into a gr.HTML component. */
export function mount(element) {
  const items = el("ul", { class: "pw-conversations" });
  const note = el("div", { class: "pw-note", role: "status" });
  const say = (text, isProblem) => {
    note.replaceChildren(isProblem ? problemNote(text) : text);
  };
  const draw = () => {
    const kept = store.list();
    items.replaceChildren(...kept.map((conversation) => itemOf(conversation)));
    if (!kept.length) items.append(el("li", { class: "pw-none" }, "None yet."));
  };
  const newChat = () => open(store.emptyConversation().id);
  const exportAll = () => {
    const kept = store.list();
    if (!kept.length) return say("There is nothing to export yet.");
    download(`pagewire-conversations-${new Date().toISOString().slice(0, 10)}.json`, store.exported(kept));
    say(`Exported ${count(kept.length)}.`);
  };
  const importFile = async () => {
    try {
      const file = await pickText(".json,application/json", store.MAX_FILE_BYTES);
      if (file) say(`Imported ${count(store.importText(file.text))}.`);
    } catch (error) {
      say(error.message, true);
    }
  };
  element.replaceChildren(
    el("button", { type: "button", id: "new-chat", class: "pw-button primary", onclick: newChat }, "New chat"),
    el("nav", { "aria-label": "Conversations" }, items),
    el(
      "div",
      { class: "pw-row" },
      iconButton("download", "Export conversations", exportAll, { id: "export-conversations" }),
      iconButton("upload", "Import conversations", importFile, { id: "import-conversations" }),
      note,
    ),
  );
  store.events.addEventListener("changed", draw);
  store.events.addEventListener("opened", draw);
  draw();
}

function open(id) {
  store.current.set(id);
  // On a phone the sidebar covers the conversation.
  if (innerWidth < 768) document.querySelector(".sidebar.open .toggle-button")?.click();
  document.querySelector("#message textarea")?.focus();
}

function itemOf(conversation) {
  const isCurrent = conversation.id === store.current.get();
  const title = conversation.title || "Untitled";
  const opener = el(
    "button",
    { type: "button", class: "pw-open", title, "aria-current": isCurrent && "true", onclick: () => open(conversation.id) },
    title,
  );
  const rename = iconButton("edit", `Rename ${title}`, () => {
    const name = prompt("Name of the conversation", title)?.trim();
    if (name) store.rename(conversation.id, name.slice(0, 200));
  });
  const remove = iconButton("close", `Delete ${title}`, () => {
    if (!confirm(`Delete “${title}”?`)) return;
    store.remove(conversation.id);
    if (isCurrent) store.current.set(store.emptyConversation().id);
  });
  return el("li", { class: isCurrent ? "current" : null }, opener, rename, remove);
}

function count(number) {
  return number === 1 ? "1 conversation" : `${number} conversations`;
}
