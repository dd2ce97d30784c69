// Charts: curves with bands or error bars by uPlot; a click opens a point, a drag zooms; each is saved as PNG or SVG.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { color, css, num, short, useTheme } from "./core.js";

const TOLD = 8; // curves named in the tooltip
const tick = (v) => (v && Math.abs(v) < 0.001 ? v.toExponential(1).replace(".0", "") : num(v, 5));
const shade = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
const paint = (one, i) => color(one.color ?? i);

// Columns on one axis, and the role of each: line, hi or lo.
function columns(series, stack) {
	const roles = [null];
	const tables = series.map((one, index) => {
		const y = one.y.map((value) => (Number.isFinite(value) ? value : null));
		const own = { line: y, ...(one.lo && !stack && { hi: one.hi, lo: one.lo }) };
		roles.push(...Object.keys(own).map((role) => ({ role, index })));
		return [one.x, ...Object.values(own)];
	});
	const data = tables.length ? window.uPlot.join(tables) : [[]];
	if (stack) for (let i = 1; i < data.length; i++) data[i] = data[i].map((value, k) => (value ?? 0) + (i > 1 ? data[i - 1][k] : 0));
	return { data, roles };
}

function nearest(column, at) {
	for (let reach = 0; reach < column.length; reach++) {
		if (column[at - reach] != null) return at - reach;
		if (column[at + reach] != null) return at + reach;
	}
	return null;
}

// Some room around the data, also where all of it is one value.
function span(lo, hi, stack) {
	if (lo === null) return [0, 1];
	if (stack) return [0, 1.05 * hi || 1];
	return lo === hi ? [lo - (Math.abs(lo) / 10 || 0.1), hi + (Math.abs(hi) / 10 || 1)] : window.uPlot.rangeNum(lo, hi, 0.08, true);
}

function options({ series, roles, width, height, sync, stack, onCursor, onSelect }) {
	const axis = { stroke: css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
	const bands = [];
	const shown = roles.map((entry, i) => {
		if (!entry) return {};
		const { bars } = series[entry.index], stroke = paint(series[entry.index], entry.index), fill = shade(stroke, stack ? 0.55 : 0.18);
		if (entry.role === "hi" && !bars) bands.push({ series: [i, i + 1], fill });
		if (stack && i > 1) bands.push({ series: [i, i - 1], fill });
		const points = { show: entry.role === "line" && bars, size: 6, fill: stroke };
		return { spanGaps: true, points, ...(entry.role === "line" ? { stroke, width: bars || stack ? 1 : 1.6, fill: stack && i === 1 ? fill : undefined } : { width: 0 }) };
	});
	const errorBars = (plot) => {
		const { ctx, data } = plot;
		ctx.lineWidth = 1.4 * devicePixelRatio;
		roles.forEach((entry, i) => {
			if (entry?.role !== "hi" || !series[entry.index].bars) return;
			ctx.strokeStyle = paint(series[entry.index], entry.index);
			ctx.beginPath();
			data[0].forEach((value, k) => {
				if (data[i][k] == null) return;
				ctx.moveTo(plot.valToPos(value, "x", true), plot.valToPos(data[i][k], "y", true));
				ctx.lineTo(plot.valToPos(value, "x", true), plot.valToPos(data[i + 1][k], "y", true));
			});
			ctx.stroke();
		});
	};
	return {
		width, height, bands, series: shown,
		padding: [8, 10, 0, 0],
		legend: { show: false },
		scales: { x: { time: false }, y: { range: (_, lo, hi) => span(lo, hi, stack) } },
		cursor: { y: false, sync: sync && { key: sync, setSeries: false }, drag: { x: true, y: false, dist: 6, setScale: false }, points: { size: 7 }, dataIdx: (plot, i, hovered) => (i ? nearest(plot.data[i], hovered) : hovered) },
		axes: [
			{ ...axis, size: 26, space: 60, values: (_, splits) => splits.map(short), grid: { show: false } },
			{ ...axis, size: 50, space: 28, values: (_, splits) => splits.map(tick), grid: { stroke: css("--line"), width: 1 } },
		],
		hooks: { draw: [errorBars], setCursor: [onCursor], setSelect: [onSelect] },
	};
}

const escape = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

function svgOf(plot, roles, series, title, xLabel, stack) {
	const [left, top, wide, high] = ["left", "top", "width", "height"].map((key) => plot.bbox[key] / devicePixelRatio), down = top + 24;
	const { width, height, data } = plot, muted = css("--muted");
	const at = (value, axis) => plot.valToPos(value, axis).toFixed(1);
	const path = (ys) => data[0].flatMap((x, k) => (ys[k] == null ? [] : `${at(x, "x")} ${at(ys[k], "y")}`));
	const text = (x, y, content, more = "") => `<text x="${x}" y="${y}" fill="${muted}" ${more}>${escape(content)}</text>`;
	const ticks = (i, make) => plot.axes[i]._splits.map((value, k) => make(Number(at(value, "xy"[i])), plot.axes[i]._values[k]));
	const shapes = roles.flatMap((entry, i) => {
		if (!entry || entry.role === "lo") return [];
		const stroke = paint(series[entry.index], entry.index), ys = data[i], other = data[i + 1];
		if (stack) return `<path d="M0 ${high}L${path(ys).join("L")}L${wide} ${high}Z" fill="${stroke}"/>`;
		if (entry.role === "line") return `<path d="M${path(ys).join("L")}" stroke="${stroke}" stroke-width="1.6"/>`;
		if (!series[entry.index].bars) return `<path d="M${[...path(ys), ...path(other).reverse()].join("L")}Z" fill="${stroke}" fill-opacity=".18"/>`;
		return data[0].map((x, k) => (ys[k] == null ? "" : `<path d="M${at(x, "x")} ${at(ys[k], "y")}V${at(other[k], "y")}" stroke="${stroke}"/>`));
	});
	const names = series.map((one, i) => `<tspan dx="12" fill="${paint(one, i)}">${escape(one.label)}</tspan>`);
	// The inner svg clips what is outside of the axes; a stack is painted from its top down.
	return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height + 46}" font-family="system-ui, sans-serif" font-size="11"><rect width="100%" height="100%" fill="${css("--panel")}"/>
${text(8, 16, title, 'font-weight="600"')}
${ticks(0, (x, label) => text(left + x, down + high + 16, label, 'text-anchor="middle"')).join("")}
${ticks(1, (y, label) => `<path d="M${left} ${down + y}h${wide}" stroke="${css("--line")}"/>` + text(left - 6, down + y + 4, label, 'text-anchor="end"')).join("")}
${text(left + wide, down + high + 30, xLabel, 'text-anchor="end"')}
<svg x="${left}" y="${down}" width="${wide}" height="${high}" fill="none">${(stack ? shapes.reverse() : shapes).flat().join("\n")}</svg>
<text x="${left}" y="${height + 37}">${names.join("")}</text></svg>
`;
}

async function pngOf(svg) {
	const image = Object.assign(new Image(), { src: URL.createObjectURL(svg) });
	await image.decode();
	const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
	canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
	return new Promise((done) => canvas.toBlob(done));
}

// series: [{label, x, y, lo?, hi?, color?, bars?}], each with its own x; `bars`: error bars instead of a band; `stack`: areas on
// each other. A click or Enter on a point calls `onPoint(x, series)`, a drag `onZoom(low, high)`.
export function Chart({ title, series, xLabel = "step", height = 180, onPoint, onZoom, sync, stack, legend = true }) {
	const box = useRef(), plot = useRef(null), latest = useRef({});
	const [cursor, setCursor] = useState(null);
	const theme = useTheme();
	const { data, roles } = useMemo(() => columns(series, stack), [series, stack]);
	const shape = JSON.stringify([roles, series.map(({ label, bars, color: own }) => [label, bars, own]), stack, theme, height]);
	latest.current = { onPoint, onZoom, roles, data };

	useLayoutEffect(() => {
		const onCursor = ({ cursor: { left, idx, idxs }, bbox }) => setCursor(idx == null || left < 0 ? null : { idx, idxs: [...idxs], left: left + bbox.left / devicePixelRatio });
		const onSelect = (u) => {
			const { left, width } = u.select;
			if (!width) return;
			u.setSelect({ width: 0, height: 0 }, false);
			latest.current.onZoom?.(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
		};
		const made = new window.uPlot(options({ series, roles, width: Math.max(120, box.current.clientWidth), height, sync, stack, onCursor, onSelect }), data, box.current);
		let start;
		plot.current = made;
		made.over.addEventListener("mousedown", (event) => (start = event.clientX));
		made.over.addEventListener("click", (event) => Math.abs(event.clientX - start) < 4 && open());
		const observer = new ResizeObserver(([{ contentRect: { width } }]) => width && width !== made.width && made.setSize({ width, height }));
		observer.observe(box.current);
		return () => {
			observer.disconnect();
			made.destroy();
		};
	}, [shape]);

	useEffect(() => plot.current.setData(data), [data]);

	// The point nearest to the mouse, or with the keyboard that of the first curve.
	const open = (at = plot.current.cursor.idx) => {
		const { onPoint: call, roles: kinds, data: now } = latest.current;
		const { cursor: mouse, valToPos } = plot.current;
		const points = kinds.flatMap((entry, i) => {
			const k = entry?.role === "line" ? nearest(now[i], at) : null;
			return k === null ? [] : { x: now[0][k], index: entry.index, far: mouse.top >= 0 ? Math.hypot(valToPos(now[i][k], "y") - mouse.top, valToPos(now[0][k], "x") - mouse.left) : i };
		});
		if (!call || !points.length) return;
		const { x, index } = points.reduce((a, b) => (b.far < a.far ? b : a));
		call(x, index);
	};

	const onKey = (event) => {
		const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = data[0].length - 1;
		if (event.key === "Enter" && cursor) open(cursor.idx);
		else if (step && last >= 0) plot.current.setCursor({ left: plot.current.valToPos(data[0][Math.min(last, Math.max(0, (cursor?.idx ?? (step > 0 ? -1 : last + 1)) + step))], "x"), top: -10 });
		else return;
		event.preventDefault();
	};

	const last = num(series[0]?.y.at(-1)), wide = box.current?.clientWidth;
	const told = roles.flatMap((entry, i) => {
		const k = cursor?.idxs[i], one = series[entry?.index];
		return entry?.role !== "line" || k == null ? [] : { i, k, one, index: entry.index };
	});
	const save = async (kind) => {
		const svg = new Blob([svgOf(plot.current, roles, series, title, xLabel, stack)], { type: "image/svg+xml" });
		const href = URL.createObjectURL(kind === "svg" ? svg : await pngOf(svg));
		Object.assign(document.createElement("a"), { href, download: `${title.replace(/[^\w.-]+/g, "_")}.${kind}` }).click();
	};
	const swatch = (one, i) => html`<i class="swatch" style=${{ background: paint(one, i) }}></i>`;
	return html`<figure class="chart" data-chart=${title}>
		<figcaption><span class="chart-title truncate grow" title=${title}>${title}</span>
			${series.length === 1 && html`<span class="muted num" title="last value">${last}</span>`}
			<details class="menu"><summary aria-label="Save ${title}">⤓</summary><div>${["png", "svg"].map((kind) => html`<button onClick=${() => save(kind)}>${kind.toUpperCase()}</button>`)}</div></details></figcaption>
		<div class="chart-box" style=${{ height: height + "px" }} ref=${box} tabindex="0" role="group" onKeyDown=${onKey} onBlur=${() => setCursor(null)}
			aria-label="${title}, chart over ${xLabel}; last value ${last}. Arrow keys move${onPoint ? ", Enter opens the rollouts" : ""}."></div>
		${told.length > 0 && html`<div class="tooltip" role="status" style=${cursor.left > wide / 2 ? { right: `${wide - cursor.left + 14}px` } : { left: `${cursor.left + 14}px` }}>
			<div class="faint">${xLabel} ${num(data[0][cursor.idx], 6)}</div>
			${told.slice(0, TOLD).map(({ i, k, one, index }) => html`<div class="row tight">${swatch(one, index)}${series.length > 1 && html`<span class="truncate grow">${one.label}</span>`}
				<b class="num">${num(stack && i > 1 ? data[i][k] - data[i - 1][k] : data[i][k], 5)}</b></div>`)}</div>`}
		${legend && series.length > 1 && html`<div class="legend">${series.map((one, i) => html`<span key=${one.label}>${swatch(one, i)}${one.label}</span>`)}</div>`}
	</figure>`;
}

export const toggled = (all, one) => (all.includes(one) ? all.filter((other) => other !== one) : [...all, one]);

export function Sparkline({ values, width = 84, height = 20, label = "" }) {
	const points = (values || []).map((y, x) => [x, y]).filter(([, y]) => Number.isFinite(y)), ys = points.map(([, y]) => y);
	const [low, high] = [Math.min(...ys), Math.max(...ys)];
	const at = ([x, y]) => [1 + ((width - 4) * x) / Math.max(1, values.length - 1), height - 2 - ((height - 4) * (y - low)) / (high - low || 1)].map((v) => v.toFixed(1));
	return html`<svg class="spark" width=${width} height=${height} role="img" aria-label="${label} from ${num(ys[0])} to ${num(ys.at(-1))}"><polyline points=${points.map(at).join(" ")} /></svg>`;
}
