// Components of all pages; also the one import of a page: preact, core.js and chart.js come with it.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { literal, num, percent, useData } from "./core.js";

export * from "./vendor/preact.js";
export * from "./core.js";
export * from "./chart.js";

export const Tag = ({ tone = "", hint, children }) => html`<span class="tag ${tone}" title=${hint}>${children}</span>`;

const TONES = { running: "info", done: "good", failed: "bad", killed: "bad", unreadable: "bad", interrupted: "warn", unfinished: "warn", pruned: "warn" };
export const State = ({ state }) => html`<span class="state ${TONES[state] || ""} ${state === "running" ? "live" : ""}">${state}</span>`;

export const Loading = ({ label = "Loading" }) => html`<p class="loading faint" role="status">${label}…</p>`;

export const Empty = ({ title, children }) => html`<div class="empty"><b>${title}</b><div class="muted">${children}</div></div>`;

export const Failure = ({ error, retry }) =>
  error && html`<div class="failure" role="alert"><span>${error.message}</span>${retry && html`<button onClick=${retry}>Try again</button>`}</div>`;

export const Button = ({ onClick, primary, active, hint, disabled, children }) =>
  html`<button class=${primary ? "primary" : ""} aria-pressed=${active === undefined ? undefined : String(!!active)} title=${hint} disabled=${disabled} onClick=${onClick}>${children}</button>`;

export const Details = ({ summary, open, children }) => html`<details open=${open}><summary>${summary}</summary>${children}</details>`;

export const Code = ({ text, wrap, label }) => html`<pre class="code ${wrap ? "wrap" : ""}" tabindex="0" aria-label=${label}>${text}</pre>`;

/** The progress of a run as the server says it. */
export function Progress({ done, total, unit = "", share = 0 }) {
  if (!total) return html`<span class="num">${num(done)} ${unit}</span>`;
  return html`<span class="progress" title="${num(done)} of ${num(total)} ${unit}s" role="progressbar" aria-valuenow=${Math.round(100 * share)} aria-label="progress"><i style=${{ width: 100 * share + "%" }}></i><span>${percent(share)}</span></span>`;
}

export const KeyValue = ({ rows }) =>
  html`<dl class="key-value">${rows.filter(([, value]) => value || value === 0).map(([key, value]) => html`<dt>${key}</dt><dd>${value}</dd>`)}</dl>`;

export const Filter = ({ value, onInput, placeholder = "Filter", hint = "Words that must all occur; -word must not. Key: /" }) =>
  html`<input class="filter" type="search" data-filter value=${value} placeholder=${placeholder} title=${hint} aria-label=${placeholder} spellcheck=${false} onInput=${(event) => onInput(event.target.value)} />`;

const pairs = (options) => options.map((one) => (typeof one === "string" ? { key: one, label: one } : one));

/** Moves focus and choice among the children of a list by arrow keys. */
const arrows = (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step) return;
  const all = [...event.currentTarget.children];
  const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
  next.focus();
  next.click();
  event.preventDefault();
};

export const Tabs = ({ tabs, active, label }) => html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${arrows}>
  ${tabs.map(({ key, label: text, href }) => html`<a key=${key} role="tab" aria-selected=${String(key === active)} tabindex=${key === active ? 0 : -1} href=${href}>${text}</a>`)}</div>`;

export const Segmented = ({ options, value, onChange, label }) =>
  html`<div class="segmented" role="radiogroup" aria-label=${label} onKeyDown=${arrows}>${pairs(options).map(
    ({ key, label: text, hint }) => html`<button key=${key} role="radio" aria-checked=${String(key === value)} tabindex=${key === value ? 0 : -1} title=${hint} onClick=${() => onChange(key)}>${text}</button>`)}</div>`;

export const Select = ({ options, value, onChange, label }) =>
  html`<label class="select"><span>${label}</span><select value=${value} onChange=${(event) => onChange(event.target.value)}>${pairs(options).map(
    ({ key, label: text }) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}</select></label>`;

/** A choice among the runs the server has. */
export function RunPicker({ value, onChange, exclude, label = "Run", filter = () => true }) {
  const { data } = useData("runs");
  const options = (data?.runs || []).filter(({ run }) => run !== exclude).filter(filter).map(({ run }) => ({ key: run, label: run }));
  return html`<${Select} label=${label} value=${value || ""} onChange=${(id) => onChange(id || null)} options=${[{ key: "", label: "none" }, ...options]} />`;
}

/** Rows, sorted by "key" or "-key" of a column, empty values last. A column has `key`, `label` (else the key), `value` of a
 *  row (else row[key]), `show` of value and row, `render` of the row (alone: not sortable), `kind` (classes), `hide` on phones. */
export function Table({ columns, rows, rowKey = (row) => row.path ?? row.name, href, selected, sort = "", onSort, limit = 200, empty, label, kind = "" }) {
  const [own, setOwn] = useState(sort);
  const [all, setAll] = useState(false);
  const order = onSort ? sort : own;
  const [key, down] = [order.replace(/^-/, ""), order[0] === "-"];
  const sorted = useMemo(() => {
    const column = columns.find((one) => one.key === key);
    if (!column) return rows;
    const value = column.value || ((row) => row[key]);
    return [...rows].sort((x, y) => {
      const [a, b] = [value(x), value(y)];
      if (a == null || b == null) return (a == null) - (b == null);
      return (down ? -1 : 1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    });
  }, [rows, order]);
  if (!rows.length) return empty || null;
  const shown = all ? sorted : sorted.slice(0, limit);
  const classes = (column) => `${column.kind || column.align || ""} ${column.hide ? "hide-phone" : ""}`;
  const cell = (column, row) => {
    if (column.render) return column.render(row);
    const value = column.value ? column.value(row) : row[column.key];
    return column.show ? column.show(value, row) : typeof value === "number" ? num(value) : value === undefined ? "" : literal(value);
  };
  return html`<div class="table-box ${kind}"><table aria-label=${label}>
    <thead><tr>${columns.map((column) => html`<th key=${column.key} scope="col" class=${classes(column)} title=${column.hint} aria-sort=${key !== column.key ? undefined : down ? "descending" : "ascending"}>
      ${column.render && !column.value ? column.label : html`<button onClick=${() => (onSort || setOwn)((order === "-" + column.key ? "" : "-") + column.key)}>${column.label ?? column.key}<i>${key !== column.key ? "" : down ? "↓" : "↑"}</i></button>`}</th>`)}</tr></thead>
    <tbody>${shown.map((row) => html`<tr key=${rowKey(row)} class="${href ? "link" : ""} ${selected && rowKey(row) === selected ? "selected" : ""}" onClick=${href && ((event) => event.target.closest("a, button, input") || (location.hash = href(row)))}>
      ${columns.map((column) => html`<td class=${classes(column)}>${cell(column, row)}</td>`)}</tr>`)}</tbody>
  </table>${shown.length < sorted.length && html`<button class="more" onClick=${() => setAll(true)}>${limit} of ${num(sorted.length)} shown: show all</button>`}</div>`;
}

/** A histogram as a filter: bars between `edges`; a click takes a bar, a drag a range, `onChange(null)` all.
 *  Keys: arrows choose, with shift a range, Escape clears. */
export function Histogram({ edges, counts, value, onChange, label, format = num, height = 56 }) {
  const [drag, setDrag] = useState(null);
  const n = counts.length;
  const [width, top] = [240, Math.max(1, ...counts)];
  const range = drag ? [Math.min(...drag), Math.max(...drag)] : value ? [edges.indexOf(value[0]), edges.indexOf(value[1]) - 1] : [0, n - 1];
  const clamp = (i) => Math.max(0, Math.min(n - 1, i));
  const pick = (a, b) => onChange([edges[Math.min(a, b)], edges[Math.max(a, b) + 1]]);
  const bin = ({ currentTarget, clientX }) => {
    const box = currentTarget.getBoundingClientRect();
    return clamp(Math.floor(((clientX - box.left) / box.width) * n));
  };
  const onKey = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape" && value) onChange(null);
    else if (step && event.shiftKey && value) pick(range[0], Math.max(range[0], clamp(range[1] + step)));
    else if (step) pick(...Array(2).fill(value ? clamp(range[0] + step) : step > 0 ? 0 : n - 1));
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const end = (event) => {
    const [a, b] = [drag?.[0] ?? bin(event), bin(event)];
    setDrag(null);
    if (a === b && value && range[0] === a && range[1] === a) onChange(null);
    else pick(a, b);
  };
  const tall = (count) => (count ? Math.max(1.5, ((height - 2) * count) / top) : 0);
  return html`<div class="histogram"><div class="row tight small"><span class="muted">${label}</span><span class="grow"></span>
      ${value || drag ? html`<button class="chip" title="Clear this filter" onClick=${() => onChange(null)}>${format(edges[range[0]])} – ${format(edges[range[1] + 1])} ×</button>` : html`<span class="faint">${num(counts.reduce((a, b) => a + b, 0))}</span>`}</div>
    <svg viewBox="0 0 ${width} ${height}" preserveAspectRatio="none" style=${{ height: height + "px" }} tabindex="0" role="group" aria-label="${label}: histogram; arrow keys choose a range, Escape clears it" onKeyDown=${onKey}
      onPointerDown=${(event) => (event.currentTarget.setPointerCapture(event.pointerId), setDrag([bin(event), bin(event)]))} onPointerMove=${(event) => drag && setDrag([drag[0], bin(event)])} onPointerUp=${end}>
      ${counts.map((count, i) => html`<g key=${i} class=${i >= range[0] && i <= range[1] ? "on" : ""}><title>${format(edges[i])} to ${format(edges[i + 1])}: ${count}</title><rect class="hit" x=${(i * width) / n} width=${width / n} y="0" height=${height} /><rect class="bar" x=${(i * width) / n + 0.5} width=${Math.max(0.5, width / n - 1)} y=${height - tall(count)} height=${tall(count)} /></g>`)}</svg>
    <div class="row tight small faint"><span>${format(edges[0])}</span><span class="grow"></span><span>${format(edges[n])}</span></div></div>`;
}

/** Fields in which specs differ: a row a field, a column a run. */
export const SpecDiff = ({ names, rows }) => html`<${Table} label="Spec differences" kind="spec-diff" rows=${rows} empty=${html`<p class="muted">The specs are the same.</p>`} columns=${[{ key: "path", label: "field", kind: "mono" },
  ...names.map((label, i) => ({ key: `${i}`, label, kind: "mono", value: ({ values }) => values[i] ?? undefined, show: (value, { values }) => html`<span class=${i && JSON.stringify(value) !== JSON.stringify(values[0] ?? undefined) ? "changed" : ""} title=${literal(value)}>${literal(value).slice(0, 80)}</span>` }))]} />`;

export function Dialog({ title, onClose, children }) {
  const box = useRef();
  useEffect(() => {
    const before = document.activeElement;
    box.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${box} aria-label=${title} onClose=${onClose} onClick=${(event) => event.target === box.current && onClose()}>
    <div class="row"><h2 class="grow">${title}</h2><button onClick=${onClose} aria-label="Close">×</button></div>${children}</dialog>`;
}
