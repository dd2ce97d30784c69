// Components of all pages; also the one import of a page: preact, core.js and chart.js come with it.
import { html, useMemo, useState } from "./vendor/preact.js";
import { literal, num, percent, setParams, useData } from "./core.js";

export * from "./vendor/preact.js";
export * from "./core.js";
export * from "./chart.js";

export const Tag = ({ tone = "", hint, children }) => html`<span class="tag ${tone}" title=${hint}>${children}</span>`;

const TONES = { running: "info", done: "good", ran: "good", complete: "good", failed: "bad", killed: "bad", unreadable: "bad", interrupted: "warn", unfinished: "warn", pruned: "warn" };
export const toneOf = (state) => TONES[state] || "";
export const State = ({ state }) => html`<span class="state ${toneOf(state)}">${state}</span>`;

export const Loading = ({ label = "Loading" }) => html`<p class="loading faint" role="status">${label}…</p>`;

export const Empty = ({ title, children }) => html`<div class="empty"><b>${title}</b><div class="muted">${children}</div></div>`;

export const Failure = ({ error, retry }) =>
	error && html`<div class="failure" role="alert"><span>${error.message}</span>${retry && html`<button onClick=${retry}>Try again</button>`}</div>`;

export const Button = ({ onClick, primary, active, hint, disabled, children }) =>
	html`<button class=${primary ? "primary" : ""} aria-pressed=${active === undefined ? undefined : String(!!active)} title=${hint} disabled=${disabled} onClick=${onClick}>${children}</button>`;

export const Details = ({ summary, open, children }) => html`<details open=${open}><summary>${summary}</summary>${children}</details>`;

export const Code = ({ text, label }) => html`<pre class="code wrap" tabindex="0" aria-label=${label}>${text}</pre>`;

export function Progress({ done, total, unit = "", share = 0 }) {
	if (!total) return html`<span class="num">${num(done)} ${unit}</span>`;
	return html`<span class="progress" title="${num(done)} of ${num(total)} ${unit}s" role="progressbar" aria-valuenow=${Math.round(100 * share)} aria-label="progress"><i style=${{ width: 100 * share + "%" }}></i><span>${percent(share)}</span></span>`;
}

// Labels and values; what is empty is left out.
export const KeyValue = ({ rows, kind = "key-value" }) =>
	html`<dl class=${kind}>${rows.filter(([, value]) => value || value === 0).map(([key, value]) => html`<div><dt>${key}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Filter = ({ value, onInput, placeholder, hint = "Key: /" }) =>
	html`<input class="filter" type="search" data-filter value=${value} placeholder=${placeholder} title=${hint} aria-label=${placeholder} spellcheck=${false} onInput=${(event) => onInput(event.target.value)} />`;

const pairs = (options) => options.map((one) => (typeof one === "object" ? one : { key: String(one), label: one }));

// Arrow keys move the focus among children; those of a choice are chosen too.
const arrows = (choose) => (event) => {
	const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], all = [...event.currentTarget.children];
	if (!step) return;
	const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
	next.focus();
	if (choose) next.click();
	event.preventDefault();
};

export const Tabs = ({ tabs, active, label }) => html`<div class="tabs" role="tablist" aria-label=${label} onKeyDown=${arrows(true)}>
	${tabs.map(({ key, label: text, href }) => html`<a key=${key} role="tab" aria-selected=${String(key === active)} tabindex=${key === active ? 0 : -1} href=${href}>${text}</a>`)}</div>`;

export const Segmented = ({ options, value, onChange, label }) =>
	html`<div class="segmented" role="radiogroup" aria-label=${label} onKeyDown=${arrows(true)}>${pairs(options).map(
		({ key, label: text, hint }) => html`<button key=${key} role="radio" aria-checked=${String(key === value)} tabindex=${key === value ? 0 : -1} title=${hint} onClick=${() => onChange(key)}>${text}</button>`)}</div>`;

export const Select = ({ options, value, onChange, label }) =>
	html`<label class="select"><span>${label}</span><select value=${value} onChange=${(event) => onChange(event.target.value)}>${pairs(options).map(
		({ key, label: text }) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}</select></label>`;

// A choice among the sessions of a run that has several, kept in the address.
export const Seeds = ({ run, seed }) => run?.seeds?.length > 1 && html`<${Select} label="seed" options=${run.seeds} value=${seed ?? String(run.seeds[0])} onChange=${(one) => setParams({ seed: one, group: null })} />`;

export function RunPicker({ value, onChange, exclude, label, none = "none", filter = () => true }) {
	const { data } = useData("runs");
	const options = (data?.runs || []).filter((one) => !exclude.includes(one.run) && filter(one)).map(({ run }) => run);
	return html`<${Select} label=${label} value=${value || ""} onChange=${(id) => onChange(id || null)} options=${[{ key: "", label: none }, ...options]} />`;
}

// Sorted by "key" or "-key" of a column, empty values last. A column has `key`, `label` (else the key), `value` of a row (else
// row[key]), `show` of value and row or `render` of the row (not sortable), `kind` (classes), `hide` on phones.
export function Table({ columns, rows, rowKey = (row) => row.path ?? row.name, href, selected, sort = "", onSort, limit = 200, empty, label, kind = "" }) {
	const [own, setOwn] = useState(sort), [all, setAll] = useState(false);
	const order = onSort ? sort : own, key = order.replace("-", ""), down = order[0] === "-";
	const valueOf = ({ value, key: name }, row) => (value ? value(row) : row[name]);
	const sorted = useMemo(() => {
		const column = columns.find((one) => one.key === key);
		return !column ? rows : [...rows].sort((x, y) => {
			const [a, b] = [valueOf(column, x), valueOf(column, y)];
			if (a == null || b == null) return (a == null) - (b == null);
			return (down ? -1 : 1) * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
		});
	}, [rows, order]);
	if (!rows.length) return empty || null;
	const shown = all ? sorted : sorted.slice(0, limit);
	const classes = ({ kind: own = "", hide }) => `${own} ${hide ? "hide-phone" : ""}`;
	const cell = (column, row) => {
		const value = valueOf(column, row);
		return column.render ? column.render(row) : column.show ? column.show(value, row) : typeof value === "number" ? num(value) : value === undefined ? "" : literal(value);
	};
	return html`<div class="table-box ${kind}"><table aria-label=${label}>
		<thead><tr>${columns.map((column) => html`<th key=${column.key} scope="col" class=${classes(column)} title=${column.hint} aria-sort=${key !== column.key ? undefined : down ? "descending" : "ascending"}>
			${column.render ? column.label : html`<button onClick=${() => (onSort || setOwn)((order === "-" + column.key ? "" : "-") + column.key)}>${column.label ?? column.key}<i>${key !== column.key ? "" : down ? "↓" : "↑"}</i></button>`}</th>`)}</tr></thead>
		<tbody>${shown.map((row) => html`<tr key=${rowKey(row)} class="${href ? "link" : ""} ${selected && rowKey(row) === selected ? "selected" : ""}" onClick=${href && ((event) => event.target.closest("a, button, input") || (location.hash = href(row)))}>
			${columns.map((column) => html`<td class=${classes(column)}>${cell(column, row)}</td>`)}</tr>`)}</tbody>
	</table>${shown.length < sorted.length && html`<button class="more" onClick=${() => setAll(true)}>${limit} of ${num(sorted.length)} shown: show all</button>`}</div>`;
}

// As a filter: a click on a bar takes it, with shift the range up to it; `onChange(null)` takes all.
export function Histogram({ edges, counts, value, onChange, label }) {
	const top = Math.max(...counts), format = (edge) => num(edge, 3), [first, last] = value ? [edges.indexOf(value[0]), edges.indexOf(value[1]) - 1] : [0, counts.length];
	const pick = (i) => ({ shiftKey }) => {
		const [a, b] = shiftKey && value ? [Math.min(i, first), Math.max(i, last)] : [i, i];
		onChange(value && a === first && b === last ? null : [edges[a], edges[b + 1]]);
	};
	return html`<div class="histogram"><div class="row tight small"><span class="muted grow">${label}</span>
			${value ? html`<button class="chip" title="Clear this filter" onClick=${() => onChange(null)}>${format(value[0])} – ${format(value[1])} ×</button>` : html`<span class="faint">${num(counts.reduce((a, b) => a + b))}</span>`}</div>
		<div class="bars" role="group" aria-label="${label}: choose a bar, or a range with shift" onKeyDown=${arrows(false)}>${counts.map((count, i) => html`<button key=${i} class=${i >= first && i <= last ? "on" : ""} tabindex=${i ? -1 : 0}
			title="${format(edges[i])} to ${format(edges[i + 1])}: ${count}" onClick=${pick(i)}><i style=${{ height: (100 * count) / top + "%" }}></i></button>`)}</div>
		<div class="row tight small faint"><span class="grow">${format(edges[0])}</span>${format(edges.at(-1))}</div></div>`;
}

export const SpecDiff = ({ names, rows }) => html`<${Table} label="Spec differences" kind="spec-diff" rows=${rows} empty=${html`<p class="muted">The specs are the same.</p>`} columns=${[{ key: "path", label: "field", kind: "mono" },
	...names.map((label, i) => ({ key: `${i}`, label, kind: "mono", value: ({ values }) => values[i] ?? undefined, show: (value, { values }) => html`<span class=${i && literal(value) !== literal(values[0] ?? undefined) ? "changed" : ""} title=${literal(value)}>${literal(value).slice(0, 80)}</span>` }))]} />`;

export const Tip = ({ box: { left, top, bottom }, children }) => html`<div class="panel tip" role="status"
	style="left:${Math.max(8, Math.min(left, innerWidth - 260))}px;${bottom + 190 < innerHeight ? `top:${bottom + 6}px` : `bottom:${innerHeight - top + 6}px`}">${children}</div>`;
