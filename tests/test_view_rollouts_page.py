"""The pages of rollouts and of the timeline in a real browser: what they show; keys, filters and links."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from view_browser import Browser, address_of, browser, page_of, runs_of, served  # noqa: F401
from view_runs import demo_folder, rows_of  # noqa: F401

from palestra.data.tokenizers import Tokenizer
from palestra.runs.run import Run
from palestra.runs.session import Session

HOSTILE = '<script>window.hacked=1</script><img src="x" onerror="window.hacked=1">\x07\u202e'
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
RIGHT = "\ue014"  # the arrow key


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The demo; both post-training runs end with a step of groups that are made up here."""
    folder = Path(shutil.copytree(demo_folder, tmp_path_factory.mktemp("rollouts") / "runs"))
    for name in runs(folder):
        with (session(folder, name) / "rollouts.jsonl").open("a") as file:
            file.writelines(json.dumps(group) + "\n" for group in crafted(session(folder, name)))
    return folder


def runs(folder: Path) -> list[str]:
    """The post-training runs, oldest first."""
    return runs_of(folder, "demo_sums")


def session(folder: Path, run: str) -> Path:
    return folder / run / "sessions" / "0"


def rollouts(folder: Path, step: int) -> list[dict[str, Any]]:
    """The groups of a step of the newest run."""
    return [row for row in rows_of(session(folder, runs(folder)[-1]) / "rollouts.jsonl") if row["step"] == step]


def crafted(path: Path) -> list[dict[str, Any]]:
    """Groups of step 41: turns and a tool, an image, markup, a text without end."""
    tokenizer = Tokenizer.load(next(path.glob("checkpoints/*/model")))

    def trajectory(reward: float, *parts: tuple[str, int], prompt: str = "12*3=", **changes: Any) -> dict[str, Any]:
        tokens, mask, turns = tokenizer.encode(prompt), [0] * len(prompt), []
        for text, sampled in parts:
            ids = tokenizer.encode("".join(letter for letter in text if letter.isascii() and letter.isprintable()))
            turns += [[len(tokens), len(tokens) + len(ids)]] if sampled else []
            tokens, mask = tokens + ids, mask + [sampled] * len(ids)
        verdict = {
            "score": reward, "status": "correct" if reward else "wrong", "parts": {"strict": reward},
            "seconds": 0.25, "sandbox": None, "note": f"extracted {reward:g}",
        }  # fmt: skip
        row = {
            "tokens": tokens, "loss_mask": mask, "logprobs": [-2.0 * sampled for sampled in mask],
            "versions": [38 + place % 3 if sampled else -1 for place, sampled in enumerate(mask)],
            "entropy": [1.5 * sampled for sampled in mask], "trained_logprobs": [-1.5 * sampled for sampled in mask],
            "reward": reward, "verdict": verdict, "stop_reason": "eos", "turns": turns, "advantages": reward - 0.5,
            "completion": "".join(text for text, _ in parts),
        }  # fmt: skip
        return row | changes

    def group(number: int, prompt: Any, *trajectories: dict[str, Any], media: Any = None, **row: Any) -> dict[str, Any]:
        problem = {"id": f"crafted/train/{number}", "prompt": prompt, "row": {"answer": "36"} | row}
        about = {"number": 1000 + number, "step": 41, "fate": "trained", "version": 40, "seconds": 1.5}
        about |= {"problem": problem, "asked": len(trajectories), "media": media}
        return {**about, "trajectories": list(trajectories)}

    tool = trajectory(1.0, ("<calculator>12*3</calculator>", 1), ("<result>36</result>", 0), ("It is 36", 1))
    image = [{"type": "image_url", "image_url": {"url": url}} for url in (PIXEL, "https://example.com/x.png")]
    messages = [
        {"role": "system", "content": "Look closely"},
        {"role": "user", "content": [*image, {"text": "How many?"}]},
    ]
    looked = trajectory(1.0, ("more", 1), ("zz, zzz: ", 0), ("one", 1), media=[["d", 9], ["e", 13]])
    marked = trajectory(0.0, (HOSTILE, 1), verdict={"score": 0.0, "status": "wrong", "note": HOSTILE})
    return [
        group(0, "12*3=", tool, trajectory(0.0, ("I guess 35", 1))),
        group(1, messages, trajectory(0.0, ("two", 1)), looked, media={"d": PIXEL, "e": "https://example.com/y.png"}),
        group(2, HOSTILE, marked, trajectory(1.0, ("plain", 1)), html=HOSTILE, answer=HOSTILE),
        group(3, "go on", trajectory(0.0, ("ab " * 500, 1), stop_reason="length")),
    ]


def show(page: Browser, folder: Path, kind: str = "rollouts", run: int = -1, **params: Any) -> None:
    query = "&".join(f"{key}={value}" for key, value in params.items())
    page.open(f"#/{kind}/{runs(folder)[run]}?{query}")
    page.wait(f"document.querySelector('{'.ro-completion' if kind == 'rollouts' else '.tl-lanes canvas'}')")


def group_shown(page: Browser, problem: str) -> None:
    page.wait("document.querySelector('.ro-detail b.mono')?.innerText === arguments[0]", problem)


def module(page: Browser, name: str, expression: str) -> Any:
    """An expression of a module `m` of the page, as JSON."""
    script = f"import('./{name}.js').then((m) => arguments[0](JSON.stringify({expression})))"
    return json.loads(page.driver.execute_async_script(script))


def test_step_shows_groups_with_prompt_truth_verdicts_and_tokens(page: Browser, folder: Path):
    show(page, folder, step=20)
    groups = rollouts(folder, 20)
    assert page.texts(".ro-row .mono") == [group["problem"]["id"] for group in groups]
    first = groups[0]
    assert page.texts(".ro-box")[0].split("\n") == ["prompt", first["problem"]["prompt"]]
    assert first["problem"]["row"]["answer"] in page.texts(".ro-box")[1]
    assert page.texts(".ro-reward") == [f"{one['reward']:g}" for one in first["trajectories"]]
    shown = [text.replace("⏎", "") for text in page.texts(".ro-completion .ro-text")]
    assert [text.strip() for text in shown] == [one["completion"].strip() for one in first["trajectories"]]
    assert first["trajectories"][0]["verdict"]["note"] in page.texts(".ro-note")[0]


def test_keys_move_through_groups_and_steps_and_the_address_follows(page: Browser, folder: Path):
    show(page, folder, step=20)
    ids = [group["problem"]["id"] for group in rollouts(folder, 20)]
    page.keys("jj")
    group_shown(page, ids[2])
    page.keys("k")
    group_shown(page, ids[1])
    page.keys("l")
    group_shown(page, rollouts(folder, 21)[0]["problem"]["id"])
    page.keys("hh")
    group_shown(page, rollouts(folder, 19)[0]["problem"]["id"])
    assert "step=19" in page.run("return location.hash")
    page.keys("L")
    group_shown(page, "crafted/train/0")
    page.keys("?")
    page.has("this problem across steps")
    page.keys("\ue00c")


def test_tokens_are_colored_by_what_is_recorded_and_their_values_are_told(page: Browser, folder: Path):
    show(page, folder, step=41)
    colored = "return [...document.querySelectorAll('.ro-completion .tk')].map((one) => !!one.style.background)"
    mask = [sampled for one in rollouts(folder, 41)[0]["trajectories"] for sampled in one["loss_mask"][5:]]
    assert page.run(colored) == list(map(bool, mask))  # what a tool wrote is not colored
    for key, legend in (("1", "-2"), ("2", "1.5"), ("3", "1.6"), ("4", "0.5"), ("5", "38")):
        page.keys(key)
        page.wait("document.querySelector('.ro-legend')?.innerText.split('\\n').includes(arguments[0])", legend)
    page.run("document.querySelector('.ro-body').focus()")
    page.keys(RIGHT, RIGHT)
    page.wait("document.querySelector('.tip')")
    tip = page.texts(".tip")[0].split()
    values = {
        "log-probability": "-2",
        "probability": "0.1353",
        "entropy": "1.5",
        "ratio": "1.649",
        "advantage": "0.5",
        "version": "38",
    }
    assert {name: tip[tip.index(name) + 1] for name in values} == values | {"version": str(38 + 6 % 3)}
    show(page, folder, step=20, color="entropy")
    page.has("No entropy was recorded")


def test_filters_narrow_the_step_by_text_status_reward_and_say_so(page: Browser, folder: Path):
    show(page, folder, step=20)
    groups = rollouts(folder, 20)
    wrong = [group for group in groups if any(one["verdict"]["status"] == "wrong" for one in group["trajectories"])]
    assert 0 < len(wrong) < len(groups)
    page.run(
        "const labels = [...document.querySelectorAll('.ro-filters label')];"
        "const select = labels.find((one) => one.innerText.startsWith('status')).querySelector('select');"
        "select.value = 'wrong'; select.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    page.has(f"{len(wrong)} of {len(groups)} groups")
    assert page.texts(".ro-row .mono") == [group["problem"]["id"] for group in wrong]
    misses = sum(one["verdict"]["status"] != "wrong" for one in wrong[0]["trajectories"])
    page.wait("document.querySelectorAll('.ro-completion.off').length === arguments[0]", misses)
    page.keys("x")
    page.has(f"{len(groups)} groups")
    page.run("document.querySelector('.ro-histograms .bars button').focus()")
    page.keys("\n")  # the lowest reward
    page.wait("location.hash.includes('reward_high')")
    page.has(f"{len(wrong)} of {len(groups)} groups")
    page.keys("x")
    prompt = groups[-1]["problem"]["prompt"]
    page.keys("/", prompt)
    page.wait("document.querySelectorAll('.ro-row').length === 1")
    group_shown(page, groups[-1]["problem"]["id"])
    page.keys("no such text")
    page.has("Clear a filter (x)")


def test_problem_is_followed_across_steps_and_set_beside_another_run(page: Browser, folder: Path):
    show(page, folder, step=20)
    problem = rollouts(folder, 20)[0]["problem"]["id"]
    path = session(folder, runs(folder)[-1]) / "rollouts.jsonl"
    steps = [row["step"] for row in rows_of(path) if row["problem"]["id"] == problem]
    assert len(steps) > 1
    page.keys("p")
    page.has(f"seen {len(steps)} times")
    assert [text.split("\n")[0] for text in page.texts(".ro-time")] == [f"step {step}" for step in steps]
    page.click(".ro-time", f"step {steps[-1]}")
    page.wait("location.hash.includes(arguments[0])", f"step={steps[-1]}")
    show(page, folder, step=41, **{"with": runs(folder)[0]})
    page.wait("document.querySelectorAll('.ro-completions').length === 2")
    here, there = page.run("return [...document.querySelectorAll('.ro-completions')].map((one) => one.innerText)")
    assert "It is 36" in here.replace("\n", "")
    assert "I guess 35" in there.replace("\n", "")
    page.has(f"step 41 of {runs(folder)[0]}")


def test_search_over_all_steps_finds_a_text(page: Browser, folder: Path):
    show(page, folder, scope="all", text="guess%2035")
    page.wait("document.querySelectorAll('.ro-row').length === 1")
    group_shown(page, "crafted/train/0")
    assert page.texts(".ro-list > div") == ["1 groups"]


def test_markup_and_hidden_characters_are_text_and_only_own_images_are_loaded(page: Browser, folder: Path):
    show(page, folder, step=41)
    page.keys("j")
    group_shown(page, "crafted/train/1")
    assert page.run("return [...document.querySelectorAll('.ro-image')].map((one) => one.src)") == [PIXEL] * 2
    assert page.texts(".ro-row .small")[2] == "<image> <image> How many?"
    assert page.texts(".ro-part.context .ro-text") == [", : "]  # an image stands for its tokens
    assert "Look closely" in page.texts(".ro-box")[0]
    assert "How many?" in page.texts(".ro-box")[0]
    page.keys("j")
    group_shown(page, "crafted/train/2")
    assert page.run("return [window.hacked ?? null, document.querySelectorAll('.ro img, .ro script').length]") == [
        None,
        0,
    ]
    assert "<script>window.hacked=1</script>" in page.texts(".ro-note")[0]
    assert page.texts(".ro-note")[0].endswith("␇‹U+202E›")


def test_turns_and_tool_calls_are_named_and_a_long_completion_is_drawn_in_parts(page: Browser, folder: Path):
    show(page, folder, step=41)
    assert page.texts(".ro-completion .ro-role") == ["model, turn 1 calls calculator", "tool result", "model, turn 2"]
    page.keys("jjj")
    group_shown(page, "crafted/train/3")
    page.has("truncated")
    page.has("repeated: ")
    assert page.run("return document.querySelectorAll('.tk').length") == 1200
    page.click("button", "show more (300 tokens left)")
    page.wait("document.querySelectorAll('.tk').length === 1500")


def test_favorite_and_note_are_kept_beside_the_run(page: Browser, folder: Path):
    show(page, folder, step=41)
    group_shown(page, "crafted/train/0")
    page.keys("f")
    page.wait("document.querySelector('.ro-star')")
    page.keys("n", "look at the tool")
    page.run("document.activeElement.blur()")
    page.wait("document.querySelector('.ro-row [title=\"look at the tool\"]')")
    path = folder / runs(folder)[-1] / "notes.json"
    notes = json.loads(path.read_text())
    assert notes["tags"] == ["demo"]
    note = notes["groups"]["crafted/train/0@41#1000"]
    assert (note["favorite"], note["text"]) == (True, "look at the tool")
    show(page, folder, scope="favorites")
    assert page.texts(".ro-row .mono") == ["crafted/train/0"]
    assert page.run("return document.querySelector('.ro-detail textarea').value") == "look at the tool"
    page.keys("f")
    page.wait("!document.querySelector('.ro-star')")
    path.unlink()
    path.mkdir()  # cannot be written now
    page.keys("f")
    page.has("cannot be")
    path.rmdir()
    assert [error for error in page.errors() if "notes" not in error] == []


def test_answers_of_an_evaluation_are_shown_in_the_same_form(page: Browser, folder: Path):
    path = session(folder, runs(folder)[0]) / "answers.jsonl"
    verdict = {"score": 1.0, "status": "correct", "parts": {}, "seconds": 0.1, "sandbox": None, "note": "4"}
    answer = {"text": "It is 4", "tokens": 3, "stop_reason": "eos", "verdict": verdict}
    row = {"id": "sums/test/0", "task": "sums", "mode": "greedy", "prompt": "2+2=", "answers": [answer]}
    path.write_text(json.dumps(row) + "\n")
    show(page, folder, run=0, file="answers")
    assert page.texts(".ro-row .mono") == ["sums/test/0"]
    assert page.texts(".ro-completion .ro-text") == ["It is 4"]
    assert page.run("return document.querySelector('.ro-step')") is None  # they have no steps
    path.unlink()


def test_running_run_shows_the_new_step_without_a_reload(page: Browser, folder: Path):
    run = Run(folder / runs(folder)[0])
    path = run.session(0) / "rollouts.jsonl"
    before, rows = path.read_bytes(), rows_of(path)
    with Session.open(run.session(0)):
        show(page, folder, run=0)
        page.has("of 1 – 41")
        with path.open("a") as file:
            file.write(json.dumps(rows[0] | {"step": 42}) + "\n")
        group_shown(page, rows[0]["problem"]["id"])
        page.has("of 1 – 42")
    path.write_bytes(before)


def test_all_groups_of_a_step_of_many_are_reached_page_by_page(page: Browser, folder: Path):
    path = session(folder, runs(folder)[-1]) / "rollouts.jsonl"
    before, first = path.read_bytes(), rows_of(path)[0]
    many = [first | {"step": 50, "number": n, "problem": {"id": f"many/{n}", "prompt": "?"}} for n in range(510)]
    with path.open("a") as file:
        file.writelines(json.dumps(group) + "\n" for group in many)
    show(page, folder)
    seen = page.texts(".ro-row .mono")
    for _ in range(5):
        page.keys("m")
        page.wait("document.querySelector('.ro-row .mono').innerText === arguments[0]", f"many/{len(seen)}")
        seen += page.texts(".ro-row .mono")
    assert seen == [f"many/{n}" for n in range(510)]
    page.click(".ro-list button", "first")
    page.wait("document.querySelector('.ro-row .mono').innerText === 'many/0'")
    path.write_bytes(before)


def spans_of(folder: Path) -> list[dict[str, Any]]:
    lines = (session(folder, runs(folder)[-1]) / "trace.json").read_text().splitlines()
    return [event for line in lines if line[:1] == "{" and (event := json.loads(line.rstrip(",")))["ph"] == "X"]


def test_timeline_has_a_lane_for_each_track_and_its_utilization(page: Browser, folder: Path):
    show(page, folder, "timeline")
    spans = spans_of(folder)
    assert [text.split("\n")[0] for text in page.texts(".tl-name")] == [
        "trainer/0", *(f"generator/{number}" for number in range(4)), "verifier/0", "verifier/1", "sync",
    ]  # fmt: skip
    end = max(span["ts"] + span["dur"] for span in spans)
    work = sum(span["dur"] for span in spans if span["tid"] == 0 and span["name"] != "rollout")
    assert page.texts(".tl-name .num")[0] == f"{100 * work / end:.0f} %"  # waiting for groups is not work
    page.has("Trained tokens by version")
    page.has("Fates of prompts per step")
    page.wait("document.querySelectorAll('.grid-charts canvas').length === 3")
    colors = page.run(
        "const c = document.querySelector('.tl-lanes canvas');"
        "const pixels = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
        "return new Set(pixels).size"
    )
    assert colors > 5


def test_timeline_zooms_pans_and_leads_to_the_rollouts_of_a_span(page: Browser, folder: Path):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    show(page, folder, "timeline", step=7)
    page.has("30 s – 35 s")  # a step takes 5 s in the demo
    page.keys("l")
    page.has("35 s – 40 s")
    page.keys("+")
    page.has("36 s – 39 s")
    page.keys(RIGHT)
    page.has("36.6 s – 39.6 s")
    page.keys("-")
    canvas = page.driver.find_element(By.CSS_SELECTOR, ".tl-lanes canvas")
    page.has("35.6 s – 40.6 s")
    width = canvas.size["width"]
    ActionChains(page.driver).move_to_element(canvas).click_and_hold().move_by_offset(width // 5, 0).release().perform()
    page.has("34.6 s – 39.6 s")
    page.run(
        "const c = document.querySelector('.tl-lanes canvas'), box = c.getBoundingClientRect();"
        "const at = {clientX: box.left, clientY: box.top + 50, cancelable: true};"
        "c.dispatchEvent(new WheelEvent('wheel', {deltaY: -277.26, ...at}))"
    )  # exp(-277.26 / 400) is a half
    page.has("34.6 s – 37.1 s")
    page.keys("0")
    page.wait("location.hash.includes('low=0.000000')")
    page.keys("h")
    page.wait("/step=\\d+/.test(location.hash)")
    step = int(page.run("return location.hash.match(/step=(\\d+)/)[1]"))
    page.wait("document.querySelector('.tl-lanes canvas')")
    page.has(f"step {step}")
    page.wait("!document.querySelector('.stack .small.muted.num').innerText.includes('…')")
    half = canvas.size["height"] // 2
    ActionChains(page.driver).move_to_element_with_offset(canvas, width // 10, 36 - half).click().perform()
    page.wait("document.querySelector('.ro-completion')")
    assert f"step={step}" in page.run("return location.hash")


def test_timeline_of_many_lanes_is_an_overview(page: Browser, folder: Path, tmp_path: Path):
    run = runs(folder)[0]
    shutil.copytree(folder / run, tmp_path / "runs" / run)
    tracks = [f"generator/{number}" for number in range(100)] + [f"verifier/{number}" for number in range(60)]
    events: list[dict[str, Any]] = [{"ph": "M", "name": "start", "args": {"unix_ns": 1}}]
    for tid, track in enumerate(tracks):
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}})
        events.append({"ph": "X", "name": "sample", "pid": 1, "tid": tid, "ts": 1e6, "dur": 5e5, "args": {}})
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    (session(tmp_path / "runs", run) / "trace.json").write_text(f"[\n{lines}\n]\n")
    with served(tmp_path / "runs", PALESTRA_CACHE=str(tmp_path / "cache")) as page.address:
        show(page, folder, "timeline", run=0)
        assert page.texts(".tl-name") == ["generator\n100", "verifier\n60"]
        assert page.run("return document.querySelector('.tl-lanes canvas').clientHeight") < 700
        page.keys("/", "verifier")
        page.wait("document.querySelectorAll('.tl-name').length === 60")


def test_run_without_rollouts_or_trace_says_so(page: Browser, folder: Path):
    run = f"demo_cartpole/{next(path.name for path in (folder / 'demo_cartpole').iterdir() if path.is_dir())}"
    page.open(f"#/rollouts/{run}")
    page.has("No rollouts")
    page.has("has no rollouts.jsonl")
    assert [error for error in page.errors() if "404" not in error] == []


def test_scales_are_the_same_for_completions_side_by_side_and_ignore_outliers(page: Browser):
    trajectories = [
        {"loss_mask": [0, *[1] * 99], "logprobs": [-90, *[-1] * 99]},
        {"loss_mask": [1], "logprobs": [-50]},
    ]
    scale = module(page, "tokens", f"m.scaleOf(m.COLORINGS[0], {json.dumps(trajectories)})")
    assert scale["marks"] == [-1, -0.5, 0]
    assert module(page, "tokens", f"[0, -0.5, -1, -50].map((v) => m.place({json.dumps(scale)}, v))") == [0, 0.5, 1, 1]
    assert module(page, "tokens", "m.scaleOf(m.COLORINGS[1], [{loss_mask: [1]}])") is None
    ratio = {"id": "ratio", "bound": 1.0}
    places = module(page, "tokens", f"[Math.E, 1, 1 / Math.E, 100].map((v) => m.place({json.dumps(ratio)}, v))")
    assert places == pytest.approx([1, 0, -1, 1])


def test_timeline_counts_no_moment_twice_and_waiting_only_beside_generators(page: Browser):
    events = {"lane": [0, 0, 0], "name": [0, 1, 2], "start": [0, 5, 5.5], "duration": [5, 4, 1], "args": [{}, {}, {}]}
    data = {
        "exact": True,
        "low": 0,
        "high": 10,
        "lanes": [{"track": "trainer/0"}],
        "names": ["rollout", "train", "micro"],
        "events": events,
    }
    (alone,) = module(page, "timeline", f"m.lanesOf({json.dumps(data)})")
    assert [span["row"] for span in alone["spans"]] == [0, 0, 1]
    assert alone["share"] == pytest.approx({"rollout": 0.5, "train": 0.4, "micro": 0})
    assert alone["busy"] == pytest.approx(0.9)
    with_generator = data | {"lanes": [{"track": "trainer/0"}, {"track": "generator/0"}]}
    assert module(page, "timeline", f"m.lanesOf({json.dumps(with_generator)})")[0]["busy"] == pytest.approx(0.4)
    overlapping = {**events, "start": [0, 4, 7], "duration": [6, 4, 1]}
    (lane,) = module(page, "timeline", f"m.lanesOf({json.dumps(data | {'events': overlapping})})")
    assert [span["row"] for span in lane["spans"]] == [0, 1, 0]
    assert lane["share"] == pytest.approx({"rollout": 0.6, "train": 0.2, "micro": 0})
    labels = module(
        page, "timeline", "[m.ticks([61, 61.0001], 6), m.ticks([0, 7200], 4)].map((t) => [t.base, t.marks[1].label])"
    )
    assert labels == [["1:01", "+20 µs"], ["", "30:00"]]
