// Markdown to DOM nodes. The text is a model's, so nothing in it is ever parsed as HTML: tags are shown as they were
// written, images become links, and links lead to http, https and mailto alone.

import { copyFrom, el, iconButton } from "./dom.js";
import { highlighted } from "./highlight.js";

// None of these looks at a character more than a few times: a model may write a line of any length.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const DELIMITER_ROW = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const MAX_DEPTH = 8;

/** Keeps an element's children equal to a text's blocks, and leaves those that have not changed. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  /** Shows the text; while one streams, only its last block is made anew. */
  show(text) {
    const sources = blocksOf(text);
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const source of sources.slice(same)) this.element.append(blockNode(source, 0));
    this.sources = sources;
  }
}

/** The text's blocks as Markdown of their own: fenced code, lists, tables, quotes, paragraphs. */
export function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function blockEnd(lines, start) {
  const first = lines[start];
  const fence = FENCE.exec(first);
  if (fence) {
    const closing = new RegExp(`^ {0,3}${fence[1][0] === "`" ? "`" : "~"}{${fence[1].length},}\\s*$`);
    let at = start + 1;
    while (at < lines.length && !closing.test(lines[at])) at += 1;
    return Math.min(at + 1, lines.length);
  }
  if (HEADING.test(first) || RULE.test(first)) return start + 1;
  if (isTable(lines, start)) {
    let at = start + 2;
    while (at < lines.length && lines[at].includes("|")) at += 1;
    return at;
  }
  if (QUOTE.test(first)) return endWhere(lines, start, (line) => !line.trim());
  if (ITEM.test(first)) return listEnd(lines, start);
  return endWhere(lines, start, (line, at) => !line.trim() || begins(lines, at));
}

function endWhere(lines, start, ends) {
  let at = start + 1;
  while (at < lines.length && !ends(lines[at], at)) at += 1;
  return at;
}

function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && DELIMITER_ROW.test(lines[at + 1].trim());
}

// A list goes on over blank lines while items or indented lines follow.
function listEnd(lines, start) {
  let at = start + 1;
  let end = at;
  while (at < lines.length) {
    const line = lines[at];
    if (line.trim()) {
      const goesOn = ITEM.test(line) || /^\s{2,}/.test(line) || (lines[at - 1].trim() && !begins(lines, at));
      if (!goesOn || (RULE.test(line) && !ITEM.test(line))) break;
      end = at + 1;
    }
    at += 1;
  }
  return end;
}

function blockNode(source, depth) {
  const lines = source.split("\n");
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return codeNode(fence, lines);
  const heading = HEADING.exec(first);
  // The page's own headings stand above those of an answer.
  if (heading) return el(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(withoutEnd(heading[2], "#").trim()));
  if (RULE.test(first)) return el("hr");
  if (isTable(lines, 0)) return tableNode(lines);
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    const inner = lines.map((line) => QUOTE.exec(line)?.[1] ?? line).join("\n");
    return el("blockquote", {}, ...blocksOf(inner).map((block) => blockNode(block, depth + 1)));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return listNode(lines, depth);
  return el("p", {}, ...withBreaks(lines));
}

function codeNode(fence, lines) {
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
  const source = lines.slice(1, closed ? -1 : undefined).join("\n");
  const language = /^[\w+#.-]*/.exec(fence[2].trim())[0].toLowerCase();
  const copy = iconButton("copy", "Copy code", () => copyFrom(copy, source));
  const head = el("div", { class: "pw-code-head" }, el("span", {}, language || "text"), copy);
  const body = el("pre", { tabindex: "0", "aria-label": `Code${language ? `, ${language}` : ""}` }, highlighted(source, language));
  return el("div", { class: "pw-code" }, head, body);
}

function tableNode(lines) {
  const aligns = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) =>
    el("tr", {}, ...cells(line).map((cell, index) => el(tag, { class: `pw-${aligns[index] ?? "left"}` }, ...inline(cell))));
  return el(
    "div",
    { class: "pw-table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")))),
  );
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function listNode(lines, depth) {
  const { 1: indent, 2: mark } = ITEM.exec(lines[0]);
  const ordered = /\d/.test(mark);
  const start = ordered ? parseInt(mark, 10) : 1;
  const list = el(ordered ? "ol" : "ul", ordered && start !== 1 ? { start: String(start) } : {});
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && (!items.length || found[1].length <= indent.length + 1)) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^ {1,4}|^\t/, ""));
  }
  list.append(...items.map((source) => itemNode(source, depth)));
  return list;
}

function itemNode(source, depth) {
  const node = el("li");
  const task = /^\[([ xX])\]\s+/.exec(source[0]);
  if (task) {
    source[0] = source[0].slice(task[0].length);
    const done = task[1] !== " ";
    node.append(el("span", { role: "img", "aria-label": done ? "done" : "to do" }, done ? "☑ " : "☐ "));
  }
  blocksOf(source.join("\n")).forEach((block, index) => {
    const made = blockNode(block, depth + 1);
    if (index === 0 && made.tagName === "P") node.append(...made.childNodes);
    else node.append(made);
  });
  return node;
}

// The text without these characters, and white space, at its end.
function withoutEnd(text, characters) {
  let end = text.length;
  while (end && (characters.includes(text[end - 1]) || /\s/.test(text[end - 1]))) end -= 1;
  return text.slice(0, end);
}

function withBreaks(lines) {
  return lines.flatMap((line, index) => (index ? [el("br"), ...inline(line)] : inline(line)));
}

const INLINE = /\\([\\`*_{}[\]()#+.!|~<>-])|(`+)|!?\[|\*\*|__|~~|\*|_|https?:\/\/[^\s<>"')\]]+/g;
const PAIRS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** Nodes for a line's emphasis, code and links. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  // What was found to have no end is not looked for again: a line of a thousand stars stays cheap.
  const endless = new Set();
  for (const match of text.matchAll(INLINE)) {
    if (match.index < at) continue;
    plain += text.slice(at, match.index);
    at = match.index;
    const found = piece(text, match, depth, endless);
    if (found === null) {
      plain += match[0];
      at += match[0].length;
    } else if (typeof found.node === "string") {
      plain += found.node;
      at = found.end;
    } else {
      flush();
      nodes.push(found.node);
      at = found.end;
    }
  }
  plain += text.slice(at);
  flush();
  return nodes;
}

function piece(text, match, depth, endless) {
  const at = match.index;
  const mark = match[0];
  if (match[1] !== undefined) return { node: match[1], end: at + 2 };
  if (match[2] !== undefined) return codeSpan(text, at, mark, endless);
  if (mark.startsWith("http")) {
    const url = withoutEnd(mark, ".,;:!?*_");
    return { node: link(url, [url]), end: at + url.length };
  }
  if (depth >= MAX_DEPTH) return null;
  if (mark.endsWith("[")) return linkAt(text, at, mark, depth, endless);
  return emphasis(text, at, mark, depth, endless);
}

function codeSpan(text, at, mark, endless) {
  if (endless.has(mark)) return null;
  for (let end = text.indexOf(mark, at + mark.length); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (text[end + mark.length] === "`" || text[end - 1] === "`") continue;
    const inner = text.slice(at + mark.length, end);
    return { node: el("code", {}, inner.length > 2 ? inner.replace(/^ (.*) $/, "$1") : inner), end: end + mark.length };
  }
  endless.add(mark);
  return null;
}

function linkAt(text, at, mark, depth, endless) {
  if (endless.has("[")) return null;
  const inner = text.indexOf("[", at + mark.length);
  const middle = text.indexOf("](", at);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0) {
    endless.add("[");
    return null;
  }
  if (inner >= 0 && inner < middle) return null;
  const label = text.slice(at + mark.length, middle);
  const address = text.slice(middle + 2, end).trim().split(/\s+["']/)[0];
  const shown = inline(label || address, depth + 1);
  return { node: link(address, mark === "![" ? ["🖼 ", ...shown] : shown), end: end + 1 };
}

function link(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // relative, or nothing at all
  }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return el("span", { class: "pw-dead-link" }, ...children);
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function emphasis(text, at, mark, depth, endless) {
  const start = at + mark.length;
  const inWord = mark.startsWith("_") && /\w/.test(text[at - 1] ?? "");
  if (endless.has(mark) || inWord || !text[start] || /\s/.test(text[start])) return null;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const longer = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const wordGoesOn = mark.startsWith("_") && /\w/.test(text[end + mark.length] ?? "");
    if (longer || wordGoesOn || /\s/.test(text[end - 1])) continue;
    return { node: el(PAIRS[mark], {}, ...inline(text.slice(start, end), depth + 1)), end: end + mark.length };
  }
  endless.add(mark);
  return null;
}
