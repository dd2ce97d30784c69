// Datasets under the folders given, or of a run: rows as they are and as training sees them, page by page.
import { Button, Empty, Failure, Filter, Loading, Table, bytes, href, html, matcher, num, parse, setParams, useData, useEffect, useKeys, useRested, useState } from "./ui.js";
import { visible } from "./tokens.js";

// A row as tokens; those that the loss is computed on are colored.
const Tokens = ({ part: { name, error, tokens = [], texts, mask, more } }) => error ? html`<p class="warn small">${name} is not trained on: ${error}</p>`
	: html`<div class="ro-role">${name} ${num(tokens.length + more)} tokens${mask && `, ${num(mask.filter(Boolean).length)} trained on`}</div>
		<div class="ro-text tokens" dir="auto">${tokens.map((id, i) => html`<span class=${!mask || mask[i] ? "trained" : ""} title="${id} at ${i}">${texts ? visible(texts[i]) || "·" : id}</span>`)}${more > 0 && ` … ${num(more)} more`}</div>`;

const Row = ({ row, content, parts }) => html`<article class="panel stack" aria-label="row ${row}"><span class="faint small">row ${num(row)}</span>
	${content !== undefined && html`<pre class="ro-text">${visible(typeof content === "string" ? content : JSON.stringify(content, null, 1))}</pre>`}${parts.map((part) => html`<${Tokens} part=${part} />`)}</article>`;

function Rows({ run, path, params }) {
	const text = useRested(params.text, 300), row = Number(params.row || 0);
	const { data, error, fresh } = useData("data/rows", { run, path, row, text }), { rows = [], next } = data ?? {};
	const to = (one, push = true) => one != null && setParams({ row: one }, { push });
	const searching = fresh && text && !rows.length && next !== null;
	useEffect(() => void (searching && to(next, false)), [searching, next]);
	useKeys({ l: [() => to(next), "next rows"], h: [() => history.back(), "back"] }, "Data");
	return html`<div class="row"><a href=${href(parse().page, run)}>all datasets</a><b class="mono wrap">${path}</b><span class="grow"></span>
			<label class="ro-step small">row <input type="number" class="num" min="0" value=${row} onChange=${({ target: { value } }) => to(value || 0)} /></label>
			<${Filter} value=${params.text ?? ""} onInput=${(typed) => setParams({ text: typed, row: null })} placeholder="text in a row" />
			<${Button} disabled=${next == null} onClick=${() => to(next)} hint="next rows (l)">next<//></div>
		<${Failure} error=${error} />${!data && !error ? html`<${Loading} />` : searching ? html`<p class="muted" role="status">Searched ${num(next)} rows …</p>` : rows.map((one) => html`<${Row} key=${one.row} ...${one} />`)}
		${fresh && !error && !searching && !rows.length && html`<${Empty} title=${text ? "No row has this text." : "No row here."}>Row 0 is the first.<//>`}`;
}

export default function Data({ id, params }) {
	const run = id || undefined, { data, error } = useData(params.path ? null : "data", { run }), [typed, setTyped] = useState("");
	if (params.path) return html`<div class="stack"><${Rows} key=${params.path} run=${run} path=${params.path} params=${params} /></div>`;
	if (!data) return error ? html`<${Failure} error=${error} />` : html`<${Loading} />`;
	const sets = data.sets.filter(({ path }) => matcher(typed)(path)), page = run ? "examples" : "data";
	return html`<div class="stack"><div class="row"><${Filter} value=${typed} onInput=${setTyped} placeholder="Find a dataset" /><span class="faint">${num(sets.length)} datasets</span></div>
		${data.missing.map((one) => html`<p class="muted">${one}</p>`)}
		<${Table} label="Datasets" rows=${sets} rowKey=${({ source, path }) => source + path} empty=${html`<${Empty} title="No datasets under these folders.">Files of JSON lines, Parquet and Arrow, and token stores are shown.<//>`} columns=${[...(run ? [{ key: "source" }] : []),
			{ key: "path", kind: "mono wrap", show: (path) => html`<a href=${href(page, run, { path })}>${path}</a>` }, { key: "tokens", label: "kind", show: (tokens) => (tokens ? "tokens" : "rows") }, { key: "bytes", label: "size", kind: "right", show: bytes }]} /></div>`;
}
