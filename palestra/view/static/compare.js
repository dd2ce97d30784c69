// Runs beside each other: curves by step, tokens or time; what their specs differ in; final values with intervals.
import { Empty, Failure, RunPicker, SpecDiff, color, go, href, html, setParams, useData, useMemo, useTheme } from "./ui.js";
import { Charts, Finals, useChoice } from "./run.js";

const MOST = 12;

function shortNames(ids) {
  const parts = ids.map((id) => id.split(/\/(?=[^/]*$)/));
  return Object.fromEntries(parts.map(([name, id = ""], i) => [ids[i], parts.filter((part) => part[0] === name).length > 1 ? `${name} ${id.slice(-4)}` : name]));
}

export default function Compare({ params }) {
  const ids = useMemo(() => (params.runs || "").split(",").filter(Boolean).slice(0, MOST), [params.runs]);
  const { data: list } = useData("runs", {}, { every: 5000 });
  const chosen = (list?.runs || []).filter(({ run }) => ids.includes(run)), live = chosen.some(({ state }) => state === "running");
  const { data, error: failure } = useData(ids.length ? "compare" : null, { run: ids }, { every: live ? 10000 : 0 });
  const { view, empty, foot, error, ...choice } = useChoice(ids, params, live, false);
  const names = shortNames(ids), set = (next) => setParams({ runs: next.join(",") });
  useTheme();
  return html`<div class="stack">
    <div class="row">${ids.map((id, i) => html`<span key=${id} class="run-chip"><i class="swatch" style=${{ background: color(i) }}></i><a href=${href("run", id)} title=${id}>${names[id]}</a><button aria-label="leave out ${id}" onClick=${() => set(ids.filter((one) => one !== id))}>×</button></span>`)}
      ${ids.length < MOST && html`<${RunPicker} label="add" none="a run…" exclude=${ids} onChange=${(id) => id && set([...ids, id])} />`}</div>
    <${Failure} error=${error || failure} />
    ${!ids.length ? html`<${Empty} title="Nothing to compare yet.">Add runs above, or pick them in the <a href="#/">list</a> with <kbd>x</kbd> and press <kbd>c</kbd>.<//>` : html`
      ${view}${empty || html`<${Charts} runs=${ids} ...${choice} live=${live} names=${names} onStep=${chosen.some(({ kind }) => kind === "posttrain") && ((step, run) => go("rollouts", run, { step }))} />`}${foot}
      ${data && html`<div class="columns"><${Finals} runs=${ids} names=${names} finals=${data.finals} />
        <section class="stack"><h2>Spec differences</h2><${SpecDiff} names=${ids.map((id) => names[id])} rows=${Object.entries(data.spec).map(([path, values]) => ({ path, values })).filter(({ values }) => values.some((value) => value !== null))} /></section></div>`}`}
  </div>`;
}
