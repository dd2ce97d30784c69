// The timeline page: spans of all processes as lanes on a canvas, with utilization, buffer by version and fates.
import { Button, Chart, Empty, Filter, KeyValue, Loading, Seeds, Tip, color, css, duration, go, html, matcher, num, percent, setParams, useData, useEffect, useKeys, useLayoutEffect, useMemo, useRef, useRested, useState, useTheme } from "./ui.js";

const NAMES = "train sample rollout verify publish eval checkpoint record learn collect sync".split(" ");
const MANY = 64; // lanes; more are an overview without text
const RULER = 22;
const ROUNDED = 2e-6; // seconds; a span may seem to end after the next has begun

function clamped(start, width, [first, last]) {
	const begin = Math.max(first, Math.min(last - width, start));
	return [begin, begin + width];
}

// A zoom by `factor` (below 1 is closer) around a time, not below 10 µs.
function zoomed([low, high], factor, center, limits) {
	const width = Math.min(limits[1] - limits[0], Math.max(1e-5, (high - low) * factor));
	return clamped(center - ((center - low) * width) / (high - low), width, limits);
}

const ROUND = [...[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1].flatMap((n) => [n, 2 * n, 5 * n]), 10, 30, 60, 120, 300, 600, 1800, 3600, 14400, 86400];

// Round times, at most `most`; below a second they count from the whole second `base`.
export function ticks([low, high], most) {
	const step = ROUND.find((size) => (high - low) / size <= most) ?? (high - low) / most, base = step < 1 ? Math.floor(low) : 0, marks = [];
	for (let k = Math.ceil(low / step); k * step <= high; k++) {
		const past = k * step - base;
		marks.push({ at: k * step, label: (base ? "+" : "") + duration(past < step / 2 ? 0 : past) });
	}
	return { base: base ? duration(base) : "", marks };
}

const hue = (name) => (NAMES.includes(name) ? NAMES.indexOf(name) : [...name].reduce((hash, letter) => (31 * hash + letter.codePointAt(0)) >>> 0, 7)) % 8;

// Lanes with spans or cells; `share` of the window by name, no moment counted twice; `busy` is their sum without `idle`: a
// trainer's rollout is waiting where generators have lanes of their own.
export function lanesOf({ lanes: given, names, exact, events, bins, low, high }) {
	const apart = given.some(({ track }) => track.startsWith("generator"));
	const lanes = given.map(({ track }) => ({ track, spans: [], cells: [], share: {}, idle: apart && track.startsWith("trainer") ? "rollout" : "" }));
	const add = ({ share }, name, part) => (share[name] = (share[name] ?? 0) + part);
	if (exact) events.lane.forEach((lane, i) => lanes[lane].spans.push({ name: names[events.name[i]], start: events.start[i], end: events.start[i] + events.duration[i], args: events.args[i] ?? {} }));
	else bins?.lane.forEach((lane, i) => {
		lanes[lane].cells.push({ bin: bins.bin[i], name: names[bins.name[i]], busy: bins.busy[i] });
		add(lanes[lane], names[bins.name[i]], bins.busy[i] / bins.count);
	});
	for (const lane of lanes) {
		const ends = []; // of rows: a span is in the first that is free
		let covered = low;
		for (const one of lane.spans.sort((a, b) => a.start - b.start || b.end - a.end)) {
			const free = ends.findIndex((end) => end <= one.start + ROUNDED);
			one.row = free < 0 ? ends.length : free;
			ends[one.row] = one.end;
			add(lane, one.name, Math.max(0, Math.min(one.end, high) - Math.max(one.start, covered)) / (high - low || 1));
			covered = Math.max(covered, Math.min(one.end, high));
		}
		lane.rows = ends.length || 1;
		lane.busy = Math.min(1, Object.entries(lane.share).reduce((sum, [name, part]) => sum + (name === lane.idle ? 0 : part), 0));
	}
	return lanes;
}

function draw(canvas, lanes, { low: first, bins }, [low, high], height) {
	const scale = devicePixelRatio, width = canvas.clientWidth, whole = RULER + lanes.length * height, context = canvas.getContext("2d");
	const x = (time) => ((time - low) / (high - low)) * width, box = (fill, ...at) => ((context.fillStyle = fill), context.fillRect(...at));
	const colors = Array.from({ length: 8 }, (_, i) => color(i)), [line, muted, ground] = ["--line", "--muted", "--bg"].map(css);
	const write = (fill, label, left, top) => ((context.fillStyle = fill), context.fillText(label, left, top));
	Object.assign(canvas, { width: width * scale, height: whole * scale });
	context.scale(scale, scale);
	Object.assign(context, { font: "11px system-ui, sans-serif", textBaseline: "middle" });
	const { base, marks } = ticks([low, high], Math.max(2, width / 90)), taken = base && context.measureText(base).width + 8;
	write(muted, base, 2, RULER / 2);
	for (const { at, label } of marks) {
		box(line, Math.round(x(at)), RULER - 5, 1, whole);
		if (x(at) >= taken) write(muted, label, x(at) + 3, RULER / 2);
	}
	const gap = height > 12 ? 2 : height > 5 ? 1 : 0, room = height - 2 * gap;
	lanes.forEach((lane, row) => {
		const top = RULER + row * height + gap, floor = {}, tall = room / lane.rows;
		if (gap > 1) box(line, 0, top + room + 1, width, 1);
		for (const { bin, name, busy } of lane.cells) {
			context.globalAlpha = name === lane.idle ? 0.45 : 1;
			floor[bin] = (floor[bin] ?? 0) + busy * room;
			box(colors[hue(name)], x(first + bin * bins.width), top + room - floor[bin], Math.max(1, x(low + bins.width)), busy * room);
		}
		for (const { name, start, end, args, row: level } of lane.spans) {
			const from = Math.max(-2, x(start)), to = Math.min(width + 2, x(end)), wide = Math.max(1, to - from - (to - from > 3)), label = `${name} ${args.step ?? ""}`;
			if (to < 0 || from > width) continue;
			context.globalAlpha = name === lane.idle ? 0.45 : 1;
			box(colors[hue(name)], from, top + level * tall, wide, Math.max(1, tall - (tall > 5)));
			context.globalAlpha = 1;
			if (tall > 11 && wide > 30 && context.measureText(label).width < wide - 8) write(name === lane.idle ? muted : ground, label, from + 4, top + (level + 0.5) * tall);
		}
		context.globalAlpha = 1;
	});
}

// What lies at a place of the canvas: {step, title, rows}.
function under(lanes, { low: first, bins }, [low, high], height, width, px, py) {
	const lane = py < RULER ? null : lanes[Math.floor((py - RULER) / height)];
	if (!lane) return null;
	const second = (high - low) / width, time = low + px * second, row = Math.floor((((py - RULER) % height) / height) * lane.rows);
	const hits = lane.spans.filter(({ start, end }) => start - 2 * second <= time && time <= end + 2 * second).sort((a, b) => Math.abs(a.row - row) - Math.abs(b.row - row) || a.end - a.start - b.end + b.start);
	const { name, start, end, args } = hits[0] ?? {}, bin = bins && Math.floor((time - first) / bins.width), cells = lane.cells.filter((one) => one.bin === bin);
	if (name) return { step: args.step, title: name, rows: [["lane", lane.track], ["start", duration(start)], ["duration", duration(end - start)], ...Object.entries(args).map(([key, value]) => [key, num(value)])] };
	return cells.length ? { title: lane.track, rows: [["at", duration(first + bin * bins.width)], ...cells.map((one) => [one.name, percent(one.busy)])] } : null;
}

function Lanes({ lanes, data, view, setView, limits, onStep }) {
	const canvas = useRef(), drag = useRef(null), theme = useTheme(), [tip, setTip] = useState(null), [width, setWidth] = useState(0);
	const many = lanes.length > MANY, height = many ? Math.max(3, Math.min(8, Math.floor(640 / lanes.length))) : 28, second = (view[1] - view[0]) / width;
	useLayoutEffect(() => {
		const observer = new ResizeObserver(() => setWidth(canvas.current?.clientWidth));
		observer.observe(canvas.current);
		return () => observer.disconnect();
	}, []);
	useLayoutEffect(() => void (width && draw(canvas.current, lanes, data, view, height)), [lanes, data, ...view, height, width, theme]);
	useEffect(() => {
		const wheel = (event) => {
			event.preventDefault();
			const { deltaX, deltaY, offsetX } = event, sideways = Math.abs(deltaX) > Math.abs(deltaY) && deltaX; // shift swaps them
			setView(sideways ? clamped(view[0] + sideways * second, view[1] - view[0], limits) : zoomed(view, Math.exp(deltaY / 400), view[0] + offsetX * second, limits));
		};
		const element = canvas.current; // preact's own listeners are passive
		element.addEventListener("wheel", wheel, { passive: false });
		return () => element.removeEventListener("wheel", wheel);
	});
	const seen = ({ offsetX, offsetY }) => under(lanes, data, view, height, width, offsetX, offsetY);
	const down = (event) => {
		event.currentTarget.setPointerCapture(event.pointerId);
		drag.current = { x: event.clientX, from: view[0] };
	};
	const move = (event) => {
		const { clientX, clientY } = event, held = drag.current, by = held && held.x - clientX;
		if (Math.abs(by) > 3) held.moved = true;
		if (held?.moved) setView(clamped(held.from + by * second, view[1] - view[0], limits));
		setTip(held ? null : { found: seen(event), box: { left: clientX + 12, top: clientY, bottom: clientY + 8 } });
	};
	const up = (event) => {
		const step = drag.current?.moved ? null : seen(event)?.step;
		drag.current = null;
		if (step != null) onStep(step);
	};
	const roles = Object.entries(Object.groupBy(lanes, ({ track }) => track.split("/")[0]));
	return html`<div class="panel tl-lanes"><div style="padding-top:${RULER}px">${many
			? roles.map(([role, { length }]) => html`<div class="tl-name" style="height:${length * height}px">${role}<span class="faint">${length}</span></div>`)
			: lanes.map(({ track, busy, share }) => html`<div key=${track} class="tl-name" style="height:${height}px" title="${track}: ${Object.entries(share).map(([name, part]) => `${name} ${percent(part, 1)}`).join(", ")}">
				<span class="truncate">${track}</span><span class="num faint">${percent(busy)}</span></div>`)}</div>
		<canvas ref=${canvas} style="height:${RULER + lanes.length * height}px" tabindex="0" role="img" aria-label="${lanes.length} lanes from ${duration(view[0])} to ${duration(view[1])}"
			onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerLeave=${() => setTip(null)}></canvas>
		${tip?.found && html`<${Tip} box=${tip.box}><b class="mono">${tip.found.title}</b><${KeyValue} kind="facts" rows=${tip.found.rows} /><//>`}</div>`;
}

// What a running total gains a step.
const gains = (x, total) => total.map((value, i) => (i ? (value - total[i - 1]) / (x[i] - x[i - 1] || 1) : value));

const CHARTS = [
	{ prefix: "staleness/", title: "Trained tokens by version", label: (age) => (age === "0" ? "newest" : `${age} behind`), stack: true },
	{ prefix: "rollout/", title: "Buffer of groups", label: (name) => (name === "running" ? "in flight" : name) },
	{ prefix: "fate/", title: "Fates of prompts per step", label: (name) => name, stack: true, make: gains },
];

function Charts({ id, run, onStep }) {
	const every = run?.state === "running" ? 3000 : 0, { data: known } = useData("metrics", { run: id }, { every });
	const metric = known?.metrics.filter((name) => CHARTS.some(({ prefix }) => name.startsWith(prefix))) ?? [];
	const { data } = useData(metric.length ? "series" : null, { run: id, metric }, { every });
	const charts = useMemo(() => CHARTS.map(({ prefix, label, make = (_, y) => y, ...rest }) => {
		const found = Object.entries(data?.runs[id]?.series ?? {}).filter(([name]) => name.startsWith(prefix));
		return { ...rest, series: found.map(([name, { x, mean }], i) => ({ label: label(name.slice(prefix.length)), x, y: make(x, mean), color: i })).filter(({ y }) => y.some(Boolean)) };
	}), [data]);
	return html`<div class="grid-charts">${charts.filter(({ series }) => series.length).map((chart) => html`<${Chart} key=${chart.title} ...${chart} onPoint=${onStep} />`)}</div>`;
}

export default function Timeline({ id, run, params }) {
	const [typed, setTyped] = useState(""), [every, setEvery] = useState(0);
	const [view, setView] = useState(params.low ? [Number(params.low), Number(params.high)] : null), rested = useRested(view, 90);
	const where = rested ? { low: rested[0], high: rested[1] } : { step: params.step };
	const { data, error, loading } = useData("timeline", { run: id, seed: params.seed, ...where, bins: 600 }, { every }), indexing = data && !data.exact && !data.bins;
	useEffect(() => setEvery(indexing ? 1000 : run?.state === "running" && !view && !params.step ? 2000 : 0), [indexing, run?.state, !view, params.step]);
	useEffect(() => void (rested && setParams({ low: rested[0].toFixed(6), high: rested[1].toFixed(6), step: null })), [rested]);
	const all = useMemo(() => (data ? lanesOf(data) : []), [data]), lanes = useMemo(() => all.filter(({ track }) => matcher(typed)(track)), [all, typed]);
	const shown = view ?? [data?.low ?? 0, Math.max(data?.high ?? 1, (data?.low ?? 0) + 1e-5)], [low, high] = shown, limits = [0, Math.max(data?.end ?? 1, high)];
	const step = useMemo(() => {
		const before = lanes.flatMap(({ spans }) => spans).filter(({ start, args }) => args.step !== undefined && start < (low + high) / 2);
		return Number(params.step ?? before.reduce((newest, { args }) => Math.max(newest, args.step), 0));
	}, [lanes, low, high, params.step]);
	const toStep = (one) => {
		setView(null);
		setParams({ step: Math.max(1, one), low: null, high: null });
	};
	const pan = (share) => () => setView(clamped(low + share * (high - low), high - low, limits)), zoom = (factor) => () => setView(zoomed(shown, factor, (low + high) / 2, limits));
	const keys = {
		ArrowLeft: [pan(-0.2), "earlier"], ArrowRight: [pan(0.2), "later"], "+": [zoom(0.6), "closer"], "=": [zoom(0.6)], "-": [zoom(1 / 0.6), "wider"], 0: [() => setView(limits), "the whole run"],
		h: [() => toStep(step - 1), "previous step"], l: [() => toStep(step + 1), "next step"], Enter: [() => go("rollouts", id, { step }), "rollouts of the step"],
	};
	useKeys(keys, "Timeline");
	if (error && !data) return html`<${Empty} title="No timeline">${error.message}<//>`;
	if (!data) return html`<${Loading} />`;
	const names = [...new Set(lanes.flatMap(({ share }) => Object.keys(share)))];
	const press = (key, label) => html`<${Button} onClick=${keys[key][0]} hint="${keys[key][1]} (${key})">${label}<//>`;
	return html`<div class="stack">
		<div class="row">${press("+", "+")}${press("-", "−")}${press("0", "all")}${press("h", "‹")}<span class="small">step ${step || "–"}</span>${press("l", "›")}
			<span class="small muted num">${duration(low)} – ${duration(high)}, ${duration(high - low)} of ${duration(data.end)}${loading ? " …" : ""}</span>
			<${Seeds} run=${run} seed=${params.seed} />
			<span class="grow"></span><${Filter} value=${typed} onInput=${setTyped} placeholder="lanes" /></div>
		<div class="row small">${names.map((name) => html`<span class="tl-kind"><i style="background:var(--c${hue(name)})"></i>${name}</span>`)}</div>
		${indexing ? html`<${Loading} label="indexing ${percent(data.indexed)}" />` : !lanes.length ? html`<${Empty} title="No span here">${typed ? "No lane has this name." : "Press 0 for the whole run."}<//>`
			: html`<${Lanes} ...${{ lanes, data, view: shown, setView, limits }} onStep=${(one) => go("rollouts", id, { step: one })} />`}
		<p class="small muted">Wheel zooms, drag pans, a click opens the rollouts of a step.</p>
		<${Charts} id=${id} run=${run} onStep=${toStep} /></div>`;
}
