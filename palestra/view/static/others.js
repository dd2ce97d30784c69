// What is not a run: searches with their trials, pipelines with their steps, benchmarks and speedruns.
import { Code, Details, Empty, Failure, KeyValue, Loading, Progress, Segmented, Select, State, Table, duration, href, html, literal, num, percent, setParams, toneOf, useData, useState } from "./ui.js";

const WIDE = 1000, HIGH = 240;
const show = (value) => (typeof value === "number" ? num(value, 3) : literal(value));

// Trials as lines over their fields and the score; the best is marked, the worse the fainter.
function Parallel({ trials, best, sign }) {
	const axes = [...Object.keys(trials[0].values), "score"].map((name, i, all) => {
		const value = (trial) => (i < all.length - 1 ? trial.values[name] : trial.score);
		const known = [...new Set(trials.map(value))].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b)))), low = known[0], high = known.at(-1);
		const scale = typeof low !== "number" ? (one) => known.indexOf(one) : low > 0 && high > 50 * low ? Math.log : Number;
		const share = (one) => (scale(one) - scale(low)) / (scale(high) - scale(low) || 1);
		return { name, low, high, x: 70 + (i * (WIDE - 140)) / (all.length - 1), y: (trial) => HIGH - 26 - (HIGH - 60) * share(value(trial)) };
	});
	const ranked = [...trials].sort((a, b) => sign * (a.score - b.score));
	return html`<svg class="parallel" viewBox="0 0 ${WIDE} ${HIGH}" role="img" aria-label="trials over ${axes.map(({ name }) => name).join(", ")}">
		${axes.map(({ name, low, high, x }) => html`<path class="axis" d="M${x} 34V${HIGH - 26}" /><text x=${x} y="12" class="name">${name.split(".").slice(-2).join(".")}</text><text x=${x} y="27">${show(high)}</text><text x=${x} y=${HIGH - 10}>${show(low)}</text>`)}
		${ranked.map((trial, k) => html`<polyline class=${trial.trial === best ? "best" : ""} style=${{ opacity: trial.trial === best ? 1 : 0.12 + (0.6 * (k + 1)) / ranked.length }} points=${axes.map(({ x, y }) => `${x},${y(trial)}`).join(" ")}><title>trial ${trial.trial}: ${num(trial.score)} ${literal(trial.values)}</title></polyline>`)}</svg>`;
}

function Search({ search: { name, id, summary, importance } }) {
	const { trials = [], best, metric, score: top, direction } = summary, minimized = direction === "minimize";
	const scored = trials.filter(({ score }) => score !== null), address = (trial) => href("run", `${name}/${id}/trials/${trial}`);
	if (!trials.length) return html`<${Empty} title="The search has not ended.">Its trials are in the <a href=${href("", "", { q: `${name}/${id}` })}>list of runs</a>.<//>`;
	return html`<p>Trial <a href=${address(best)}>${best}</a> of ${trials.length} is the best: ${metric} <b>${num(top)}</b>.</p>
		${scored.length > 1 && html`<div class="panel scroll"><${Parallel} trials=${scored} best=${best} sign=${minimized ? -1 : 1} /></div>`}
		<div class="panel"><h3>Importance <span class="faint small">share of the variance of the score that a field explains by itself</span></h3>
			<${KeyValue} rows=${Object.entries(importance).sort((a, b) => b[1] - a[1]).map(([field, share]) => [html`<span class="mono">${field}</span>`, html`<${Progress} share=${share} total=${1} />`])} /></div>
		<${Table} label="Trials" rows=${trials} rowKey=${({ trial }) => trial} sort=${minimized ? "score" : "-score"} href=${({ trial }) => address(trial)} columns=${[
			{ key: "trial", kind: "right", show: (trial, { counted }) => (counted ? html`<a href=${address(trial)}>${trial}</a>` : trial) }, { key: "state", show: (state) => html`<${State} state=${state} />` }, { key: "score", kind: "right", show: (score, { trial }) => html`<b class=${trial === best ? "apart" : ""}>${num(score)}</b>` },
			...Object.keys(trials[0].values).map((field) => ({ key: field, kind: "right mono", value: ({ values }) => values[field] }))]} />`;
}

const Dropped = ({ counts: { dropped = {}, rows_in: all }, samples }) => Object.entries(dropped).map(([reason, n]) => html`<${Details} key=${reason} summary="dropped: ${reason}: ${num(n)}, ${percent(n / all, 1)}">
	${samples[reason]?.length ? samples[reason].map(({ id, text }) => html`<p class="sample"><span class="mono faint">${id}</span> ${text}</p>`) : html`<p class="muted">No sample was kept.</p>`}<//>`);

// Steps in columns by depth, with lines from their inputs; a click shows what a step did.
function Pipeline({ pipeline: { name, steps } }) {
	const [chosen, choose] = useState(null);
	const by = new Map(steps.map((step) => [step.address, step]));
	const inputs = (step) => (step.inputs || []).filter((input) => by.has(input));
	const depth = (step) => 1 + Math.max(-1, ...inputs(step).map((input) => depth(by.get(input))));
	const columns = [];
	const at = new Map(steps.map((step) => [step.address, [210 * depth(step), 54 * ((columns[depth(step)] ||= []).push(step) - 1)]]));
	const line = ([x, y], [u, v]) => `M${x + 180} ${y + 22}L${u + 2} ${v + 22}`;
	const step = by.get(chosen) || steps.find(({ state }) => state === "failed") || steps[0], { counts = {}, samples = {}, log } = step;
	return html`<div class="panel scroll"><svg class="graph" width=${210 * columns.length} height=${54 * Math.max(...columns.map(({ length }) => length))} role="group" aria-label="steps of ${name}">
		${steps.flatMap((one) => inputs(one).map((input) => html`<path d=${line(at.get(input), at.get(one.address))} />`))}
		${steps.map((one) => html`<g class="${toneOf(one.state)} ${one === step ? "chosen" : ""}" transform="translate(${at.get(one.address).join()})" tabindex="0" role="button" aria-label="${one.name}: ${one.state}" onClick=${() => choose(one.address)} onKeyDown=${({ key }) => key === "Enter" && choose(one.address)}>
			<rect x="2" y="2" width="178" height="40" rx="6" /><text x="12" y="19">${one.name.slice(0, 24)}</text><text class="sub" x="12" y="34">${one.state}${one.seconds && `, ${duration(one.seconds)}`}</text></g>`)}</svg></div>
		<div class="panel"><h3>${step.name} <span class="faint mono">${step.address}</span></h3><${KeyValue} rows=${[["state", html`<${State} state=${step.state} />`], ["took", step.seconds && duration(step.seconds)], ["error", step.error], ["rows", counts.rows_in != null && `${num(counts.rows_in)} in, ${num(counts.rows_out)} out`],]} /><${Dropped} counts=${counts} samples=${samples} />${log && html`<${Code} text=${log} label="Log of the step" />`}</div>`;
}

const KINDS = { searches: "palestra search SPEC", pipelines: "palestra pipeline run FILE", benchmarks: "palestra bench", speedruns: "palestra speedrun run SPEC" };

export default function Others({ params }) {
	const { data, error, reload } = useData("others", {}, { every: 10000 });
	if (!data) return error ? html`<${Failure} error=${error} retry=${reload} />` : html`<${Loading} />`;
	const kind = KINDS[params.kind] ? params.kind : Object.keys(KINDS).find((one) => data[one].length) || "searches";
	const rows = data[kind], which = params.n || "0", one = rows[which] || rows[0];
	return html`<div class="stack">
		<div class="row"><${Segmented} label="kind" value=${kind} options=${Object.keys(KINDS).map((key) => ({ key, label: `${key} ${data[key].length}` }))} onChange=${(key) => setParams({ kind: key, n: null })} />
			${one?.name && html`<${Select} label="" options=${rows.map(({ name, id = "" }, i) => ({ key: `${i}`, label: `${name} ${id}` }))} value=${which} onChange=${(n) => setParams({ n })} />`}</div>
		${data.damaged.map((message) => html`<${Failure} error=${{ message }} />`)}
		${!one ? html`<${Empty} title="No ${kind} under these folders.">Start with <code>${KINDS[kind]}</code>, or give its folder to <code>palestra view</code>.<//>`
			: kind === "searches" ? html`<${Search} search=${one} />` : kind === "pipelines" ? html`<${Pipeline} key=${which} pipeline=${one} />`
			: html`<${Table} label=${kind} rows=${rows} rowKey=${Object.values} columns=${Object.keys(one).map((key) => ({ key, kind: typeof one[key] === "number" ? "right" : "" }))} />`}
	</div>`;
}
