// The shell: top bar, table of pages, header of a run, help, theme, banners.
import { Empty, Failure, Loading, Progress, State, Tabs, Tag, ago, clock, go, helpOfKeys, href, html, render, setTheme, useData, useEffect, useErrorBoundary, useKeys, useRef, useRoute, useState, useTheme } from "./ui.js";

const any = (...files) => (run) => run?.sessions?.some(({ has }) => files.some((file) => has.includes(file)));

// Pages by the first part of the address; `tab`: a page of one run, under its header, where `tab(run)`; `file`: module and export.
const PAGES = {
	"": { title: "Runs", nav: true, file: "runs" },
	run: { title: "Overview", tab: true },
	rollouts: { title: "Rollouts", tab: any("rollouts.jsonl", "answers.jsonl", "samples.jsonl") },
	timeline: { title: "Timeline", tab: any("trace.json") },
	examples: { title: "Data", tab: (run) => run?.spec?.data || run?.spec?.sft, file: "data" },
	spec: { title: "Spec", tab: true, file: "folder/Spec" },
	log: { title: "Log", tab: true, file: "folder/Log" },
	files: { title: "Files", tab: true, file: "folder/Files" },
	compare: { title: "Compare", nav: true, file: "run/Compare" },
	data: { title: "Data", nav: true },
	others: { title: "Searches and more", nav: true },
};

function Help({ onClose }) {
	const box = useRef();
	useEffect(() => {
		const before = document.activeElement;
		box.current.showModal();
		return () => before?.focus();
	}, []);
	return html`<dialog ref=${box} aria-label="Keys" onClose=${onClose}>
		<div class="row"><h2 class="grow">Keys</h2><button onClick=${onClose} aria-label="Close">×</button></div>
		${helpOfKeys().map(({ group, map }) => html`<h3>${group}</h3><div class="keys">${Object.entries(map).map(([key, [, text]]) => text && html`<kbd>${key}</kbd><span>${text}</span>`)}</div>`)}
		<p class="muted">On a chart: drag zooms, a click or Enter opens rollouts.</p></dialog>`;
}

function RunHead({ id, run, page }) {
	const tabs = Object.entries(PAGES).filter(([key, { tab }]) => tab && (key === page || tab === true || tab(run)));
	const slash = id.lastIndexOf("/");
	return html`<header class="run-head">
		<div class="row"><h1>${id.slice(0, Math.max(0, slash))}<small>${id.slice(slash + 1)}</small></h1>
			${run && html`<${State} state=${run.state} /><${Tag}>${run.kind}<//>${run.tags?.map((tag) => html`<${Tag} tone="info">${tag}<//>`)}
				${run.state === "running" && html`<${Progress} ...${run.progress} />`}<span class="faint" title=${clock(run.created)}>${ago(run.created)}</span>`}</div>
		<${Tabs} label="Pages of this run" active=${page} tabs=${tabs.map(([key, { title }]) => ({ key, label: title, href: href(key, id) }))} /></header>`;
}

function usePage(page) {
	const [loaded, set] = useState({});
	useEffect(() => {
		const [file, name = "default"] = (PAGES[page]?.file ?? page).split("/");
		if (PAGES[page]) import(`./${file}.js`).then((module) => set({ page, View: module[name] }), (error) => set({ page, error }));
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
	const [help, setHelp] = useState(false), [live, setLive] = useState(true);
	const { View, error } = usePage(page), { title, tab } = PAGES[page] || {};
	const { data, error: missing, fresh, reload } = useData(tab ? "run" : null, { run: id }, { every: live ? 2000 : 0 });
	const run = tab && fresh ? data : null, gone = tab && missing?.status === 404;
	useEffect(() => setLive(!gone && (!run || run.state === "running")), [run?.state, gone, id]);
	useEffect(() => void (document.title = [id, title, "Palestra"].filter(Boolean).join(" · ")), [title, id]);
	const turn = () => setTheme(theme === "dark" ? "light" : "dark"), ask = () => setHelp(true);
	useKeys({
		"?": [ask, "this help"],
		"/": [() => document.querySelector("[data-filter]")?.focus(), "filter"],
		g: [() => go(""), "all runs"],
		T: [turn, "dark or light"],
	}, "Everywhere");
	return html`
		<div class="top"><a class="brand" href="#/" aria-label="Palestra: all runs"><img src="icon.svg" width="20" height="20" alt="" /><span>Palestra</span></a>
			<nav aria-label="Pages">${Object.entries(PAGES).filter(([, { nav }]) => nav).map(([key, one]) => html`<a href=${href(key)} aria-current=${page === key || (key === "" && tab) ? "page" : undefined}>${one.title}</a>`)}</nav>
			<button onClick=${turn} title="Dark or light (T)" aria-label="Dark or light">${theme === "dark" ? "☾" : "☀"}</button>
			<button onClick=${ask} title="Keys (?)" aria-label="Keys">?</button></div>
		<main>
			${!title && html`<${Empty} title="There is no page ${page}.">Go to <a href="#/">all runs</a>.<//>`}
			${tab && html`<${RunHead} id=${id} run=${run} page=${page} />`}
			<${Failure} error=${error || (tab && missing)} retry=${reload} />
			<${Safe} key=${page + id}>${gone ? html`<p><a href="#/">All runs</a></p>` : View ? html`<${View} id=${id} run=${run} params=${params} />` : title && !error && html`<${Loading} />`}<//>
		</main>
		${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
