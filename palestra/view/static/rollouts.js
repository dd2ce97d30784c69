// The rollouts page: the groups of a step, one group whole with its tokens, one problem across steps and runs.
import { Button, Details, Empty, Failure, Filter, Histogram, KeyValue, Loading, RunPicker, Seeds, Segmented, Select, Tag, Tip, api, bytes, duration, href, html, num, parse, percent, setParams, url, useData, useEffect, useKeys, useMemo, useRef, useRested, useState } from "./ui.js";
import { COLORINGS, background, coloring, details, parts, place, scaleOf, toolCall, visible } from "./tokens.js";

const GLYPHS = { correct: ["✓", "good"], wrong: ["✗", "bad"], unparsable: ["?", "warn"], timeout: ["◷", "warn"], error: ["!", "info"] };
const FILTERS = "task fate status flag text reward_low reward_high length_low length_high".split(" ");
const TRUTH = "gold answer answers target solution expected label tests test".split(" ");
const PAGE = 100; // groups
const TOKENS = 1200; // of a completion that are drawn at first
const EMBEDDED = /^data:image\/(png|jpeg|gif|webp);base64,/;
const HITS = 400; // of a search over all steps

// In notes.json: the same after a resume, unlike the place in the file.
const noteKey = ({ problem, step, number }) => `${problem.id ?? problem}@${step}#${number}`;
const written = (value) => visible(typeof value === "string" ? value : JSON.stringify(value, null, 1));
const glyphOf = (status) => GLYPHS[status] ?? ["·", "info"];

// Groups over all steps that fit, fetched piece by piece; nothing without `wanted`.
function useSearch(wanted) {
	const [state, set] = useState({});
	useEffect(() => {
		const control = new AbortController();
		const search = async () => {
			let groups = [], after = 0;
			while (after !== null && groups.length < HITS) {
				const found = await api("rollouts", { ...wanted, step: "all", after, limit: 200 }, { signal: control.signal });
				groups = [...groups, ...found.groups];
				after = found.next;
				set({ groups, scanned: found.scanned, done: after === null || groups.length >= HITS, more: after === null ? "" : "+" });
			}
		};
		set({});
		if (wanted) search().catch((error) => error.name === "AbortError" || set({ done: true, error }));
		return () => control.abort();
	}, [JSON.stringify(wanted)]);
	return { groups: [], scanned: 0, more: "", ...state };
}

const Glyphs = ({ completions, hits }) => html`<span class="ro-glyphs">${completions.map(({ status, reward }, i) => {
	const [glyph, tone] = glyphOf(status), label = `${status}, reward ${num(reward, 3)}`;
	return html`<span class="tag ${tone} ${!hits || hits.includes(i) ? "" : "off"}" role="img" aria-label=${label} title=${label}>${glyph}</span>`;
})}</span>`;

function Row({ group, active, note, onOpen }) {
	const row = useRef(), { completions, fate } = group, flags = new Set(completions?.flatMap((one) => Object.keys(one.flags)));
	useEffect(() => void (active && row.current.scrollIntoView({ block: "nearest" })), [active]);
	return html`<li><button ref=${row} class="ro-row ${active ? "active" : ""}" aria-current=${active ? "true" : null} onClick=${() => onOpen(group)}>
		<span class="ro-line"><span class="mono truncate">${group.problem}</span>
			${note?.favorite && html`<span class="ro-star" role="img" aria-label="favorite">★</span>`}${note?.text && html`<span role="img" aria-label="note" title=${note.text}>✎</span>`}
			${[...flags].map((flag) => html`<${Tag} tone="warn">${flag}<//>`)}${fate && fate !== "trained" && html`<${Tag}>${fate}<//>`}
			<span class="grow"></span><span class="num">${completions ? num(group.reward, 3) : `step ${group.step}`}</span></span>
		<span class="truncate muted small">${completions ? visible(group.prompt) : group.text}</span>
		${completions && html`<span class="ro-line"><${Glyphs} completions=${completions} hits=${group.hits} /><span class="grow"></span>
			<span class="faint small">#${group.number}, version ${group.version}</span></span>`}</button></li>`;
}

function Choice({ name, counts = {}, value, onChange }) {
	const names = Object.keys({ ...counts, ...(value && { [value]: 0 }) }).sort();
	return (value || names.length >= (name === "flag" ? 1 : 2)) && html`<${Select} label=${name} value=${value ?? ""} onChange=${onChange} options=${[{ key: "", label: "any" }, ...names.map((key) => ({ key, label: `${key} (${counts[key] ?? 0})` }))]} />`;
}

function Range({ name, histogram, params, onChange }) {
	const low = `${name}_low`, high = `${name}_high`;
	return histogram?.counts.length > 1 && html`<${Histogram} label=${name} ...${histogram} value=${params[low] && [Number(params[low]), Number(params[high])]} onChange=${(range) => onChange({ [low]: range?.[0], [high]: range?.[1] })} />`;
}

function Part({ part: { begin, end: last, role, turn }, trajectory, media, how, scale, limit }) {
	const { texts, joined, tokens, loss_mask: mask, media: places = [] } = trajectory, end = Math.min(last, limit);
	const spans = useMemo(() => {
		const values = how.values(trajectory), images = new Map(places.map(([digest, start]) => [start, media?.[digest]]));
		return tokens.slice(begin, end).map((id, k) => {
			const i = begin + k;
			if (places.length && id === tokens[places[0][1]]) return EMBEDDED.test(images.get(i)) && html`<img class="ro-image" src=${images.get(i)} alt="image at token ${i}" />`; // its tokens are all the same
			const piece = texts ? texts[i] : ` ${id}`, fill = scale && mask[i] && background(place(scale, values?.[i]));
			return html`<span class=${piece.includes("\n") ? "tk nl" : "tk"} data-i=${i} style=${fill && `background:${fill}`}>${piece ? visible(piece) : `‹${joined[i]}›`}</span>`;
		});
	}, [trajectory, end, how, scale]);
	const whole = texts?.slice(begin, last).join("") ?? "", tool = role === "model" && toolCall(whole);
	const name = role === "model" ? `model, turn ${turn}` : /^\s*<(result|tool_response)>/.test(whole) ? "tool result" : "environment";
	return html`<div class="ro-part ${role}">${turn > 0 && html`<div class="ro-role">${name}${tool && html` <${Tag} tone="info">calls ${tool}<//>`}</div>`}<div class="ro-text" dir="auto">${spans}</div></div>`;
}

function Completion({ trajectory, media, number, hit, how, scale, onToken }) {
	const [limit, setLimit] = useState(TOKENS), body = useRef(), { verdict, reward, loss_mask: mask = [], advantages, turns, stop_reason: stop, flags } = trajectory;
	const all = useMemo(() => parts(trajectory), [trajectory]), first = all[0]?.begin ?? 0, end = first + limit, left = mask.length - end;
	const mark = (token) => {
		body.current.querySelector(".at")?.classList.remove("at");
		token?.classList.add("at");
		const i = Number(token?.dataset.i);
		onToken(token && { box: token.getBoundingClientRect(), text: visible(trajectory.texts?.[i] ?? ""), rows: [...details(trajectory, i), ["bytes", trajectory.joined?.[i]]] });
	};
	const keys = (event) => {
		const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], now = body.current.querySelector(".at")?.dataset.i ?? first - 1;
		const next = by && body.current.querySelector(`[data-i="${Number(now) + by}"]`);
		if (!next) return;
		event.preventDefault();
		next.scrollIntoView({ block: "nearest" });
		mark(next);
	};
	const [glyph, tone] = glyphOf(verdict.status), label = `completion ${number + 1}`;
	return html`<article class="panel ro-completion ${hit ? "" : "off"}" aria-label=${label}>
		<header><b class="ro-reward num">${num(reward, 3)}</b><${Tag} tone=${tone}>${glyph} ${verdict.status}<//>${stop === "length" && html`<${Tag} tone="warn">truncated<//>`}<span class="grow"></span><span class="faint small">${number + 1}</span></header>
		<${KeyValue} kind="facts" rows=${[
			["score", verdict.score !== reward && num(verdict.score, 3)], ...Object.entries(verdict.parts ?? {}).map(([name, value]) => [name, num(value, 3)]),
			["advantage", advantages && num(advantages.find((_, i) => mask[i]), 3)], ["tokens", num(trajectory.sampled ?? mask.filter(Boolean).length)], ["turns", turns.length > 1 && turns.length],
			["ended by", stop], ["sandbox", verdict.sandbox], ["verified in", verdict.seconds >= 0.001 && duration(verdict.seconds)],
		]} />
		${verdict.note && html`<p class="ro-note">${visible(verdict.note)}</p>`}${Object.entries(flags).map(([flag, why]) => html`<p class="ro-note warn">${flag}: ${why}</p>`)}
		<div ref=${body} class="ro-body" tabindex="0" role="group" aria-label="tokens of ${label}; arrow keys go through them" onKeyDown=${keys}
			onMouseOver=${(event) => mark(event.target.closest(".tk"))} onMouseLeave=${() => mark(null)} onBlur=${() => mark(null)}>
			${!trajectory.texts && html`<div class="ro-text">${visible(trajectory.completion)}</div>${mask.length > 0 && html`<p class="faint small">The tokenizer was not found. Ids of tokens:</p>`}`}
			${all.filter(({ begin }) => begin < end).map((part) => html`<${Part} key=${part.begin} ...${{ part, trajectory, media, how, scale, limit: end }} />`)}
			${left > 0 && html`<${Button} onClick=${() => setLimit(limit + 4 * TOKENS)}>show more (${num(left)} tokens left)<//>`}</div></article>`;
}

// The address of an image in the line itself or of a file of the run; null for others.
function imageOf(part, run) {
	const source = part?.image_url?.url ?? part?.image_url ?? part?.image;
	if (EMBEDDED.test(source)) return source;
	return typeof source !== "string" || /^[a-z][a-z0-9+.-]*:|^\/|\.\./i.test(source) ? null : url("file", { run, path: source });
}

const Content = ({ content, run }) => [content].flat().map((part, i) => {
	const image = imageOf(part, run);
	return image ? html`<img class="ro-image" src=${image} alt="image ${i + 1} of the message" />` : html`<div class="ro-text" dir="auto">${written(part?.text ?? part ?? "")}</div>`;
});

function Prompt({ problem: { prompt, row = {} }, run }) {
	const messages = Array.isArray(prompt) ? prompt : [{ role: "prompt", content: prompt }], truth = TRUTH.filter((name) => row[name] != null && row[name] !== "");
	return html`<div class="ro-problem">
		<section class="panel ro-box" aria-label="prompt">${messages.map(({ role, content, tool_calls: calls }) => html`<div class="ro-role">${role}</div><${Content} content=${content} run=${run} />
			${calls && html`<pre class="ro-text">${written(calls)}</pre>`}`)}</section>
		<section class="panel ro-box" aria-label="ground truth"><div class="ro-role">ground truth</div>
			${truth.map((name) => html`<span class="faint small">${name}</span><div class="ro-text" dir="auto">${written(row[name])}</div>`)}
			<${Details} summary="the whole row" open=${!truth.length}><pre class="ro-text">${written(row)}</pre><//></section></div>`;
}

function Group({ group: { at, asked, trajectories, media }, hits, how, title, onToken }) {
	const scale = useMemo(() => scaleOf(how, trajectories), [how, trajectories]), missing = asked - trajectories.length;
	return html`<section aria-label=${title}><div class="row ro-bar"><span class="ro-role grow">${title}</span>
			${scale ? html`<span class="ro-legend" title=${how.about}>${scale.marks.map((value) => html`<span style="background:${background(place(scale, value)) || "none"}">${num(value, 2)}</span>`)}</span>` : html`<span class="muted small">No ${how.label} was recorded.</span>`}</div>
		${missing > 0 && html`<p class="small muted">${missing} of ${asked} could not be verified.</p>`}
		<div class="ro-completions">${trajectories.map((trajectory, i) => html`<${Completion} key=${`${at}.${i}`} number=${i} hit=${!hits || hits.includes(i)} ...${{ trajectory, media, how, scale, onToken }} />`)}</div></section>`;
}

function Across({ where, problem, at, onOpen }) {
	const { groups, error, done, more, scanned } = useSearch({ ...where, problem });
	return html`<section class="panel ro-across" aria-label="${problem} across steps"><${Failure} error=${error} /><div class="row small muted" aria-live="polite">${done ? `seen ${groups.length}${more} times` : `searched ${percent(scanned)}`}</div>
		<ol>${groups.map((group) => html`<li key=${group.at}><button class="ro-time ${group.at === at ? "active" : ""}" onClick=${() => onOpen(group)}>
			<span class="num">step ${group.step}</span><${Glyphs} completions=${group.completions} /><span class="num">${num(group.reward, 3)}</span>
			<span class="truncate muted small">${visible(group.completions[0]?.completion ?? "")}</span></button></li>`)}</ol></section>`;
}

function Other({ run, problem, step, how, onToken }) {
	const { groups, done, scanned, error } = useSearch({ run, problem });
	const nearest = done && [...groups].sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
	const { data, error: unread } = useData(nearest ? "rollouts/group" : null, { run, at: nearest?.at });
	if (error || unread) return html`<${Failure} error=${error ?? unread} />`;
	if (done && !nearest) return html`<${Empty} title="${run} has not seen this problem">Both must train on the same task.<//>`;
	if (!data) return html`<${Loading} label="${run}: ${percent(scanned)} searched" />`;
	return html`<div><a href=${href("rollouts", run, { step: data.step, group: data.at })}>${run}</a>
		<${Group} group=${data} title="step ${data.step} of ${run}, the nearest of ${groups.length}" ...${{ how, onToken }} /></div>`;
}

export default function Rollouts({ id, run, params }) {
	const files = ["rollouts", "answers", "samples"].filter((name) => run?.sessions?.[0]?.has.includes(`${name}.jsonl`));
	const { scope = "step", seed, after, file = files[0], with: other } = params, everywhere = scope === "all", starred = scope === "favorites", plain = !everywhere && !starred;
	const [across, setAcross] = useState(false), [partial, setPartial] = useState(false), [token, setToken] = useState(null);
	const text = useRested(params.text, 200), noteInput = useRef(), how = coloring(params.color);
	const { data: kept, reload } = useData("notes", { run: id }), [unsaved, setUnsaved] = useState(null), notes = kept?.groups ?? {};

	const where = { run: id, seed, file }, given = FILTERS.filter((name) => params[name]), wanted = { ...Object.fromEntries(given.map((name) => [name, params[name]])), text };
	const filtered = given.length > 0, live = run?.state === "running" && !params.step;
	const { data, error, loading } = useData(run && "rollouts", { ...where, step: params.step, after, limit: PAGE, ...(plain && wanted) }, { every: partial ? 500 : live ? 2000 : 0 });
	useEffect(() => setPartial(data?.skipped.unread_bytes > 0), [data]); // the server reads on
	const search = useSearch(everywhere && { ...where, ...wanted });
	const groups = (everywhere ? search.groups : starred ? Object.values(notes).filter((note) => note?.favorite || note?.text) : data?.groups) ?? [], count = groups.length;
	const at = params.group ? Number(params.group) : groups[0]?.at ?? null;
	const { data: group, error: unread } = useData(at === null ? null : "rollouts/group", { ...where, at });
	const key = group && noteKey(group), note = notes[key], { summary = {}, skipped = {}, previous, following, first, last, next } = data ?? {};

	const now = () => parse().params; // keys may come faster than the page is drawn
	const open = (one) => one && setParams({ group: one.at, step: one.step, ...(starred && { file: one.file, seed: one.seed }) });
	const move = (by) => open(groups[Math.max(0, Math.min(count - 1, by + groups.findIndex((one) => one.at === Number(now().group ?? at))))]);
	const change = (changes) => setParams({ group: null, after: null, ...changes });
	const toStep = (step) => step != null && change({ step, scope: null });
	const turn = (by, neighbor) => () => {
		const step = Number(now().step ?? data?.step);
		toStep(step === data?.step ? neighbor : Math.max(first, Math.min(last, step + by)));
	};
	const back = turn(-1, previous), on = turn(1, following), latest = () => change({ step: null, scope: null });
	const page = (from) => () => from !== undefined && setParams({ group: null, after: from }, { push: true });
	const keep = (changes) => {
		const body = { groups: { [key]: { problem: group.problem.id, step: group.step, number: group.number, at, file, seed, ...note, ...changes } } };
		api("notes", { run: id }, { method: "PATCH", body }).then(() => setUnsaved(null), setUnsaved).then(reload);
	};
	const star = () => group && keep({ favorite: !note?.favorite }), follow = () => setAcross(!across), recolor = (one) => setParams({ color: one });
	const clear = () => change(Object.fromEntries(FILTERS.map((name) => [name, null])));
	useKeys({
		j: [() => move(1), "next group"], k: [() => move(-1), "previous group"], h: [back, "previous step"], l: [on, "next step"], L: [latest, "last step"],
		...Object.fromEntries(COLORINGS.map(({ id: one, label }, i) => [i + 1, [() => recolor(one), `color by ${label}`]])), m: [page(next ?? undefined), "more groups of the step"],
		f: [star, "favorite, or not"], n: [() => noteInput.current?.focus(), "write a note"], p: [follow, "this problem across steps"],
		o: [() => document.querySelector(".ro-with select")?.focus(), "the same problem in another run"], x: [clear, "clear all filters"],
	}, "Rollouts");

	if (error && !data) return html`<${Empty} title="No rollouts">${error.message}<//>`;
	const unreadable = skipped.malformed + skipped.too_long, narrowed = data && data.matching < data.count ? `${num(data.matching)} of ` : "";
	return html`<div class="ro stack">
		<div class="panel stack ro-filters"><div class="row">
				${last !== null && html`<${Button} onClick=${back} disabled=${previous == null} hint="previous step (h)">‹<//>
				<label class="ro-step small">step <input type="number" class="num" value=${params.step ?? data?.step} min=${first} max=${last} onChange=${(event) => toStep(event.target.value || null)} /><span class="faint"> of ${first} – ${last}</span></label>
				<${Button} onClick=${on} disabled=${following == null} hint="next step (l)">›<//><${Button} onClick=${latest} active=${!params.step} hint="last step (L)">${live ? "live" : "last"}<//>`}
				<${Seeds} run=${run} seed=${seed} />
				${files.length > 1 && html`<${Select} label="of" options=${files} value=${file} onChange=${(one) => change({ file: one, step: null })} />`}
				<${Segmented} label="which groups" value=${scope} onChange=${(one) => change({ scope: one })} options=${[{ key: "step", label: "this step" }, { key: "all", label: "all steps" }, { key: "favorites", label: "★ and notes" }]} />
				<span class="grow"></span><${Filter} value=${params.text ?? ""} onInput=${(typed) => change({ text: typed })} placeholder="text in prompt or completion" /></div>
			${!starred && html`<div class="row ro-histograms">${["reward", "length"].map((name) => html`<${Range} name=${name} histogram=${summary[name]} params=${params} onChange=${change} />`)}
				${["status", "fate", "task", "flag"].map((name) => html`<${Choice} name=${name} counts=${summary[name]} value=${params[name]} onChange=${(one) => change({ [name]: one })} />`)}
				${filtered && html`<${Button} onClick=${clear} hint="clear all filters (x)">clear filters<//>`}</div>`}</div>
		<div class="ro-main"><nav class="ro-list" aria-label="groups">
				<div class="small muted" aria-live="polite">${plain && data ? narrowed + num(data.count) : count + search.more} groups${partial ? `, ${bytes(skipped.unread_bytes)} to be read` : ""}${everywhere && !search.done ? `, searched ${percent(search.scanned)}` : loading ? " …" : ""}
					${unreadable > 0 && html` <${Tag} tone="warn" hint="${skipped.malformed} malformed, ${skipped.too_long} too long">${unreadable} lines skipped<//>`}</div>
				<ul>${groups.map((one) => html`<${Row} key=${one.at} group=${one} active=${one.at === at} note=${notes[noteKey(one)]} onOpen=${open} />`)}</ul>
				${plain && (after || next != null) && html`<div class="row"><${Button} disabled=${!after} onClick=${page(null)}>first<//><${Button} disabled=${next == null} onClick=${page(next)} hint="more groups of the step (m)">next ${PAGE}<//></div>`}
				${count === 0 && data && (!everywhere || search.done) && html`<${Empty} title="No group">${starred ? "f stars a group, n writes a note." : "Clear a filter (x)."}<//>`}</nav>
			<div class="ro-detail stack"><${Failure} error=${unread ?? search.error} /><${Failure} error=${unsaved} />${!group && !unread && at !== null && html`<${Loading} />`}
				${group && html`<div class="row"><b class="mono">${group.problem.id}</b>
						<span class="muted small"><a href=${href("timeline", id, { step: group.step })}>step ${group.step}</a>, group ${group.number}, ${group.fate}, version ${group.version}, ${duration(group.seconds)}</span><span class="grow"></span>
						<${Button} onClick=${star} active=${note?.favorite} hint="favorite (f)">${note?.favorite ? "★" : "☆"}<//><${Button} onClick=${follow} active=${across} hint="this problem across steps (p)">across steps<//>
						<span class="ro-with"><${RunPicker} label="also in" value=${other} exclude=${[id]} filter=${({ kind }) => kind === run?.kind} onChange=${(one) => setParams({ with: one })} /></span></div>
					<textarea ref=${noteInput} key=${key} rows="1" placeholder="note on this group (n)" aria-label="note on this group"
						onBlur=${({ target: { value } }) => value !== (note?.text ?? "") && keep({ text: value })}>${note?.text ?? ""}</textarea>
					${across && html`<${Across} where=${where} problem=${group.problem.id} at=${at} onOpen=${open} />`}
					<div class="row"><span class="small muted">color by</span><${Segmented} label="color tokens by" value=${how.id} onChange=${recolor} options=${COLORINGS.map(({ id: one, label, about }, i) => ({ key: one, label, hint: `${about} (${i + 1})` }))} /></div>
					<${Prompt} problem=${group.problem} run=${id} />
					<${Group} group=${group} hits=${filtered ? groups.find((one) => one.at === at)?.hits : null} title="step ${group.step}${other ? ` of ${id}` : ""}" how=${how} onToken=${setToken} />
					${other && html`<${Other} key=${other + group.problem.id} run=${other} problem=${group.problem.id} step=${group.step} how=${how} onToken=${setToken} />`}`}</div></div>
		${token && html`<${Tip} box=${token.box}>${token.text && html`<div class="mono">${JSON.stringify(token.text)}</div>`}<${KeyValue} kind="facts" rows=${token.rows} /><//>`}</div>`;
}
