// One run, and runs beside each other: curves, of which a point opens the rollouts of its step; final values with intervals; what specs differ in.
import { Button, Chart, Code, Details, Empty, Failure, Filter, KeyValue, Loading, RunPicker, Segmented, SpecDiff, Table, Tag, api, clock, color, duration, go, href, html, matcher, num, setParams, url, useData, useKeys, useMemo, useRested, useState, useTheme } from "./ui.js";

const SHOWN = 24; // charts at once
const Z = 1.96; // of a 95 % interval

// A mean with its band, each seed, or points with error bars.
function curves({ x, mean, low, high, seeds }, error, label, each, color) {
	if (error && !low) {
		const at = new Map(error.x.map((value, i) => [value, error.mean[i]]));
		const bar = (sign) => x.map((value, i) => (mean[i] === null || at.get(value) == null ? null : mean[i] + sign * Z * at.get(value)));
		return [{ label, x, y: mean, lo: bar(-1), hi: bar(1), bars: true, color }];
	}
	if (each && seeds) return Object.entries(seeds).map(([seed, y], i) => ({ label: `seed ${seed}`, x, y, color: i }));
	return [{ label, x, y: mean, lo: low, hi: high, color }];
}

// Charts of metrics of some runs between `low` and `high` of the axis; `onStep(step, run)` opens a point.
function Charts({ runs, metrics, known, x, low, high, seeds, live, onStep, names }) {
	const errors = metrics.map((name) => name + "_se").filter((name) => known.has(name));
	const { data, error } = useData(metrics.length ? "series" : null, { run: runs, metric: [...metrics, ...errors, ...(x === "step" ? [] : ["step"])], x, low, high }, { every: live ? 2000 : 0 });
	const charts = useMemo(() => metrics.map((name) => ({ name, series: runs.flatMap((run, i) => {
		const all = data?.runs[run]?.series || {};
		return all[name]?.x.length ? curves(all[name], all[name + "_se"], names ? names[run] : name, seeds, i).map((one) => ({ ...one, run })) : [];
	}) })), [data, metrics.join(), runs.join(), seeds]);
	const open = (at, run) => {
		const steps = data.runs[run].series.step;
		if (x === "step" || !steps) return onStep(Math.round(at), run);
		const far = steps.x.map((value) => Math.abs(value - at));
		return onStep(Math.round(steps.mean[far.indexOf(Math.min(...far))]), run);
	};
	if (!data && !error) return html`<${Loading} label="Reading metrics" />`;
	const skipped = runs.reduce((sum, run) => sum + (data?.runs[run]?.skipped || 0), 0);
	return html`<${Failure} error=${error} />${skipped > 0 && html`<p class="muted small">${num(skipped)} lines that could not be read are left out.</p>`}
		<div class="grid-charts">${charts.filter(({ series }) => series.length).map(({ name, series }) => html`<${Chart} key=${name} title=${name} series=${series} xLabel=${x === "time" ? "seconds" : x} sync="run"
			legend=${!names} onZoom=${(from, to) => setParams({ low: from, high: to }, { push: true })} onPoint=${onStep && ((at, index) => open(at, series[index].run))} />`)}</div>`;
}

// Which metrics are shown, over what.
function useChoice(runs, params, live, several) {
	const { data, error } = useData(runs.length ? "metrics" : null, { run: runs }, { every: live ? 10000 : 0 });
	const [seeds, setSeeds] = useState("mean ± sd");
	const q = useRested(params.q || ""), axes = data?.axes || [], { low, high } = params;
	const x = axes.includes(params.x) ? params.x : "step";
	const known = useMemo(() => new Set(data?.metrics), [data]);
	const all = [...known].filter((name) => !name.endsWith("_se"));
	const fitting = q ? all.filter(matcher(q)) : data?.leading || [];
	const whole = () => setParams({ low: null, high: null });
	useKeys({ 0: [whole, "the whole axis of the charts"] }, "Charts");
	const view = html`<div class="row"><${Filter} value=${params.q || ""} onInput=${(text) => setParams({ q: text })} placeholder="Find a metric" />
		${axes.length > 1 && html`<${Segmented} label="horizontal axis" value=${x} options=${axes.toSorted((a, b) => (b === "step") - (a === "step"))} onChange=${(axis) => setParams({ x: axis, low: null, high: null })} />`}
		${several && html`<${Segmented} label="seeds" value=${seeds} options=${["mean ± sd", "each seed"]} onChange=${setSeeds} />`}
		${low && html`<${Button} onClick=${whole} hint="the whole axis (0)">${x} ${num(Number(low))} – ${num(Number(high))} ×<//>`}</div>`;
	const empty = data && !fitting.length && (q ? html`<${Empty} title="No metric fits “${q}”.">There are ${all.length}.<//>` : html`<${Empty} title="No metrics yet.">${live ? "They appear here by themselves." : "The log says why."}<//>`);
	const foot = data && html`<p class="faint small">${num(Math.min(fitting.length, SHOWN))} of ${q ? `${num(fitting.length)} fitting metrics` : `${num(all.length)} metrics; type to find the others`}.</p>`;
	return { metrics: fitting.slice(0, SHOWN), known, x, low, high, seeds: seeds === "each seed", error, view, empty, foot };
}

// Last values, those with intervals first; marked where an interval leaves that of the first run.
function Finals({ runs, names, finals }) {
	const sure = (name) => finals.some((one) => one[name]?.low != null);
	const metrics = [...new Set(finals.flatMap(Object.keys))].sort((a, b) => sure(b) - sure(a));
	const cell = (i) => (value, name) => {
		const { low, high } = finals[i][name] || {}, base = finals[0][name];
		const apart = low != null && base?.low != null && (low > base.high || high < base.low);
		return html`<b class=${apart ? "apart" : ""}>${num(value)}</b>${low != null && html` <span class="faint small">${num(low, 3)} – ${num(high, 3)}</span>`}`;
	};
	return html`<section class="stack"><h2>Final values <span class="faint small">with 95 % intervals</span></h2>
		<${Table} label="Final values" limit=${12} rows=${metrics} rowKey=${(name) => name} columns=${[
			{ key: "metric", kind: "mono", value: (name) => name },
			...runs.map((run, i) => ({ key: run, label: names[run], kind: "right", value: (name) => finals[i][name]?.value, show: cell(i) }))]} /></section>`;
}

function Notes({ id, notes }) {
	const [error, setError] = useState(null);
	const save = (body) => api("notes", { run: id }, { method: "PATCH", body }).then(() => setError(null), setError);
	return html`<${Failure} error=${error} /><label class="select"><span>tags</span><input defaultValue=${notes.tags?.join(" ")} onChange=${({ target: { value } }) => save({ tags: value.split(/[\s,]+/).filter(Boolean) })} /></label>
		<textarea rows="2" aria-label="notes" placeholder="Notes, kept in the run's folder" defaultValue=${notes.text} onChange=${({ target: { value } }) => save({ text: value })}></textarea>`;
}

const About = ({ run: { path, command, started, heartbeat, sessions } }) => {
	const { host, cpu, gpus = [], git } = sessions[0]?.manifest || {};
	const mono = (text) => text && html`<span class="mono">${text}</span>`;
	return html`<div class="panel"><${KeyValue} rows=${[
		["folder", mono(path)],
		["command", mono(command?.join(" "))],
		["started", clock(started)],
		["ran", started && duration(heartbeat - started)],
		["machine", [host, cpu, ...gpus].filter(Boolean).join(", ")],
		["commit", git && html`${mono(git.commit?.slice(0, 12))}${git.dirty ? " with changes" : ""}`],
	]} /></div>`;
};

const Media = ({ id, shown }) => shown.length > 0 && html`<${Details} summary="Images and videos (${shown.length})" open=${shown.some(({ type }) => type.startsWith("video"))}><div class="grid-charts">${shown.map(({ path, type }) => {
	const src = url("file", { run: id, path });
	return html`<figure class="chart" key=${path}><figcaption class="mono">${path}</figcaption>${type.startsWith("video") ? html`<video class="media" src=${src} controls loop muted preload="metadata"></video>` : html`<a href=${src}><img class="media" src=${src} alt=${path} loading="lazy" /></a>`}</figure>`;
})}</div><//>`;

const Advice = ({ advice }) => advice?.length > 0 && html`<section class="panel" aria-label="Advice">${advice.map(({ rule, level, title, text }) => html`<div key=${rule}><${Tag} tone=${level === "alarm" ? "bad" : "info"}>${level}<//> <b>${title}</b> <span class="muted">${text}</span></div>`)}</section>`;

export default function Overview({ id, run, params }) {
	const live = !run || run.state === "running";
	const { view, empty, foot, error, ...choice } = useChoice([id], params, live, run?.seeds?.length > 1);
	const { data: last } = useData("compare", { run: id }, { every: live ? 10000 : 0 });
	const rollouts = run?.sessions.some(({ has }) => has.includes("rollouts.jsonl"));
	return html`<div class="stack">
		<${Failure} error=${error} />
		${run?.sessions.filter(({ status }) => status?.reason).map(({ seed, status }) => html`<section class="failure block" role="alert"><b>Seed ${seed}: ${status.reason.split("Traceback (most recent")[0].slice(0, 400)}</b>${status.traceback && html`<${Details} summary="Traceback"><${Code} text=${status.traceback} label="Traceback" /><//>`}</section>`)}
		<${Advice} advice=${run?.advice} />
		${view}${empty || html`<${Charts} runs=${[id]} ...${choice} live=${live} onStep=${rollouts && ((step) => go("rollouts", id, { step }))} />`}${foot}
		${run && html`<div class="columns">${last && html`<${Finals} runs=${[id]} names=${{ [id]: "value" }} finals=${last.finals} />`}
				<section class="stack"><h2>Run</h2><${About} run=${run} /><${Notes} id=${id} notes=${run.notes || {}} /></section></div>
			${run.diff?.length > 0 && html`<${Details} summary="${run.diff.length} fields of the spec differ from ${run.versus}"><${SpecDiff} names=${[run.versus, id]} rows=${run.diff.map(({ path, before, after }) => ({ path, values: [before, after] }))} /><//>`}
			<${Media} id=${id} shown=${(run.shown || []).filter(({ path }) => !path.endsWith(".svg"))} />`}
	</div>`;
}

function shortNames(ids) {
	const parts = ids.map((id) => id.split(/\/(?=[^/]*$)/));
	return Object.fromEntries(parts.map(([name, id = ""], i) => [ids[i], parts.filter((part) => part[0] === name).length > 1 ? `${name} ${id.slice(-4)}` : name]));
}

export function Compare({ params }) {
	const ids = useMemo(() => (params.runs || "").split(",").filter(Boolean).slice(0, 12), [params.runs]);
	const { data: list } = useData("runs", {}, { every: 5000 });
	const chosen = (list?.runs || []).filter(({ run }) => ids.includes(run)), live = chosen.some(({ state }) => state === "running");
	const { data, error: failure } = useData(ids.length ? "compare" : null, { run: ids }, { every: live ? 10000 : 0 });
	const { view, empty, foot, error, ...choice } = useChoice(ids, params, live, false);
	const names = shortNames(ids), set = (next) => setParams({ runs: next.join(",") });
	useTheme();
	return html`<div class="stack">
		<div class="row">${ids.map((id, i) => html`<span key=${id} class="run-chip"><i class="swatch" style=${{ background: color(i) }}></i><a href=${href("run", id)} title=${id}>${names[id]}</a><button aria-label="leave out ${id}" onClick=${() => set(ids.filter((one) => one !== id))}>×</button></span>`)}
			<${RunPicker} label="add" none="a run…" exclude=${ids} onChange=${(id) => id && set([...ids, id])} /></div>
		<${Failure} error=${error || failure} />
		${!ids.length ? html`<${Empty} title="Nothing to compare yet.">Add runs above, or pick them in the <a href="#/">list</a>.<//>` : html`
			${view}${empty || html`<${Charts} runs=${ids} ...${choice} live=${live} names=${names} onStep=${chosen.some(({ kind }) => kind === "posttrain") && ((step, run) => go("rollouts", run, { step }))} />`}${foot}
			${data && html`<div class="columns"><${Finals} runs=${ids} names=${names} finals=${data.finals} />
				<section class="stack"><h2>Spec differences</h2><${SpecDiff} names=${ids.map((id) => names[id])} rows=${Object.entries(data.spec).map(([path, values]) => ({ path, values })).filter(({ values }) => values.some((value) => value !== null))} /></section></div>`}`}
	</div>`;
}
