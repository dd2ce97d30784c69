// Tokens of a trajectory: their values under a coloring, the color of a value, and the turns they stand in. No DOM.
import { num } from "./core.js";

/** The colorings in the order of their keys 1 to 5; `kind` is the scale of their values. */
export const COLORINGS = [
  { id: "logprob", label: "log-probability", kind: "surprise", values: (t) => t.logprobs,
    about: "Under the distribution the token was sampled from: the darker, the less likely" },
  { id: "entropy", label: "entropy", kind: "amount", values: (t) => t.entropy,
    about: "In nats, of the distribution the token was sampled from: the darker, the more open" },
  { id: "ratio", label: "ratio", kind: "ratio", values: (t) => t.ratio,
    about: "Probability by the trainer over that by the generator: 1 where both agree" },
  { id: "advantage", label: "advantage", kind: "signed", values: (t) => t.advantages,
    about: "What the loss makes more likely, and what less" },
  { id: "version", label: "version", kind: "age", values: (t) => t.versions,
    about: "Of the weights that sampled the token: the darker, the older" },
];

export const coloring = (id) => COLORINGS.find((one) => one.id === id) ?? COLORINGS[0];

// How far a value is from where its scale is pale, and what is noise there.
const OFFSETS = { surprise: (v) => -v, amount: (v) => v, signed: (v) => v, ratio: Math.log, age: (v, { high }) => high - v };
const LEAST = { surprise: 1, amount: 0.5, signed: 0.01, ratio: 0.01, age: 1 };

/** The scale of a coloring over several trajectories, so that completions side by side compare; null without values. */
export function scaleOf({ kind, values }, trajectories) {
  const all = trajectories.flatMap((t) => values(t)?.filter((value, i) => t.loss_mask[i] && value != null) ?? []).sort((a, b) => a - b);
  if (!all.length) return null;
  const first = all[0], high = all[all.length - 1];
  const far = all.map((value) => Math.abs(OFFSETS[kind](value, { high }))).filter(Number.isFinite).sort((a, b) => a - b);
  // An outlier in fifty does not make all others pale.
  const bound = Math.max(LEAST[kind], kind === "age" ? high - first : far[Math.min(far.length - 1, Math.floor(0.98 * far.length))] ?? 0);
  const [low, top] = { surprise: [-bound, 0], amount: [0, bound], signed: [-bound, bound], ratio: [Math.exp(-bound), Math.exp(bound)], age: [first, high] }[kind];
  return { kind, low, high: top, bound };
}

/** Where a value stands on its scale: -1 (below the middle) to 1; scales without a middle start at 0. */
export const place = (scale, value) => (value == null ? 0 : Math.max(-1, Math.min(1, OFFSETS[scale.kind](value, scale) / scale.bound)) || 0);

/** The background of a place, in ten levels each side, of two hues that color-blind people tell apart. */
export function background(at) {
  const level = Math.round(Math.abs(at) * 10);
  return level ? `color-mix(in srgb, var(${at < 0 ? "--tk-below" : "--tk-above"}) ${level * 7}%, transparent)` : "";
}

/** Values from one end of a scale to the other with their places; of few versions each. */
export function legend(scale) {
  const { kind, low, high, bound } = scale, steps = kind === "age" ? Math.min(9, bound + 1) : 9;
  const values = Array.from({ length: steps }, (_, i) => {
    const share = i / (steps - 1);
    return kind === "ratio" ? Math.exp((2 * share - 1) * bound) : kind === "age" ? Math.round(high - share * (high - low)) : low + share * (high - low);
  });
  return [...new Set(values)].map((value) => ({ value, at: place(scale, value) }));
}

/** What follows the prompt, as parts: `model` (sampled) and `context` (feedback, tool results), each [begin, end).
 *  Where there are several, `turn` counts those of the model. */
export function parts({ loss_mask: mask = [] }) {
  const found = [];
  let begin = mask.findIndex(Boolean), turn = 0;
  for (let end = begin; begin >= 0 && begin < mask.length; begin = end) {
    while (end < mask.length && !mask[end] === !mask[begin]) end++;
    found.push({ role: mask[begin] ? "model" : "context", begin, end, turn: mask[begin] ? ++turn : turn });
  }
  return found.length > 1 ? found : found.map((part) => ({ ...part, turn: 0 }));
}

/** The name of the tool that a text calls last, as the workflow `tools` writes it. */
export const toolCall = (text) => [...text.matchAll(/<(calculator|python|tool_call)>/g)].at(-1)?.[1];

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

/** A text in which nothing hides or reorders other characters: controls, zero-width and direction marks are shown. */
export const visible = (text) => text.replace(HIDDEN, (mark) => {
  const code = mark.codePointAt(0);
  return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
});

/** All that is known of one token, as [label, text] pairs. */
export function details(trajectory, i) {
  const { tokens, loss_mask: mask, logprobs } = trajectory;
  const rows = COLORINGS.map(({ label, values }) => [label, values(trajectory)?.[i]]).concat([["probability", logprobs && Math.exp(logprobs[i])]]);
  return [["token", `${tokens[i]} at ${i}`], ...(mask[i] ? rows.filter(([, value]) => value != null).map(([label, value]) => [label, num(value)]) : [["learned from", "no, not sampled"]])];
}
