// The settings of a chat. What they hold after a choice is decided here and at once: a question that is sent right after
// it is asked with it.

import { update } from "./outputs.js";

/**
 * Outputs after a preset was chosen: whether the two groups of sliders are shown, then the sliders.
 * @param presets {name: values of the sliders}
 * @param own the name of the preset that leaves all of it to the model
 */
export function applyPreset(name, presets, own) {
  const shown = update({ visible: name !== own });
  return [shown, shown, ...(presets[name] ?? [])];
}

/**
 * Outputs for the settings that a conversation kept: its controls, then the groups of sliders. What is not among them, or
 * is no value of its control's kind, leaves it as it is.
 * @param controls [{name, kind: "number"|"boolean"|"text", least, most, choices}]
 */
export function restored(settings, controls, own) {
  const kept = settings ?? {};
  const shown = update({ visible: kept.preset !== own });
  return [...controls.map((control) => (fits(control, kept[control.name]) ? kept[control.name] : undefined)), shown, shown];
}

function fits({ kind, least, most, choices }, value) {
  if (kind === "number") return Number.isFinite(value) && least <= value && value <= most;
  if (kind === "boolean") return typeof value === "boolean";
  return typeof value === "string" && (!choices || choices.includes(value));
}

let offers = "";
let pause = null;
let suggested = false;

/**
 * Outputs after the server told its models: the page's head, the clock that asks for them, and the lists to choose the
 * chat's model and the two compared ones from. A model that was chosen stays so until it is gone.
 * @param told {head, seconds: until it is asked again, choices: [[label, value], ...], adapter: the first one, or ""};
 *   choices are null while there is no server
 * @param chosen the values of the three lists
 */
export function offered(told, chosen) {
  const clock = pause === told.seconds ? undefined : update({ value: told.seconds });
  pause = told.seconds;
  if (!told.choices) return [told.head, clock];
  const known = told.choices.map(([, value]) => value);
  const values = chosen.map((value) => (known.includes(value ?? "") ? undefined : ""));
  // Base model against the first adapter, until somebody chooses.
  if (!suggested && told.adapter && !chosen[2]) values[2] = told.adapter;
  suggested ||= Boolean(told.adapter);
  // A list that is open would close.
  const same = offers === JSON.stringify(told.choices);
  offers = JSON.stringify(told.choices);
  const lists = values.map((value) => {
    if (value !== undefined) return update({ choices: told.choices, value });
    return same ? undefined : update({ choices: told.choices });
  });
  return [told.head, clock, ...lists];
}
