// Colours code by what most languages share: comments, strings, numbers and usual keywords.

import { el } from "./dom.js";

const KEYWORDS = new Set(
  ("abstract and as assert async await begin bool boolean break byte case catch char class const continue def default del do " +
    "double elif else end enum except export extends false False final finally float fn for from func function global go if " +
    "impl implements import in instanceof int interface is lambda let long match mod mut namespace new nil None not null " +
    "nullptr or package pass private protected pub public raise return select self SELECT FROM WHERE JOIN GROUP ORDER BY AND " +
    "OR NOT AS INSERT UPDATE DELETE CREATE TABLE INTO VALUES SET short static string String struct super switch template this " +
    "then throw true True try type typeof union unsigned use using var virtual void where while with yield").split(" "),
);
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "dockerfile", "ini", "conf"]);
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const REST = String.raw`|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\`(?:[^\`\\]|\\.)*\`?|\b\d[\w.]*|[A-Za-z_]\w*`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const BY_HASH = new RegExp(`(#[^\\n]*)|${TRIPLE}${REST}`, "g");
const BY_SLASHES = new RegExp(`(${SLASHES})${REST}`, "g");
const BY_DASHES = new RegExp(`(--[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$))${REST}`, "g");
// More than this is shown without colours.
const MAX_CHARACTERS = 50_000;

/** A code element with the source in it. */
export function highlighted(source, language) {
  const code = el("code", { class: language ? `language-${language}` : null });
  if (!language || source.length > MAX_CHARACTERS) {
    code.append(source);
    return code;
  }
  const pattern = HASH.has(language) ? BY_HASH : language === "sql" ? BY_DASHES : BY_SLASHES;
  let at = 0;
  for (const match of source.matchAll(pattern)) {
    const kind = kindOf(match);
    if (!kind) continue;
    code.append(source.slice(at, match.index), el("span", { class: `pw-code-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  code.append(source.slice(at));
  return code;
}

function kindOf(match) {
  if (match[1] !== undefined) return "comment";
  const first = match[0][0];
  if (first === '"' || first === "'" || first === "`") return "string";
  if (first >= "0" && first <= "9") return "number";
  return KEYWORDS.has(match[0]) ? "keyword" : "";
}
