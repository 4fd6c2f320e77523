// Tokens as coloured pieces of their text, each with its id; on hovering, focus or a click also its likeliest
// alternatives.

import { el } from "./dom.js";

// More pieces than this would hold the browser up.
export const MAX_SHOWN = 2000;
const NUM_COLOURS = 5;

/**
 * @typedef {{id: number, text: string, bytes?: string, control?: boolean, logprob?: number, rank?: number,
 *   top?: {id: number, text: string, logprob: number}[]}} Token
 */

/** An element with all tokens; a table of alternatives opens beside the one that is looked at. */
export function tokensView(tokens, label, total = tokens.length) {
  const card = el("div", { class: "pw-token-card", role: "status", hidden: true });
  const view = el("div", { class: "pw-tokens", role: "group", "aria-label": label });
  const shown = tokens.slice(0, MAX_SHOWN);
  shown.forEach((token, index) => view.append(...pieces(token, index)));
  if (total > shown.length) view.append(el("p", { class: "pw-more" }, `… and ${total - shown.length} more tokens, which are not drawn.`));
  const root = el("div", { class: "pw-token-view" }, view, card);
  let pinned = null;
  let shownOf = null;
  const look = (target, pin) => {
    const button = target.closest?.("[data-token]");
    if (!button || (!pin && (pinned || (button === shownOf && !card.hidden)))) return;
    shownOf = button;
    pinned?.classList.remove("pinned");
    pinned = pin && pinned !== button ? button : null;
    pinned?.classList.add("pinned");
    card.replaceChildren(...cardOf(tokens[Number(button.dataset.token)], Number(button.dataset.token)));
    card.hidden = false;
    place(card, button);
  };
  // Not mouseover: that comes too when the page moves beneath a mouse that rests, while somebody goes on by the keyboard.
  view.addEventListener("mousemove", (event) => look(event.target, false));
  view.addEventListener("focusin", (event) => look(event.target, false));
  view.addEventListener("click", (event) => look(event.target, true));
  view.addEventListener("keydown", move);
  root.addEventListener("mouseleave", () => {
    if (!pinned) card.hidden = true;
  });
  root.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    pinned?.classList.remove("pinned");
    pinned = null;
    card.hidden = true;
  });
  return root;
}

// One stop for the Tab key; the arrows go from token to token.
function pieces(token, index) {
  const classes = ["pw-token", token.control ? "control" : `c${index % NUM_COLOURS}`];
  if (token.logprob !== undefined && token.rank > 1) classes.push("unlikely");
  const title = `token ${token.id}`;
  const node = el(
    "button",
    { type: "button", class: classes.join(" "), "data-token": String(index), tabindex: index ? "-1" : "0", title },
    shownAs(token),
  );
  const breaks = token.text.split("\n").length - 1;
  return [node, ...Array.from({ length: breaks }, () => el("br"))];
}

function move(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const from = event.target.closest?.("[data-token]");
  if (!step || !from) return;
  const next = event.currentTarget.querySelector(`[data-token="${Number(from.dataset.token) + step}"]`);
  if (!next) return;
  event.preventDefault();
  from.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function cardOf(token, index) {
  const facts = [`id ${token.id}`, `position ${index}`];
  if (token.control) facts.push("control token");
  if (token.bytes) facts.push(`bytes ${token.bytes}`);
  const head = el("div", {}, el("code", {}, shownAs(token)), el("span", { class: "pw-facts" }, facts.join(" · ")));
  if (!token.top?.length) return [head];
  const rows = token.top.map((other) => row(other, other.id === token.id));
  if (!token.top.some((other) => other.id === token.id)) rows.push(row(token, true));
  const names = el("tr", {}, el("th", {}, "token"), el("th", {}, "id"), el("th", {}, "probability"));
  return [head, el("table", {}, el("thead", {}, names), el("tbody", {}, ...rows))];
}

function row(token, chosen) {
  const share = Math.exp(token.logprob);
  const bar = el("span", { class: "pw-bar" });
  bar.style.width = `${Math.max(1, Math.round(share * 100))}%`;
  return el(
    "tr",
    { class: chosen ? "chosen" : null },
    el("td", {}, el("code", {}, shownAs(token)), chosen ? el("span", { class: "pw-sr" }, "chosen") : null),
    el("td", {}, String(token.id)),
    el("td", {}, `${(share * 100).toFixed(share < 0.01 ? 2 : 1)} %`, bar),
  );
}

// Below the token, or above it where there is no room; fixed, so that nothing that scrolls cuts it off.
function place(card, button) {
  const spot = button.getBoundingClientRect();
  const above = spot.bottom + card.offsetHeight + 12 > innerHeight;
  card.style.top = `${above ? Math.max(4, spot.top - card.offsetHeight - 6) : spot.bottom + 6}px`;
  card.style.left = `${Math.max(4, Math.min(spot.left, innerWidth - card.offsetWidth - 8))}px`;
}

// Part of a character is shown as its bytes.
function shownAs(token) {
  return token.bytes ? `‹${token.bytes}›` : visible(token.text) || "∅";
}

/** The text, with line ends made visible, and spaces where there is nothing else. */
export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
  return shown.trim() ? shown : shown.replaceAll(" ", "·");
}

/** Draws {label, tokens, total} into a gr.HTML component whenever Python sends it. */
export function mount(element, { props, watch }) {
  const show = () => {
    const value = props.value;
    element.replaceChildren(...(value?.tokens ? [tokensView(value.tokens, value.label, value.total)] : []));
  };
  watch("value", show);
  show();
}
