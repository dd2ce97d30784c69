// Tokens of a trajectory: their values under a coloring, the color of a value, and the turns they stand in. No DOM.
import { num } from "./core.js";

// In the order of their keys; `far` is how far a value is from where its scale is pale, `least` what is noise there.
export const COLORINGS = [
	{ id: "logprob", label: "log-probability", values: (t) => t.logprobs, least: 1, far: (v) => -v, about: "The darker, the less likely when it was sampled" },
	{ id: "entropy", label: "entropy", values: (t) => t.entropy, least: 0.5, far: (v) => v, about: "In nats: the darker, the more open the choice was" },
	{ id: "ratio", label: "ratio", values: (t) => t.ratio, least: 0.01, far: Math.log, about: "Probability by the trainer over that by the generator" },
	{ id: "advantage", label: "advantage", values: (t) => t.advantages, least: 0.01, far: (v) => v, about: "What the loss makes more likely, and what less" },
	{ id: "version", label: "version", values: (t) => t.versions, least: 1, far: (v, newest) => newest - v, about: "Of the weights: the darker, the older" },
];

export const coloring = (id) => COLORINGS.find((one) => one.id === id) ?? COLORINGS[0];

// One scale for several trajectories, so that completions side by side compare; null without values.
export function scaleOf({ id, values, far, least }, trajectories) {
	const all = trajectories.flatMap((t) => values(t)?.filter((value, i) => t.loss_mask[i] && value != null) ?? []).sort((a, b) => a - b);
	if (!all.length) return null;
	const newest = all.at(-1), sizes = all.map((value) => Math.abs(far(value, newest))).filter(Number.isFinite).sort((a, b) => a - b);
	// An outlier in fifty does not make all others pale.
	const bound = Math.max(least, (id === "version" ? sizes.at(-1) : sizes[Math.floor(0.98 * (sizes.length - 1))]) ?? 0);
	const marks = { logprob: [-bound, -bound / 2, 0], entropy: [0, bound / 2, bound], ratio: [Math.exp(-bound), 1, Math.exp(bound)], advantage: [-bound, 0, bound], version: [newest - bound, newest] }[id];
	return { id, newest, bound, marks };
}

// -1 (below the middle of the scale) to 1; scales without a middle start at 0.
export const place = ({ id, newest, bound }, value) => (value == null ? 0 : Math.max(-1, Math.min(1, coloring(id).far(value, newest) / bound)) || 0);

// Ten levels each side, of two hues that color-blind people tell apart.
export function background(at) {
	const level = Math.round(Math.abs(at) * 10);
	return level ? `color-mix(in srgb, var(${at < 0 ? "--tk-below" : "--tk-above"}) ${level * 7}%, transparent)` : "";
}

// What follows the prompt: `model` (sampled) and `context` (feedback, tool results); of several, `turn` counts those of the model.
export function parts({ loss_mask: mask = [] }) {
	const found = [];
	let begin = mask.findIndex(Boolean), turn = 0;
	for (let end = begin; begin >= 0 && begin < mask.length; begin = end) {
		while (end < mask.length && !mask[end] === !mask[begin]) end++;
		found.push({ role: mask[begin] ? "model" : "context", begin, end, turn: mask[begin] ? ++turn : turn });
	}
	return found.length > 1 ? found : found.map((part) => ({ ...part, turn: 0 }));
}

// The name of the tool that a text calls last, as the workflow `tools` writes it.
export const toolCall = (text) => [...text.matchAll(/<(calculator|python|tool_call)>/g)].at(-1)?.[1];

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// Nothing may hide or reorder other characters: controls, zero-width and direction marks are shown.
export const visible = (text) => text.replace(HIDDEN, (mark) => {
	const code = mark.codePointAt(0);
	return code < 0x20 ? String.fromCodePoint(0x2400 + code) : `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
});

export function details(trajectory, i) {
	const { tokens, loss_mask: mask, logprobs } = trajectory;
	const rows = [...COLORINGS.map(({ label, values }) => [label, values(trajectory)?.[i]]), ["probability", logprobs && Math.exp(logprobs[i])]];
	return [["token", `${tokens[i]} at ${i}`], ...(mask[i] ? rows.filter(([, value]) => value != null).map(([label, value]) => [label, num(value)]) : [["learned from", "no, not sampled"]])];
}
