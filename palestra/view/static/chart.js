// Charts: curves with bands or error bars by uPlot; a click opens a point; each is saved as PNG or SVG.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { color, css, download, num, short, useTheme } from "./core.js";

const TOLD = 8; // curves named in the tooltip
const tick = (v) => (v === null ? "" : v && Math.abs(v) < 0.001 ? v.toExponential(1).replace(".0", "") : num(v, 5));
const shade = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
const paint = (one, i) => (typeof one.color === "string" ? one.color : color(one.color ?? i));

/** Exponential moving average with weight `amount` on the past, unbiased at the start. */
function smoothed(y, amount) {
  let [mean, weight] = [0, 0];
  return y.map((value) => {
    if (value === null) return null;
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + 1 - amount;
    return mean / weight;
  });
}

/** Columns on one axis, and the role of each: line, hi or lo. */
function columns(series, smooth, stack) {
  const roles = [null];
  const tables = series.map((one, index) => {
    const y = one.y.map((value) => (Number.isFinite(value) ? value : null));
    const own = { line: one.bars || stack ? y : smoothed(y, smooth), ...(one.lo && !stack && { hi: one.hi, lo: one.lo }) };
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

/** The vertical range: some room around the data, also where all of it is one value. */
function span(lo, hi, stack) {
  if (lo === null) return [0, 1];
  if (stack) return [0, 1.05 * hi || 1];
  return lo === hi ? [lo - (Math.abs(lo) / 10 || 0.1), hi + (Math.abs(hi) / 10 || 1)] : window.uPlot.rangeNum(lo, hi, 0.08, true);
}

function options({ series, roles, width, height, sync, stack, onCursor }) {
  const axis = { stroke: css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const bands = [];
  const shown = roles.map((entry, i) => {
    if (!entry) return {};
    const one = series[entry.index];
    const stroke = paint(one, entry.index);
    const base = { spanGaps: true, width: 1, points: { show: false } };
    if (entry.role === "hi" && !one.bars) bands.push({ series: [i, i + 1], fill: shade(stroke, 0.18) });
    if (stack && i > 1) bands.push({ series: [i, i - 1], fill: shade(stroke, 0.55) });
    if (entry.role !== "line") return { ...base, width: 0 };
    return { ...base, stroke, width: one.bars || stack ? 1 : 1.6, fill: stack && i === 1 ? shade(stroke, 0.55) : undefined, points: { show: one.bars || undefined, size: one.bars ? 6 : 5, fill: stroke } };
  });
  const errorBars = (plot) => {
    const { ctx, data } = plot;
    ctx.lineWidth = 1.4 * devicePixelRatio;
    roles.forEach((entry, i) => {
      if (entry?.role !== "hi" || !series[entry.index].bars || !plot.series[i].show) return;
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
    width,
    height,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    scales: { x: { time: false }, y: { range: (_, lo, hi) => span(lo, hi, stack) } },
    cursor: { y: false, sync: sync && { key: sync, setSeries: false }, drag: { x: true, y: false, dist: 6 }, points: { size: 7 }, dataIdx: (plot, i, hovered) => (i ? nearest(plot.data[i], hovered) : hovered) },
    axes: [
      { ...axis, size: 26, space: 60, values: (_, splits) => splits.map(short), grid: { show: false } },
      { ...axis, size: 50, space: 28, values: (_, splits) => splits.map(tick), grid: { stroke: css("--line"), width: 1 } },
    ],
    series: shown,
    bands,
    hooks: { draw: [errorBars], setCursor: [onCursor] },
  };
}

const escape = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

/** The chart as SVG text, drawn from the data in view. */
function svgOf(plot, roles, series, title, xLabel, stack) {
  const [left, top, wide, high] = ["left", "top", "width", "height"].map((key) => plot.bbox[key] / devicePixelRatio);
  const [W, H, down] = [plot.width, plot.height + 46, top + 24];
  const at = { x: (v) => (plot.valToPos(v, "x") + left).toFixed(1), y: (v) => (plot.valToPos(v, "y") + down).toFixed(1) };
  const path = (xs, ys) => xs.map((x, k) => ys[k] != null && `${at.x(x)} ${at.y(ys[k])}`).filter(Boolean).join("L");
  const text = (x, y, content, more = "") => `<text x="${x}" y="${y}" fill="${css("--muted")}" ${more}>${escape(content)}</text>`;
  const splits = (i, { min, max }) => (plot.axes[i]._splits || []).filter((v) => v !== null && v >= min && v <= max);
  const out = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${W}" height="${H}" viewBox="0 0 ${W} ${H}" font-family="system-ui, sans-serif" font-size="11">`,
    `<rect width="${W}" height="${H}" fill="${css("--panel")}"/><text x="8" y="16" font-weight="600" font-size="12" fill="${css("--text")}">${escape(title)}</text>`,
    ...splits(1, plot.scales.y).map((v) => `<path d="M${left} ${at.y(v)}h${wide}" stroke="${css("--line")}"/>` + text(left - 6, Number(at.y(v)) + 4, tick(v), 'text-anchor="end"')),
    ...splits(0, plot.scales.x).map((v) => text(at.x(v), down + high + 16, short(v), 'text-anchor="middle"')),
    text(left + wide, down + high + 30, xLabel, 'text-anchor="end"'),
    `<clipPath id="box"><rect x="${left}" y="${down}" width="${wide}" height="${high}"/></clipPath><g clip-path="url(#box)" fill="none">`,
  ];
  const xs = plot.data[0];
  const order = [...roles.keys()].filter((i) => roles[i] && plot.series[i].show && roles[i].role !== "lo");
  // A stack is painted from its top down, so that each curve covers what is below it.
  for (const i of stack ? order.reverse() : order) {
    const { role, index } = roles[i];
    const stroke = paint(series[index], index);
    const ys = plot.data[i];
    if (role === "hi" && series[index].bars) xs.forEach((x, k) => ys[k] != null && out.push(`<path d="M${at.x(x)} ${at.y(ys[k])}V${at.y(plot.data[i + 1][k])}" stroke="${stroke}"/>`));
    else if (role === "hi") out.push(`<path d="M${path(xs, ys)}L${path([...xs].reverse(), [...plot.data[i + 1]].reverse())}Z" fill="${stroke}" fill-opacity=".18"/>`);
    else if (stack) out.push(`<path d="M${left} ${down + high}L${path(xs, ys)}L${left + wide} ${down + high}Z" fill="${stroke}"/>`);
    else out.push(`<path d="M${path(xs, ys)}" stroke="${stroke}" stroke-width="1.6"/>`);
  }
  out.push("</g>");
  let x = left;
  series.forEach((one, i) => {
    out.push(`<rect x="${x}" y="${H - 14}" width="10" height="3" fill="${paint(one, i)}"/>${text(x + 14, H - 9, one.label)}`);
    x += 28 + 6.2 * one.label.length;
  });
  return out.join("\n") + "\n</svg>\n";
}

/** SVG text as PNG, at twice its size. */
async function pngOf(svg) {
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise((done) => canvas.toBlob(done));
}

/** Curves over one axis. series: [{label, x, y, lo?, hi?, color?, bars?}], each with its own x; `bars`: points with
 *  error bars instead of a band; `stack`: areas on each other. A click or Enter on a point calls `onPoint(x, series)`. */
export function Chart({ title, series, xLabel = "step", height = 180, onPoint, smooth = 0, sync, stack, legend = true, note }) {
  const box = useRef();
  const plot = useRef(null);
  const drawn = useRef(null);
  const latest = useRef({});
  const [cursor, setCursor] = useState(null);
  const [hidden, setHidden] = useState([]);
  const theme = useTheme();
  const { data, roles } = useMemo(() => columns(series, smooth, stack), [series, smooth, stack]);
  const shape = JSON.stringify([roles, series.map(({ label, bars, color: own }) => [label, bars, own]), stack, theme, height]);
  latest.current = { onPoint, roles, data };

  useLayoutEffect(() => {
    const onCursor = ({ cursor: { left, idx, idxs }, bbox }) => setCursor(idx == null || left < 0 ? null : { idx, idxs: [...idxs], left: left + bbox.left / devicePixelRatio });
    const made = new window.uPlot(options({ series, roles, width: Math.max(120, box.current.clientWidth), height, sync, stack, onCursor }), data, box.current);
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

  useEffect(() => {
    const u = plot.current;
    if (drawn.current === u) {
      const xs = u.data[0];
      const zoomed = u.scales.x.min > xs[0] || u.scales.x.max < xs.at(-1);
      u.setData(data, !zoomed);
      if (zoomed) u.redraw();
    }
    drawn.current = u;
  }, [data]);

  useEffect(() => roles.forEach((entry, i) => entry && plot.current.setSeries(i, { show: !hidden.includes(series[entry.index].label) })), [hidden, shape]);

  /** Open what the cursor is on: the point nearest to it, or with the keyboard that of the first curve. */
  const open = (at = plot.current.cursor.idx) => {
    const { onPoint: call, roles: kinds, data: now } = latest.current;
    const { cursor: mouse, valToPos, series: all } = plot.current;
    const points = kinds.flatMap((entry, i) => {
      const k = entry?.role === "line" && all[i].show ? nearest(now[i], at) : null;
      return k === null ? [] : { x: now[0][k], index: entry.index, far: mouse.top >= 0 ? Math.hypot(valToPos(now[i][k], "y") - mouse.top, valToPos(now[0][k], "x") - mouse.left) : i };
    });
    if (call && points.length) {
      const { x, index } = points.reduce((a, b) => (b.far < a.far ? b : a));
      call(x, index);
    }
  };

  const onKey = (event) => {
    const u = plot.current;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Enter" && cursor) open(cursor.idx);
    else if (step && data[0].length) {
      const idx = Math.min(data[0].length - 1, Math.max(0, (cursor?.idx ?? (step > 0 ? -1 : data[0].length)) + step));
      const left = u.valToPos(data[0][idx], "x");
      u.setCursor({ left, top: -10 });
      setCursor({ idx, left: left + u.bbox.left / devicePixelRatio, idxs: roles.map((_, i) => (i ? nearest(data[i], idx) : idx)) });
    } else return;
    event.preventDefault();
  };

  const last = num(series[0]?.y.at(-1));
  const told = cursor ? roles.map((entry, i) => ({ i, entry, k: cursor.idxs[i] })).filter(({ entry, k }) => entry?.role === "line" && k != null && !hidden.includes(series[entry.index].label)) : [];
  const save = async (kind) => {
    const svg = svgOf(plot.current, roles, series, title, xLabel, stack);
    download(`${title.replace(/[^\w.-]+/g, "_")}.${kind}`, kind === "svg" ? svg : await pngOf(svg), "image/svg+xml");
  };
  const wide = box.current?.clientWidth;
  return html`<figure class="chart" data-chart=${title}>
    <figcaption><span class="chart-title truncate" title=${title}>${title}</span>${note && html`<span class="faint small truncate">${note}</span>`}<span class="grow"></span>
      ${series.length === 1 && html`<span class="muted num" title="last value">${last}</span>`}
      <details class="menu"><summary aria-label="Save ${title}" title="Save this chart">⤓</summary><div>${["png", "svg"].map((kind) => html`<button onClick=${() => save(kind)}>${kind.toUpperCase()}</button>`)}</div></details></figcaption>
    <div class="chart-box ${onPoint ? "clickable" : ""}" style=${{ height: height + "px" }} ref=${box} tabindex="0" role="group" onKeyDown=${onKey} onBlur=${() => setCursor(null)}
      aria-label="${title}, chart over ${xLabel}; last value ${last}. Arrow keys move${onPoint ? ", Enter opens the rollouts" : ""}."></div>
    ${told.length > 0 && html`<div class="tooltip" role="status" style=${cursor.left > wide / 2 ? { right: `${wide - cursor.left + 14}px` } : { left: `${cursor.left + 14}px` }}>
      <div class="faint">${xLabel} ${num(data[0][cursor.idx], 6)}</div>
      ${told.slice(0, TOLD).map(({ i, entry, k }) => html`<div class="row tight"><i class="swatch" style=${{ background: paint(series[entry.index], entry.index) }}></i>${series.length > 1 && html`<span class="truncate grow">${series[entry.index].label}</span>`}
        <b class="num">${num(stack && i > 1 ? data[i][k] - data[i - 1][k] : data[i][k], 5)}</b>${roles[i + 1]?.role === "hi" && data[i + 1][k] != null && html`<span class="faint num">${num(data[i + 2][k], 3)} – ${num(data[i + 1][k], 3)}</span>`}</div>`)}
      ${onPoint && html`<div class="faint">click: rollouts of this ${xLabel}</div>`}</div>`}
    ${legend && series.length > 1 && html`<div class="legend">${series.map(({ label, ...one }, i) => html`<button key=${label} aria-pressed=${String(!hidden.includes(label))} title="show or hide" onClick=${() => setHidden(hidden.includes(label) ? hidden.filter((other) => other !== label) : [...hidden, label])}>
      <i class="swatch" style=${{ background: paint(one, i) }}></i>${label}</button>`)}</div>`}
  </figure>`;
}

/** A curve in a table's cell; gaps are left out. */
export function Sparkline({ values, width = 84, height = 20, label = "" }) {
  const points = (values || []).map((y, x) => [x, y]).filter(([, y]) => Number.isFinite(y));
  const ys = points.map(([, y]) => y);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const at = ([x, y]) => [1 + ((width - 4) * x) / Math.max(1, values.length - 1), height - 2 - ((height - 4) * (y - low)) / (high - low || 1)].map((v) => v.toFixed(1));
  return html`<svg class="spark" width=${width} height=${height} role="img" aria-label="${label} from ${num(ys[0])} to ${num(ys.at(-1))}"><polyline points=${points.map(at).join(" ")} /></svg>`;
}
