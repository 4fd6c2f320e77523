// Small helpers. Text enters the page as text nodes and attributes only, never as HTML.

/**
 * An element. Attributes whose name begins with "on" are listeners; false and null leave one out.
 * @param {string} tag
 * @param {Object<string, any>} attributes
 * @param {...(Node|string|null|false)} children
 */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

/** What went wrong, in words; hidden while there are none. */
export function problemNote(text) {
  return el("div", { class: "problem", role: "alert", hidden: !text }, text ?? null);
}

const ICONS = {
  attach: "M13.5 7.5 8 13a3.5 3.5 0 0 1-5-5l6-6a2.4 2.4 0 0 1 3.4 3.4l-6 6A1.2 1.2 0 0 1 4.7 9.7L10 4.4",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M6 6h7v8H6zM10 6V2H3v8h3",
  download: "M8 2v8M4.5 7 8 10.5 11.5 7M3 13.5h10",
  edit: "M3 13l.7-3L11 2.7l2.3 2.3L6 12.3zM9.5 4.2l2.3 2.3",
  retry: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4 4h8v8H4z",
  tokens: "M2 4h5v3H2zM9 4h5v3H9zM2 9h3v3H2zM7 9h7v3H7z",
  undo: "M5.5 3 2.5 6l3 3M2.5 6H10a3.5 3.5 0 0 1 0 7H7",
  upload: "M8 11V3M4.5 6.5 8 3l3.5 3.5M3 13.5h10",
};

/** A drawn symbol that says nothing to a screen reader: its button has a label. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("pw-icon", `pw-icon-${name}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with a symbol, and a label for those who can't see it or who wait above it. */
export function iconButton(name, label, onclick, attributes = {}) {
  return el("button", { type: "button", title: label, "aria-label": label, onclick, ...attributes }, icon(name));
}

/** An id that no other conversation or answer has. crypto.randomUUID is missing on plain http. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Copies a text; navigator.clipboard is missing on plain http. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { class: "pw-hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Copies a text and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const label = button.getAttribute("aria-label");
  let said = "Copied";
  try {
    await copyText(text);
  } catch {
    said = "Copying failed";
  }
  button.classList.add("done");
  button.setAttribute("aria-label", said);
  button.title = said;
  setTimeout(() => {
    button.classList.remove("done");
    button.setAttribute("aria-label", label);
    button.title = label;
  }, 1500);
}

/** Saves a text as a file of the person's. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/**
 * Asks for a file and reads it as text.
 * @returns {Promise<{name: string, text: string}|null>} null where none was chosen
 */
export function pickText(accept, maxBytes) {
  return new Promise((resolve, reject) => {
    const input = el("input", { type: "file", accept, class: "pw-hidden", "aria-hidden": "true", tabindex: "-1" });
    const done = (settle, value) => {
      input.remove();
      settle(value);
    };
    input.addEventListener("cancel", () => done(resolve, null));
    input.addEventListener("change", () => {
      const file = input.files[0];
      if (!file) return done(resolve, null);
      readText(file, maxBytes).then(
        (text) => done(resolve, { name: file.name, text }),
        (error) => done(reject, error),
      );
    });
    document.body.append(input);
    input.click();
  });
}

/** A file's text. Raises an Error in words where it is too large or no text. */
export async function readText(file, maxBytes) {
  if (file.size > maxBytes)
    throw new Error(`${file.name} has ${size(file.size)}; at most ${size(maxBytes)} are taken.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw new Error("binary");
    return text;
  } catch {
    throw new Error(`${file.name} is not text (UTF-8).`);
  }
}

/** A number of bytes for people. */
export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 1e6) return `${(bytes / 1e3).toFixed(1)} kB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}
