// What a run's folder holds: the resolved spec with origins, manifest and diff; the log; checkpoints and files.
import { Details, Empty, Failure, Filter, KeyValue, Loading, Seeds, Table, Tag, bytes, html, literal, matcher, num, url, useData, useEffect, useRef, useState } from "./ui.js";

const flat = (value, path = "") =>
	value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
		? Object.entries(value).flatMap(([key, inner]) => flat(inner, path ? `${path}.${key}` : key))
		: [{ path, value }];

export function Spec({ run, params }) {
	const [typed, setTyped] = useState("");
	if (!run) return html`<${Loading} />`;
	const { origins = {}, sessions } = run, session = sessions.find(({ seed }) => String(seed) === params.seed) || sessions[0] || {};
	const origin = (path) => origins[path] ?? Object.entries(origins).find(([key]) => path.startsWith(key + "."))?.[1] ?? "default";
	const fits = matcher(typed);
	const rows = flat(run.spec || {}).filter(({ path, value }) => fits(`${path} ${literal(value)} ${origin(path)}`));
	return html`<div class="stack">
		<div class="row"><${Filter} value=${typed} onInput=${setTyped} placeholder="Find a field" />
			<span class="faint">${num(rows.length)} fields; <code>-default</code> leaves out what was not given</span></div>
		<${Table} label="Resolved spec" limit=${400} rows=${rows} empty=${html`<${Empty} title="No field fits." />`} columns=${[
			{ key: "path", label: "field", kind: "mono" },
			{ key: "value", kind: "mono wrap", value: (row) => literal(row.value) },
			{ key: "from", kind: "faint small", hide: true, value: (row) => origin(row.path) }]} />
		<div class="row"><h2>Manifest</h2><${Seeds} run=${run} seed=${params.seed} /></div>
		<div class="panel"><${KeyValue} rows=${Object.entries(session.manifest || {}).map(([key, value]) => [key, html`<span class="mono">${key === "command" ? value.join(" ") : literal(value).replaceAll('","', '", "')}</span>`])} /></div>
		${session.diff && html`<${Details} summary="Uncommitted changes (git.diff)" open><pre class="code" tabindex="0">${session.diff.split("\n").slice(0, 5000).map((line) => html`<div class=${{ "+": "good", "-": "bad", "@": "info" }[line[0]]}>${line || " "}</div>`)}</pre><//>`}
	</div>`;
}

export function Log({ id, run, params: { seed } }) {
	const [typed, setTyped] = useState(""), box = useRef(), end = useRef(true), live = !run || run.state === "running";
	const { data, error } = useData("log", { run: id, seed }, { every: live ? 2000 : 0 });
	useEffect(() => void (end.current && (box.current.scrollTop = box.current.scrollHeight)), [data, typed]);
	const lines = (data?.text || "").split("\n").filter(matcher(typed));
	return html`<div class="stack"><${Failure} error=${error} />
		<div class="row"><${Filter} value=${typed} onInput=${setTyped} placeholder="Find lines" /><${Seeds} run=${run} seed=${seed} /><span class="faint">${num(lines.length)} lines${data?.start > 0 && " of the end"}${live && ", live"}</span></div>
		<pre class="code wrap log" tabindex="0" aria-label="Log" ref=${box} onScroll=${({ currentTarget: pre }) => (end.current = pre.scrollHeight - pre.scrollTop - pre.clientHeight < 40)}>${lines.map((line) => html`<div class=${/ ERROR /.test(line) ? "bad" : / WARNING /.test(line) ? "warn" : ""}>${line || " "}</div>`)}</pre></div>`;
}

export function Files({ id, run }) {
	const { data, error, reload } = useData("files", { run: id });
	const checkpoints = (run?.sessions || []).flatMap(({ seed, checkpoints: all }) => all.map((one) => ({ ...one, seed })));
	const size = { key: "bytes", label: "size", kind: "right", show: bytes };
	return html`<div class="stack"><${Failure} error=${error} retry=${reload} />
		<h2>Checkpoints</h2>
		<${Table} label="Checkpoints" sort="-step" rows=${checkpoints} rowKey=${(row) => `${row.seed}/${row.path}`} empty=${html`<${Empty} title="No checkpoints yet." />`} columns=${[
			{ key: "seed", kind: "right" }, { key: "step", kind: "right" }, { key: "score", kind: "right", show: (score) => num(score) },
			{ key: "reasons", label: "kept as", show: (reasons) => reasons?.map((reason) => html`<${Tag} tone=${reason === "best" ? "good" : ""}>${reason}<//> `) },
			size, { key: "path", label: "folder", kind: "mono faint", hide: true }]} />
		<h2>Files</h2><${Table} label="Files" rows=${data?.files ?? []} columns=${[
			{ key: "path", kind: "mono", show: (path) => html`<a href=${url("file", { run: id, path })}>${path}</a>` }, size]} />
	</div>`;
}
