// All runs: state, progress, headline, what differs from the run before; filter and sort as one types.
import { Button, Empty, Failure, Filter, Loading, Progress, Sparkline, State, Table, Tag, ago, clock, go, href, html, literal, matcher, num, setParams, toggled, useData, useKeys, useMemo, useState } from "./ui.js";

const headline = (run) => Object.entries(run.headline || {})[0] || [];
const change = ({ path, before, after }) => `${path.split(".").slice(-2).join(".")} ${literal(before)} → ${literal(after)}`;
const words = (run) => [run.run, run.kind, run.state, ...(run.tags || []), ...Object.keys(run.headline || {}), ...(run.diff || []).map(change)].join(" ");

const Diff = ({ run: { diff = [], versus } }) => {
	if (!diff.length) return versus && html`<span class="faint" title="as ${versus}">same spec</span>`;
	return html`<div class="diff-cell" title=${`against ${versus}\n` + diff.map(change).join("\n")}>${diff.slice(0, 3).map((one) => html`<${Tag}>${change(one)}<//>`)}${diff.length > 3 && html`<span class="faint small">+${diff.length - 3}</span>`}</div>`;
};

const COLUMNS = [
	{ key: "run", label: "Run", show: (id, run) => html`<a href=${href("run", id)} data-run=${id}>${run.name}</a> <span class="faint mono id">${run.id}</span>` },
	{ key: "state", label: "State", show: (state, run) => html`<span title=${run.reason}><${State} state=${state} /></span>` },
	{ key: "progress", label: "Progress", hide: true, value: ({ progress }) => progress?.share, show: (_, { progress }) => progress && html`<${Progress} ...${progress} />` },
	{ key: "headline", label: "Headline", kind: "right", hint: "the metric that the run is judged by", value: (run) => headline(run)[1], show: (value, run) => headline(run)[0] && html`<span class="faint small hide-phone">${headline(run)[0]}</span> <b>${num(value)}</b>` },
	{ key: "spark", label: "", hide: true, render: (run) => html`<${Sparkline} values=${run.spark} label=${headline(run)[0]} />` },
	{ key: "kind", label: "Kind", kind: "muted", hide: true, show: (kind, { seeds = [], tags }) => html`<span title="${seeds.length} seeds">${kind}${seeds.length > 1 && ` × ${seeds.length}`}</span> ${tags?.map((tag) => html`<${Tag} tone="info">${tag}<//> `)}` },
	{ key: "diff", label: "Changed", hide: true, hint: "spec fields that differ from the next older run of the same name", value: (run) => run.diff?.length, show: (_, run) => html`<${Diff} run=${run} />` },
	{ key: "created", label: "Started", kind: "right muted", hide: true, show: (when) => html`<span title=${clock(when)}>${ago(when)}</span>` },
];

export default function Runs({ params: { q = "", sort = "-created" } }) {
	const { data, error, reload } = useData("runs", {}, { every: 2000 });
	const [picked, setPicked] = useState([]), [at, setAt] = useState(null);
	const runs = data?.runs || [];
	const shown = useMemo(() => {
		const fits = matcher(q);
		return runs.filter((run) => fits(words(run)));
	}, [data, q]);
	const pick = (id) => setPicked((old) => toggled(old, id));
	const compare = () => picked.length > 1 && go("compare", "", { runs: picked.join(",") });
	const move = (step) => () => {
		const links = [...document.querySelectorAll("a[data-run]")];
		const next = links[Math.max(0, Math.min(links.length - 1, links.findIndex((link) => link.dataset.run === at) + step))];
		setAt(next?.dataset.run);
		next?.scrollIntoView({ block: "nearest" });
	};
	useKeys({
		j: [move(1), "next run"],
		k: [move(-1), "previous run"],
		Enter: [() => (at ? go("run", at) : false), "open the run"],
		x: [() => at && pick(at), "pick the run for a comparison"],
		c: [compare, "compare the picked runs"],
	}, "Runs");
	const box = { key: "pick", label: "", render: ({ run }) => html`<input type="checkbox" aria-label="pick ${run}" checked=${picked.includes(run)} onChange=${() => pick(run)} />` };
	if (!data && !error) return html`<${Loading} label="Reading run folders" />`;
	const running = runs.filter((run) => run.state === "running").length;
	return html`<div class="stack">
		<${Failure} error=${error} retry=${reload} />
		<div class="row"><${Filter} value=${q} onInput=${(text) => setParams({ q: text })} placeholder="Filter runs: name, state, kind, tag, field" />
			<span class="muted grow" role="status">${shown.length === runs.length ? num(runs.length) : `${num(shown.length)} of ${num(runs.length)}`} runs${running ? `, ${running} running` : ""}</span>
			<${Button} primary=${picked.length > 1} disabled=${picked.length < 2} onClick=${compare} hint="Pick two or more runs (x), then c">Compare ${picked.length || ""}<//></div>
		<${Table} label="Runs" kind="runs" limit=${100} columns=${[box, ...COLUMNS]} rows=${shown} rowKey=${(run) => run.run} href=${(run) => href("run", run.run)} selected=${at} sort=${sort} onSort=${(next) => setParams({ sort: next })}
			empty=${runs.length ? html`<${Empty} title="No run fits this filter.">Words must all occur; <button onClick=${() => setParams({ q: null })}>show all ${runs.length}</button><//>` : html`<${Empty} title="There are no runs yet.">Start one with <code>palestra train SPEC</code>; it appears here by itself. Folders: ${(data?.roots || []).join(", ")}<//>`} />
	</div>`;
}
