// What every page needs: requests, polling, addresses, keys, and numbers as text.
import { useCallback, useEffect, useRef, useState } from "./vendor/preact.js";

// Requests

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const query = (params = {}) => {
  const given = Object.entries(params).flatMap(([key, value]) => [value].flat().map((one) => [key, one]));
  const text = new URLSearchParams(given.filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
  return text && "?" + text;
};

/** The address of an endpoint; empty parameters are left out, lists repeat. */
export const url = (path, params) => "api/" + path + query(params);

let reachable = true;
const announce = (now) => now !== reachable && dispatchEvent(new CustomEvent("reachable", { detail: (reachable = now) }));

/** JSON of an endpoint; raises ApiError with the server's sentence. */
export async function api(path, params, { method = "GET", body, signal } = {}) {
  const sent = body === undefined ? {} : { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(url(path, params), { method, signal, cache: "no-cache", ...sent });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    announce(false);
    throw new ApiError("The server does not answer. Is `palestra view` still running?", 0);
  }
  announce(true);
  const answer = await response.json().catch(() => null);
  if (response.ok) return answer;
  throw new ApiError(typeof answer?.detail === "string" ? answer.detail : `The server answered ${response.status}.`, response.status);
}

/** Calls `work` at once and every `ms` (0: once), slowly while the page is hidden; returns what ends it. */
function repeat(work, ms) {
  let timer;
  let ended = false;
  const tick = async () => {
    clearTimeout(timer);
    await work();
    if (!ended && ms) timer = setTimeout(tick, document.hidden ? Math.max(15000, ms) : ms);
  };
  const shown = () => document.hidden || !ms || tick();
  document.addEventListener("visibilitychange", shown);
  tick();
  return () => {
    ended = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", shown);
  };
}

/** Data of an endpoint (null: none), again when the parameters change and every `every` ms. The old data stays until the new
 *  is there; `fresh` says that it belongs to these parameters. */
export function useData(path, params, { every = 0 } = {}) {
  const [state, set] = useState({ data: null, error: null, loading: true });
  const key = path === null ? null : url(path, params);
  const load = useRef(() => {});
  useEffect(() => {
    if (key === null) return set({ data: null, error: null, loading: false, key });
    const control = new AbortController();
    load.current = async () => {
      try {
        set({ data: await api(path, params, { signal: control.signal }), error: null, loading: false, key });
      } catch (error) {
        if (error.name !== "AbortError") set((old) => ({ ...old, error, loading: false, key }));
      }
    };
    set((old) => ({ ...old, loading: true }));
    const end = repeat(load.current, every);
    return () => {
      end();
      control.abort();
    };
  }, [key, every]);
  return { ...state, fresh: state.key === key, reload: useCallback(() => load.current(), []) };
}

/** `value`, but only after it has rested for `ms`. */
export function useRested(value, ms = 150) {
  const [rested, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), ms);
    return () => clearTimeout(timer);
  }, [value, ms]);
  return rested;
}

/** State kept in the browser under `name`. */
export function useStored(name, initial) {
  const [value, set] = useState(() => JSON.parse(localStorage.getItem("palestra." + name)) ?? initial);
  return [value, (next) => (localStorage.setItem("palestra." + name, JSON.stringify(next)), set(next))];
}

/** State that events of the window change. */
function useEvent(name, read) {
  const [value, set] = useState(read);
  useEffect(() => {
    const changed = () => set(read());
    addEventListener(name, changed);
    return () => removeEventListener(name, changed);
  }, []);
  return value;
}

export const useReachable = () => useEvent("reachable", () => reachable);

// Addresses: #/page/the/id/of/a/run?key=value

/** The parts of an address: {page, id, params}. */
export const parse = (hash = location.hash) => {
  const [path, search = ""] = hash.replace(/^#?\/?/, "").split("?");
  const [page, ...id] = path.split("/").map(decodeURIComponent);
  return { page, id: id.join("/"), params: Object.fromEntries(new URLSearchParams(search)) };
};

export const href = (page, id = "", params) => "#/" + [page, ...id.split("/").filter(Boolean)].map(encodeURIComponent).join("/") + query(params);

export const go = (page, id, params) => (location.hash = href(page, id, params));

/** Change parameters of the present address (null removes one); `push` makes an entry to go back to. */
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

// Keys

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

/** Keys while mounted: {j: [handler, "next group"]}, in the help under `group`. A handler that returns false passes the key on. */
export function useKeys(map, group = "This page") {
  const entry = useRef();
  entry.current = { map, group };
  useEffect(() => {
    keymaps.push(entry);
    return () => keymaps.splice(keymaps.indexOf(entry), 1);
  }, []);
}

/** All keys that work now: [{group, map}]. */
export const helpOfKeys = () => keymaps.map(({ current }) => current);

// Numbers and times as text

const NONE = "–";
const absent = (x) => x === null || x === undefined || x === "";

/** A number with `digits` significant ones: 0.8312, 1,204, 3.1e-7, NaN; "–" for none. */
export function num(x, digits = 4) {
  if (absent(x)) return NONE;
  if (typeof x !== "number" || !Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return Number(x.toPrecision(Math.max(1, digits - 1))).toExponential().replace("e+", "e");
  return size >= 10 ** digits || Number.isInteger(x) ? Math.round(x).toLocaleString("en-US") : String(Number(x.toPrecision(digits)));
}

/** A large count in short: 12.3k, 4.56M. */
export function short(x) {
  const [unit, size] = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, least]) => Math.abs(x) >= Math.max(1e4, least)) || [];
  return unit ? Number((x / size).toPrecision(3)) + unit : num(x, 3);
}

export const percent = (share, digits = 0) => (absent(share) ? NONE : (100 * share).toFixed(digits) + " %");

export function bytes(n) {
  if (absent(n)) return NONE;
  const power = n < 1 ? 0 : Math.min(4, Math.floor(Math.log10(n) / 3));
  return Number((n / 1000 ** power).toPrecision(3)) + " " + ["B", "KB", "MB", "GB", "TB"][power];
}

export function duration(seconds) {
  if (absent(seconds)) return NONE;
  if (seconds < 1) return Math.round(1000 * seconds) + " ms";
  if (seconds < 100) return Number(seconds.toPrecision(seconds < 10 ? 2 : 3)) + " s";
  if (seconds < 6000) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Number((seconds / 3600).toPrecision(3)) + " h" : Math.round(seconds / 86400) + " d";
}

const epoch = (when) => (typeof when === "number" ? when : Date.parse(when) / 1000);

/** A time (epoch seconds or ISO text) as "5 min ago". */
export const ago = (when) => (absent(when) ? NONE : Date.now() / 1000 - epoch(when) < 2 ? "now" : duration(Math.round(Date.now() / 1000 - epoch(when))) + " ago");

export const clock = (when) => (absent(when) ? NONE : new Date(1000 * epoch(when)).toLocaleString("sv-SE"));

/** A value of a spec as short text. */
export const literal = (value) => (value === undefined ? NONE : typeof value === "string" ? value : typeof value === "number" ? num(value, 6) : JSON.stringify(value));

/** A test of texts by what was typed: all words must occur, `-word` must not; case is ignored. */
export function matcher(typed) {
  const words = typed.toLowerCase().split(/\s+/).filter((word) => word && word !== "-");
  return (text) => words.every((word) => (word[0] === "-" ? !text.toLowerCase().includes(word.slice(1)) : text.toLowerCase().includes(word)));
}

// Colors and files

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** Color `i` of the eight of the palette, as text for canvas and SVG. */
export const color = (i) => css(`--c${i % 8}`);

/** "dark" or "light"; the component is drawn again when it changes. */
export const useTheme = () => useEvent("theme", () => document.documentElement.dataset.theme);

export function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("palestra.theme", theme);
  dispatchEvent(new Event("theme"));
}

/** Hand a file to the reader. */
export function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
