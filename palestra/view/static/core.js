// What every page needs: requests, polling, addresses, keys, and numbers as text.
import { useEffect, useRef, useState } from "./vendor/preact.js";

const query = (params = {}) => {
	const given = Object.entries(params).flatMap(([key, value]) => [value].flat().map((one) => [key, one]));
	const text = new URLSearchParams(given.filter(([, value]) => value != null && value !== "")).toString();
	return text && "?" + text;
};

// The address of an endpoint; empty parameters are left out, lists repeat.
export const url = (path, params) => "api/" + path + query(params);

// JSON of an endpoint; what it raises has the server's sentence and the status.
export async function api(path, params, { method = "GET", body, signal } = {}) {
	const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
	let response;
	try {
		response = await fetch(url(path, params), { method, signal, cache: "no-cache", ...sent });
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new Error("The server does not answer. Is `palestra view` still running?");
	}
	const answer = await response.json().catch(() => null);
	if (response.ok) return answer;
	throw Object.assign(new Error(answer?.detail || `The server answered ${response.status}.`), { status: response.status });
}

// Data of an endpoint (null: none), again every `every` ms; `fresh` says that it belongs to these parameters, not to those before.
export function useData(path, params, { every = 0 } = {}) {
	const [state, set] = useState({ data: null, error: null, loading: true });
	const key = path === null ? null : url(path, params);
	const load = useRef(() => {});
	useEffect(() => {
		if (key === null) return set({ data: null, error: null, loading: false, key });
		const control = new AbortController(), { signal } = control;
		load.current = async () => {
			try {
				set({ data: await api(path, params, { signal }), error: null, loading: false, key });
			} catch (error) {
				if (error.name !== "AbortError") set((old) => ({ ...old, error, loading: false, key }));
			}
		};
		let again = false;
		const repeat = async () => {
			if (signal.aborted) return;
			if (!again || !document.hidden) await load.current();
			again = true;
			if (every) setTimeout(repeat, every);
		};
		set((old) => ({ ...old, loading: true }));
		repeat();
		return () => control.abort();
	}, [key, every]);
	return { ...state, fresh: state.key === key, reload: () => load.current() };
}

// `value`, but only after it has rested for `ms`.
export function useRested(value, ms = 150) {
	const [rested, set] = useState(value);
	useEffect(() => {
		const timer = setTimeout(() => set(value), ms);
		return () => clearTimeout(timer);
	}, [value, ms]);
	return rested;
}

function useEvent(name, read) {
	const [value, set] = useState(read);
	useEffect(() => {
		const changed = () => set(read());
		addEventListener(name, changed);
		return () => removeEventListener(name, changed);
	}, []);
	return value;
}

// Addresses: #/page/the/id/of/a/run?key=value

export const parse = (hash = location.hash) => {
	const [path, search = ""] = hash.replace(/^#?\/?/, "").split("?");
	const [page, ...id] = path.split("/").map(decodeURIComponent);
	return { page, id: id.join("/"), params: Object.fromEntries(new URLSearchParams(search)) };
};

export const href = (page, id = "", params) => "#/" + [page, ...id.split("/").filter(Boolean)].map(encodeURIComponent).join("/") + query(params);

export const go = (page, id, params) => (location.hash = href(page, id, params));

// Changes parameters of the address (null removes one); `push` makes an entry to go back to.
export function setParams(changes, { push = false } = {}) {
	const { page, id, params } = parse();
	const next = href(page, id, { ...params, ...changes });
	if (push) location.hash = next;
	else if (next !== location.hash) {
		history.replaceState(null, "", next);
		dispatchEvent(new Event("hashchange"));
	}
}

export const useRoute = () => useEvent("hashchange", () => parse());

const keymaps = [];

addEventListener("keydown", (event) => {
	if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
	const typing = event.target.matches?.("input:not([type=checkbox], [type=range]), textarea, select");
	if (typing && event.key === "Escape") event.target.blur();
	if (typing || document.querySelector("dialog[open]")) return;
	if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
	for (const { current } of [...keymaps].reverse()) {
		if (current.map[event.key] && current.map[event.key][0](event) !== false) return event.preventDefault();
	}
});

// Keys while mounted: {j: [handler, "next group"]}; a handler that returns false passes the key on.
export function useKeys(map, group = "This page") {
	const entry = useRef();
	entry.current = { map, group };
	useEffect(() => {
		keymaps.push(entry);
		return () => keymaps.splice(keymaps.indexOf(entry), 1);
	}, []);
}

export const helpOfKeys = () => keymaps.map(({ current }) => current);

const NONE = "–";
const absent = (x) => x == null || x === "";

// A number with `digits` significant ones: 0.8312, 1,204, 3.1e-7, NaN; "–" for none.
export function num(x, digits = 4) {
	if (absent(x)) return NONE;
	if (!Number.isFinite(x)) return String(x);
	const size = Math.abs(x);
	if (size && (size < 1e-4 || size >= 1e9)) return Number(x.toPrecision(Math.max(1, digits - 1))).toExponential().replace("e+", "e");
	return size >= 10 ** digits || Number.isInteger(x) ? Math.round(x).toLocaleString("en-US") : String(Number(x.toPrecision(digits)));
}

const compact = (more) => new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3, ...more });
const [counts, sizes] = [compact(), compact({ style: "unit", unit: "byte", unitDisplay: "narrow" })];

// A large count in short: 12.3K, 4.56M.
export const short = (x) => (Math.abs(x) < 1e4 ? num(x, 3) : counts.format(x));

export const bytes = (n) => (absent(n) ? NONE : sizes.format(n));

export const percent = (share, digits = 0) => (absent(share) ? NONE : (100 * share).toFixed(digits) + " %");

const two = (n) => String(Math.floor(n)).padStart(2, "0");

// Seconds for people: 2:05:00, 1:15, 1.24 s, 830 ms, 12 µs.
export function duration(s) {
	if (s >= 60) return `${s >= 3600 ? `${Math.floor(s / 3600)}:${two((s % 3600) / 60)}` : Math.floor(s / 60)}:${two(s % 60)}`;
	const [size, unit] = s >= 1 || !s ? [1, "s"] : s >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
	return `${Number((s / size).toPrecision(3))} ${unit}`;
}

const epoch = (when) => (typeof when === "number" ? when : Date.parse(when) / 1000);

export function ago(when) {
	const s = Math.max(1, Date.now() / 1000 - epoch(when)), [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([least]) => s >= least) ?? [];
	return unit ? `${Math.floor(s / size)} ${unit} ago` : NONE;
}

export const clock = (when) => (absent(when) ? NONE : new Date(1000 * epoch(when)).toLocaleString("sv-SE"));

export const literal = (value) => (value === undefined ? NONE : typeof value === "string" ? value : typeof value === "number" ? num(value, 6) : JSON.stringify(value));

// All words that were typed must occur, `-word` must not.
export function matcher(typed) {
	const words = typed.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
	return (text) => words.every((word) => (word[0] === "-" ? !text.toLowerCase().includes(word.slice(1)) : text.toLowerCase().includes(word)));
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const color = (i) => css(`--c${i % 8}`);

// "dark" or "light"; the component is drawn again when it changes.
export const useTheme = () => useEvent("theme", () => document.documentElement.dataset.theme);

export function setTheme(theme) {
	document.documentElement.dataset.theme = theme;
	localStorage.setItem("palestra.theme", theme);
	dispatchEvent(new Event("theme"));
}
