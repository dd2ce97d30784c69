"""The pages of the web view in a real browser: they show what the runs hold, and filters, keys and links work."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from view_browser import Browser, address_of, browser, page_of, runs_of, served  # noqa: F401
from view_runs import demo_folder, rows_of  # noqa: F401

from palestra.runs.run import Run
from palestra.runs.session import Session

STATIC = Path(__file__).parents[1] / "palestra" / "view" / "static"
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A copy of the demo that these tests may change."""
    return Path(shutil.copytree(demo_folder, tmp_path_factory.mktemp("pages") / "runs"))


def show(page: Browser, address: str, width: int = 1400, theme: str = "dark") -> None:
    """Open an address in a window of this width, and wait until its data is there."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": theme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.open(address)
    settle(page)


def settle(page: Browser) -> None:
    page.wait("document.querySelector('main')?.children.length && !document.querySelector('.loading')")


def text(page: Browser, selector: str = "main") -> str:
    return page.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def js(page: Browser, expression: str, *args: Any) -> Any:
    return page.run(f"return ({expression})", *args)


def test_runs_page_filters_as_one_types_and_sorts(page: Browser, folder: Path):
    show(page, "#/")
    assert page.texts("tbody tr a[data-run]") == ["demo_cartpole", "demo_sums", "demo_sums"]
    assert "1e-5 → 4e-5" in text(page, "tbody").replace("0.00001", "1e-5").replace("0.00004", "4e-5")
    assert js(page, "document.querySelectorAll('svg.spark polyline').length") == 3
    page.keys("/")
    page.keys("sums -cart")
    page.wait("document.querySelectorAll('tbody tr').length === 2")
    assert "2 of 3 runs" in text(page)
    assert js(page, "location.hash").startswith("#/?q=sums")
    page.keys("nothing such")
    page.wait("document.body.innerText.includes('No run fits this filter')")
    page.click("main button", "show all 3")
    page.click("thead button", "Run")
    page.wait("document.querySelector('th[aria-sort]').innerText.startsWith('Run')")
    descending = page.texts("tbody tr a[data-run]")
    page.click("thead button", "Run↓")
    page.wait("document.querySelector('th[aria-sort=ascending]')")
    assert descending == ["demo_sums", "demo_sums", "demo_cartpole"] != page.texts("tbody tr a[data-run]")


def test_runs_are_picked_compared_and_opened_by_keys(page: Browser, folder: Path):
    old, new = runs_of(folder, "demo_sums")
    show(page, "#/?q=sums")
    page.keys("jxjxc")
    page.wait("location.hash.startsWith('#/compare')")
    settle(page)
    page.wait("document.querySelectorAll('.u-wrap canvas').length >= 4")
    assert sorted(js(page, "[...document.querySelectorAll('.run-chip a')].map((one) => one.title)")) == [old, new]
    difference = text(page, ".spec-diff")
    assert "optim.lr" in difference
    assert "train.steps" not in difference
    assert re.search(r"eval/accuracy\s+0.943 0.931 – 0.955\s+0.835", text(page, "table[aria-label='Final values']"))
    page.click(".segmented button", "tokens")
    page.wait("document.querySelector('[data-chart=reward] .chart-box').ariaLabel.includes('over tokens')")
    show(page, "#/?q=sums")
    page.keys("j\n")
    page.wait("location.hash.startsWith('#/run/demo_sums/')")


def test_run_page_leads_with_reward_and_evaluation_and_finds_the_rest(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[-1]
    show(page, f"#/run/{run}")
    page.wait("document.querySelectorAll('.u-wrap canvas').length >= 7")
    charts = js(page, "[...document.querySelectorAll('[data-chart]')].map((one) => one.dataset.chart)")
    assert charts[0] == "reward"
    assert "accuracy" in charts[1]
    assert {"entropy", "length", "truncated", "grad_norm"} <= set(charts)
    last = [row["reward"] for row in rows_of(folder / run / "sessions/0/metrics.jsonl") if "reward" in row][-1]
    shown = float(text(page, "[data-chart=reward] figcaption .num").replace(",", ""))
    assert shown == pytest.approx(last, rel=1e-3)
    page.keys("/")
    page.keys("staleness")
    page.wait("[...document.querySelectorAll('[data-chart]')].every((one) => one.dataset.chart.includes('staleness'))")
    assert "fitting metrics" in text(page)


def test_point_of_a_curve_opens_the_rollouts_of_its_step(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[-1]
    for axis in ("step", "tokens"):
        show(page, f"#/run/{run}?x={axis}")
        page.wait("document.querySelector('[data-chart=reward] canvas')")
        js(page, "document.querySelector('[data-chart=reward] .chart-box').focus()")
        page.keys("\ue014\ue014\ue014")  # right, three times: the third point
        page.wait("document.querySelector('[data-chart=reward] .tooltip')")
        page.keys("\n")
        page.wait("location.hash.startsWith('#/rollouts/')")
        steps = [row["step"] for row in rows_of(folder / run / "sessions/0/metrics.jsonl") if "reward" in row]
        assert js(page, "location.hash") == f"#/rollouts/{run}?step={steps[2]}"
        settle(page)


def test_click_on_a_curve_opens_rollouts(page: Browser, folder: Path):
    show(page, f"#/run/{runs_of(folder, 'demo_sums')[-1]}")
    page.wait("document.querySelector('[data-chart=reward] .u-over')")
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    over = page.driver.find_element(By.CSS_SELECTOR, "[data-chart=reward] .u-over")
    ActionChains(page.driver).move_to_element(over).click().perform()
    page.wait("/^#.rollouts.*step=(1[5-9]|2[0-5])$/.test(location.hash)")  # the middle of 40 steps


def test_seeds_are_a_band_or_curves_of_their_own(page: Browser, folder: Path):
    show(page, f"#/run/{runs_of(folder, 'demo_cartpole')[0]}")
    page.wait("document.querySelector('[data-chart=return] canvas')")
    assert js(page, "document.querySelector('[data-chart=return] .legend')") is None
    page.click(".segmented button", "each seed")
    page.wait("document.querySelectorAll('[data-chart=return] .legend span').length === 4")
    assert "95 % intervals" in text(page)


def test_chart_is_saved_as_svg_and_png(page: Browser, folder: Path, tmp_path: Path):
    allow = {"behavior": "allow", "downloadPath": str(tmp_path)}
    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allow)
    show(page, f"#/run/{runs_of(folder, 'demo_sums')[-1]}")
    page.wait("document.querySelector('[data-chart=reward] canvas')")
    js(page, "document.querySelector('[data-chart=reward] .menu').open = true")
    for kind, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        page.click("[data-chart=reward] .menu button", kind.upper())
        path = tmp_path / f"reward.{kind}"
        end = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < end, f"{path} was not downloaded"
            time.sleep(0.05)
        assert path.read_bytes().startswith(start)
    assert len(re.findall(r"[ L]\d", (tmp_path / "reward.svg").read_text())) > 40


def test_spec_log_and_files_of_a_run(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[-1]
    show(page, f"#/run/{run}")
    page.click("[role=tab]", "Spec")
    page.wait("document.querySelector('main')?.innerText.includes('rollout.staleness')")
    page.keys("/")
    page.keys("rollout.group")
    page.wait("document.querySelectorAll('tbody tr').length === 1")
    assert page.texts("tbody td")[:2] == ["rollout.group", "8"]
    page.click("[role=tab]", "Files")
    page.wait("[...document.querySelectorAll('td a')].some((one) => one.innerText.endsWith('rollouts.jsonl'))")
    page.click("[role=tab]", "Log")
    page.wait("document.querySelector('.log')")


def test_help_lists_the_keys_of_the_page_and_theme_is_kept(page: Browser):
    show(page, "#/", theme="dark")
    page.keys("?")
    page.wait("document.querySelector('dialog[open]')")
    assert "compare the picked runs" in text(page, "dialog")
    assert "dark or light" in text(page, "dialog")
    page.keys("\ue00c")
    page.wait("!document.querySelector('dialog')")
    assert js(page, "document.documentElement.dataset.theme") == "dark"
    page.keys("T")
    page.wait("document.documentElement.dataset.theme === 'light'")
    show(page, "#/", theme="dark")
    assert js(page, "document.documentElement.dataset.theme") == "light"
    js(page, "localStorage.clear()")


@pytest.mark.parametrize(
    "kind", ["", "run", "rollouts", "timeline", "spec", "log", "files", "compare", "data", "others", "data?path"]
)
def test_page_fits_a_phone_and_every_control_has_a_name(page: Browser, folder: Path, kind: str):
    runs = runs_of(folder, "demo_sums")
    address = {"": "#/", "compare": f"#/compare?runs={','.join(runs)}", "data": "#/data", "others": "#/others"}
    address["data?path"] = f"#/data?path={folder.name}/demo_pipeline/pages.jsonl"
    address = address.get(kind, f"#/{kind}/{runs[-1]}")
    show(page, address, width=400, theme="light")
    assert js(page, "document.documentElement.scrollWidth") <= 400
    assert len(text(page)) > 100
    controls = "button, input, select, textarea, a[href], [tabindex='0'], svg[role=img], img"
    name = "one.ariaLabel || one.textContent.trim() || one.title || one.closest('label') || one.alt !== undefined"
    nameless = f"[...document.querySelectorAll(arguments[0])].filter((one) => !({name})).map((one) => one.outerHTML)"
    assert js(page, nameless, controls) == []


def test_colors_of_text_have_contrast_in_both_themes(page: Browser):
    def luminance(name: str) -> float:
        digits = js(page, "getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()", name)[1:]
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    def contrast(text: str, ground: str) -> float:
        bright, dark = sorted((luminance(text), luminance(ground)), reverse=True)
        return (bright + 0.05) / (dark + 0.05)

    for theme in ("dark", "light"):
        show(page, "#/", theme=theme)
        for text in ("--text", "--muted", "--faint", "--accent", "--good", "--bad", "--warn"):
            for ground in ("--bg", "--panel"):
                assert contrast(text, ground) >= 4.5, (theme, text, ground)
        for tone in ("good", "bad", "warn", "accent"):
            assert contrast(f"--{tone}", f"--{tone}-bg") >= 4.5, (theme, tone)
        for curve in range(8):
            assert contrast(f"--c{curve}", "--panel") >= 3, (theme, curve)


def test_markup_in_a_run_is_text(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[0]
    session = folder / run / "sessions" / "0"
    with (session / "log.txt").open("a") as log:
        log.write(f"2026-11-17 12:00:00,000 WARNING palestra: {HOSTILE}\n")
    with (session / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 41, "reward": 0.5, f"hostile/{HOSTILE}": 1.0}) + "\n")
    (folder / run / "notes.json").write_text(json.dumps({"tags": [HOSTILE], "text": HOSTILE}))
    status = json.loads((session / "status.json").read_text())
    (session / "status.json").write_text(
        json.dumps(status | {"state": "failed", "reason": HOSTILE, "traceback": HOSTILE})
    )
    for address in (f"#/log/{run}", f"#/run/{run}?q=hostile", "#/", f"#/compare?runs={run}&q=hostile"):
        show(page, address)
        page.wait("document.body.innerText.includes('<script>window.hacked=1</script>')")
        assert js(page, "window.hacked") is None
        assert js(page, "document.querySelectorAll('main script, main img').length") == 0


def test_running_run_is_followed_without_a_reload(page: Browser, folder: Path):
    run = Run(folder / runs_of(folder, "demo_cartpole")[0])
    with Session.open(run.session(run.seeds[0])) as session:
        show(page, f"#/run/{runs_of(folder, 'demo_cartpole')[0]}")
        page.wait("document.querySelector('[data-chart=return] canvas')")
        js(page, "window.same = true")
        rows = rows_of(session.path / "metrics.jsonl")
        with (session.path / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(rows[-1] | {"step": rows[-1]["step"] + 1, "return": 987654.0}) + "\n")
        before = text(page, "[data-chart=return] figcaption .num")
        page.wait("document.querySelector('[data-chart=return] figcaption .num').innerText !== arguments[0]", before)
        assert js(page, "window.same") is True


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_of_20_rows_a_second_is_followed_for_five_minutes_without_growth(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[-1]
    page.driver.execute_cdp_cmd("Performance.enable", {})
    page.driver.execute_cdp_cmd("HeapProfiler.enable", {})

    def size() -> dict[str, float]:
        page.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        metrics = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return {entry["name"]: entry["value"] for entry in metrics}

    with Session.open(Run(folder / run).session(0)) as session, (session.path / "metrics.jsonl").open("a") as metrics:
        last = rows_of(session.path / "metrics.jsonl")[-1]
        show(page, f"#/run/{run}")
        page.wait("document.querySelectorAll('.u-wrap canvas').length >= 7")
        sizes = []
        for number in range(1, 6001):
            metrics.write(json.dumps(last | {"step": last["step"] + number, "reward": number / 6000}) + "\n")
            metrics.flush()
            time.sleep(0.05)
            if number % 2000 == 0:  # the first third fills what is kept
                sizes.append(size())
        page.wait("document.querySelector('[data-chart=reward] figcaption .num').innerText === '1'")
    assert sizes[2]["Nodes"] <= sizes[0]["Nodes"] + 20
    assert sizes[2]["JSEventListeners"] <= sizes[0]["JSEventListeners"] + 5
    assert sizes[2]["JSHeapUsedSize"] < 1.25 * sizes[0]["JSHeapUsedSize"]


def test_deleted_run_and_stopped_server_are_said_and_the_page_goes_on(page: Browser, folder: Path, tmp_path: Path):
    folder = Path(shutil.copytree(folder, tmp_path / "runs"))
    run = runs_of(folder, "demo_sums")[-1]
    with served(folder, PALESTRA_CACHE=str(tmp_path / "cache")) as page.address:
        show(page, f"#/run/{run}")
        shutil.rmtree(folder / run)
        show(page, f"#/run/{run}")
        assert run.split("/")[1] in text(page, "[role=alert]")
        page.click("nav a", "Runs")
        page.wait("document.querySelectorAll('tbody tr').length === 2")
    page.wait("document.querySelector('[role=alert]')?.innerText.includes('does not answer')")
    page.driver.get("about:blank")  # where nothing is asked of the server again
    page.errors()


def test_search_shows_trials_over_their_fields_best_first(page: Browser):
    show(page, "#/others")
    page.wait("document.querySelectorAll('.parallel polyline').length === 16")
    scores = [float(row.split()[2]) for row in page.texts("table[aria-label=Trials] tbody tr")]
    assert scores == sorted(scores, reverse=True)
    best = page.texts("table[aria-label=Trials] tbody tr")[0].split()[0]
    assert js(page, "document.querySelector('.parallel .best title').textContent").startswith(f"trial {best}: ")
    assert "algorithm.lr" in text(page, ".key-value")


def test_pipeline_shows_its_graph_and_what_each_step_dropped_with_samples(page: Browser, folder: Path):
    show(page, "#/others?kind=pipelines")
    page.wait("document.querySelectorAll('.graph g').length === 4")
    assert js(page, "document.querySelectorAll('.graph path').length") == 4
    js(page, "[...document.querySelectorAll('.graph g')].find((one) => one.ariaLabel.startsWith('filter')).focus()")
    page.keys("\n")
    (counts,) = (json.loads(path.read_text()) for path in folder.glob("demo_pipeline/outputs/filter-*/counts.json"))
    reason, dropped = max(counts["dropped"].items(), key=lambda item: item[1])
    page.click("summary", f"dropped: {reason}: {dropped}, {100 * dropped / counts['rows_in']:.1f} %")
    rows = [json.loads(line) for line in (folder / "demo_pipeline" / "pages.jsonl").read_text().splitlines()]
    short = [row for row in rows if len(row["text"].split()) < 50]
    shown = page.texts("details[open] .sample")
    assert shown == [f"{row['id']} {row['text']}" for row in short[: len(shown)]]
    assert len(shown) == min(20, dropped)


def test_failed_pipelines_and_benchmarks_have_pages(page: Browser, folder: Path):
    steps = [
        {"name": "get", "address": "get-1", "state": "done", "inputs": [], "seconds": 3},
        {"name": "clean", "address": "clean-2", "state": "failed", "inputs": ["get-1"], "error": HOSTILE},
    ]
    (folder / "a").mkdir()
    (folder / "a" / "report-corpus.json").write_text(json.dumps({"name": "corpus", "steps": steps}))
    shutil.copy(STATIC.parents[2] / "docs" / "benchmarks.jsonl", folder)
    show(page, "#/others?kind=pipelines")
    page.wait("document.querySelectorAll('.graph g').length === 2")
    assert HOSTILE in text(page)
    page.click("[role=radio]", "benchmarks")
    page.wait("document.querySelector('table[aria-label=benchmarks]')?.innerText.includes('ppo_cartpole')")
    assert js(page, "window.hacked") is None


def test_data_page_goes_through_rows_by_number_and_text_and_shows_tokens(page: Browser, folder: Path):
    show(page, "#/data")
    page.click("td a", "pages.jsonl")
    page.wait("document.querySelectorAll('article').length === 20")
    rows = [json.loads(line) for line in (folder / "demo_pipeline" / "pages.jsonl").read_text().splitlines()]
    page.click("button", "next")
    page.wait("location.hash.includes('row=20') && document.querySelector('article')?.ariaLabel === 'row 20'")
    assert rows[20]["text"] in page.texts("article")[0]
    page.keys("/")
    page.keys("Page 77")
    page.wait("document.querySelector('article')?.ariaLabel === 'row 77'")
    page.keys(" nowhere")
    page.wait("document.body.innerText.includes('No row has this text.')")
    show(page, "#/data")
    page.click("td a", "outputs/tokenize-")
    page.wait("document.querySelector('.tokens .trained')")
    assert re.match(r"row 0\n\d+ tokens\n", page.texts("article")[0])


def test_zoom_of_a_chart_fetches_its_window_at_full_resolution(page: Browser, folder: Path):
    run = runs_of(folder, "demo_sums")[0]
    path = folder / run / "sessions" / "0" / "metrics.jsonl"
    before = path.read_bytes()
    with path.open("a") as metrics:  # more than the 800 points of a chart
        metrics.writelines(json.dumps({"step": step, "zigzag": step % 7}) + "\n" for step in range(100, 6100))
    show(page, f"#/run/{run}?q=zigzag")
    page.wait("document.querySelector('[data-chart=zigzag] .u-over')")
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    over = page.driver.find_element(By.CSS_SELECTOR, "[data-chart=zigzag] .u-over")
    ActionChains(page.driver).move_to_element(over).click_and_hold().move_by_offset(12, 0).release().perform()
    page.wait("/low=\\d+.*high=\\d+/.test(location.hash)")
    low, high = (float(js(page, f"location.hash.match(/{end}=([\\d.]+)/)[1]")) for end in ("low", "high"))
    assert 2000 < low < high < 4500
    steps = [step for step in range(100, 6100) if low <= step <= high]
    assert len(steps) < 800
    page.wait("performance.getEntriesByType('resource').some((one) => /series.*low=/.test(one.name))")
    page.keys("0")
    page.wait("!location.hash.includes('low=')")
    path.write_bytes(before)


def test_own_scripts_and_styles_stay_small_and_make_no_markup_from_text():
    own = {path.name: path.read_text() for path in STATIC.iterdir() if path.suffix in (".js", ".css")}
    assert sum(len(text.encode()) for text in own.values()) <= 122 * 1024
    for text in own.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
