// The shell: top bar, table of pages, header of a run, help, theme, banners.
import { Dialog, Empty, Failure, Loading, Progress, State, Tabs, Tag, ago, clock, go, helpOfKeys, href, html, render, setTheme, useData, useEffect, useErrorBoundary, useKeys, useReachable, useRoute, useState, useTheme } from "./ui.js";

const folder = (name) => () => import("./folder.js").then((module) => ({ default: module[name] }));

// Pages by the first part of the address; `tab`: a page of one run, under its header, if the run has one of the files it `needs`.
const PAGES = {
  "": { title: "Runs", nav: true, load: () => import("./runs.js") },
  run: { title: "Overview", tab: true, load: () => import("./run.js") },
  rollouts: { title: "Rollouts", tab: true, needs: ["rollouts.jsonl", "answers.jsonl", "samples.jsonl"], load: () => import("./rollouts.js") },
  timeline: { title: "Timeline", tab: true, needs: ["trace.json"], load: () => import("./timeline.js") },
  spec: { title: "Spec", tab: true, load: folder("Spec") },
  log: { title: "Log", tab: true, load: folder("Log") },
  files: { title: "Files", tab: true, load: folder("Files") },
  compare: { title: "Compare", nav: true, load: () => import("./compare.js") },
  others: { title: "Searches and more", nav: true, load: () => import("./others.js") },
};

const Help = ({ onClose }) => html`<${Dialog} title="Keys" onClose=${onClose}>
  ${helpOfKeys().map(({ group, map }) => html`<h3>${group}</h3><div class="keys">${Object.entries(map).map(([key, [, text]]) => text && html`<kbd>${key === " " ? "Space" : key}</kbd><span>${text}</span>`)}</div>`)}
  <p class="muted">On a chart: drag zooms, a double click resets, a click or ← → and Enter open rollouts.</p><//>`;

function RunHead({ id, run, page }) {
  const has = new Set((run?.sessions || []).flatMap((session) => session.has || []));
  const tabs = Object.entries(PAGES).filter(([key, { tab, needs }]) => tab && (key === page || !needs || needs.some((file) => has.has(file))));
  const slash = id.lastIndexOf("/");
  return html`<header class="run-head">
    <div class="row"><h1>${id.slice(0, Math.max(0, slash))}<small>${id.slice(slash + 1)}</small></h1>
      ${run && html`<${State} state=${run.state} /><${Tag}>${run.kind}<//>${run.tags?.map((tag) => html`<${Tag} tone="info">${tag}<//>`)}
        ${run.state === "running" && html`<${Progress} ...${run.progress} />`}<span class="faint" title=${clock(run.created)}>${ago(run.created)}</span>`}</div>
    <${Tabs} label="Pages of this run" active=${page} tabs=${tabs.map(([key, { title }]) => ({ key, label: title, href: href(key, id) }))} /></header>`;
}

/** A page's module, imported when it is first shown. */
function usePage(page) {
  const [loaded, set] = useState({});
  useEffect(() => {
    PAGES[page]?.load().then((module) => set({ page, View: module.default }), (error) => set({ page, error }));
  }, [page]);
  return loaded.page === page ? loaded : {};
}

function Safe({ children }) {
  const [error, reset] = useErrorBoundary((problem) => console.error(problem));
  return error ? html`<${Failure} error=${new Error("This page failed: " + error.message)} retry=${reset} />` : children;
}

function App() {
  const { page, id, params } = useRoute();
  const theme = useTheme();
  const reachable = useReachable();
  const [help, setHelp] = useState(false);
  const [live, setLive] = useState(true);
  const { View, error } = usePage(page);
  const { title, tab } = PAGES[page] || {};
  const { data, error: missing, fresh, reload } = useData(tab ? "run" : null, { run: id }, { every: live ? 2000 : 0 });
  const run = tab && fresh ? data : null;
  const gone = tab && missing?.status === 404;
  useEffect(() => setLive(!gone && (!run || run.state === "running")), [run?.state, gone, id]);
  useEffect(() => void (document.title = [id, title, "Palestra"].filter(Boolean).join(" · ")), [title, id]);
  const turn = () => setTheme(theme === "dark" ? "light" : "dark");
  useKeys({
    "?": [() => setHelp(true), "this help"],
    "/": [() => document.querySelector("[data-filter]")?.focus(), "filter"],
    g: [() => go(""), "all runs"],
    T: [turn, "dark or light"],
  }, "Everywhere");
  return html`
    <div class="top"><a class="brand" href="#/" aria-label="Palestra: all runs"><img src="icon.svg" width="20" height="20" alt="" /><span>Palestra</span></a>
      <nav aria-label="Pages">${Object.entries(PAGES).filter(([, { nav }]) => nav).map(([key, one]) => html`<a href=${href(key)} aria-current=${page === key || (key === "" && tab) ? "page" : undefined}>${one.title}</a>`)}</nav>
      <button onClick=${turn} title="Dark or light (T)" aria-label="Dark or light">${theme === "dark" ? "☾" : "☀"}</button>
      <button onClick=${() => setHelp(true)} title="Keys (?)" aria-label="Keys">?</button></div>
    ${!reachable && html`<div class="banner" role="alert">The server does not answer; trying again. What is shown may be old.</div>`}
    <main>
      ${!title && html`<${Empty} title="There is no page ${page}.">Go to <a href="#/">all runs</a>.<//>`}
      ${tab && html`<${RunHead} id=${id} run=${run} page=${page} />`}
      <${Failure} error=${error || (tab && missing)} retry=${reload} />
      <${Safe} key=${page + id}>${gone ? html`<p><a href="#/">All runs</a></p>` : View ? html`<${View} id=${id} run=${run} params=${params} />` : title && !error && html`<${Loading} />`}<//>
    </main>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
