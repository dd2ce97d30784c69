"""The server of the web view: what it shows of runs, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from view_runs import View, demo_folder, rows_of  # noqa: F401

from palestra.runs.run import Run
from palestra.view import series


@pytest.fixture
def view(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:  # noqa: F811
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    return View(demo_folder)


@pytest.fixture
def own(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:  # noqa: F811
    """A copy that a test may break."""
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    shutil.copytree(demo_folder, tmp_path / "runs")
    return View(tmp_path / "runs")


def test_runs_are_listed_newest_first_with_progress_headline_and_difference(view: View):
    rows = view.get("runs")["runs"]
    assert [row["name"] for row in rows] == ["demo_cartpole", "demo_sums", "demo_sums"]
    newest, older = rows[1:]
    assert newest["versus"] == older["run"]
    assert newest["diff"] == [{"path": "optim.lr", "before": 1e-5, "after": 4e-5}]
    assert "diff" not in older
    assert newest["progress"] | {"share": 1.0, "done": 40, "total": 40, "unit": "step"} == newest["progress"]
    run = Run(view.root / newest["run"])
    assert newest["headline"] == run.progress()["headline"]
    assert newest["spark"][-1] == pytest.approx(run.metrics()[-1]["eval/accuracy"])
    assert (newest["state"], newest["tags"]) == ("done", ["demo"])


def test_run_list_unchanged_is_304_and_a_new_state_is_shown(own: View):
    first = own.client.get("/api/runs")
    again = own.client.get("/api/runs", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    status = own.session("demo_sums") / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "failed", "reason": "OSError: full"}))
    row = next(row for row in own.get("runs")["runs"] if row["name"] == "demo_sums")
    assert (row["state"], row["reason"]) == ("failed", "OSError: full")


def test_run_has_the_advice_of_doctor(own: View):
    healthy = own.get("run", run=own.run("demo_sums"))["advice"]
    assert not [advice for advice in healthy if advice["level"] == "alarm"]
    metrics = own.session("demo_sums") / "metrics.jsonl"
    rows = [row | {"truncated": 0.9} for row in rows_of(metrics)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = own.session("demo_sums") / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"state": "interrupted"}))
    found = own.get("run", run=own.run("demo_sums"))["advice"]
    assert "truncat" in " ".join(advice["title"] for advice in found)


def test_run_has_spec_manifest_status_and_files(view: View):
    run = view.run("demo_cartpole")
    detail = view.get("run", run=run)
    assert detail["spec"]["env"]["id"] == "CartPole-v1"
    assert [session["seed"] for session in detail["sessions"]] == [0, 1, 2, 3]
    assert detail["sessions"][2]["manifest"]["seed"] == 2
    assert "metrics.jsonl" in detail["sessions"][0]["has"]
    names = {file["path"] for file in view.get("files", run=run)["files"]}
    assert {"trial.json", "sessions/3/metrics.jsonl"} <= names
    assert not any("/." in name for name in names)


def test_series_of_seeds_have_mean_and_band(view: View):
    run = view.run("demo_cartpole")
    chart = view.get("series", run=run, metric="return", x="frame")["runs"][run]["series"]["return"]
    rows = Run(view.root / run).metrics()
    at = [row["return"] for row in rows if row["frame"] == 4000]
    mean, place = sum(at) / 4, chart["x"].index(4000)
    assert chart["mean"][place] == pytest.approx(mean)
    deviation = (sum((value - mean) ** 2 for value in at) / 4) ** 0.5
    assert chart["high"][place] - chart["mean"][place] == pytest.approx(deviation, rel=1e-4)
    assert [chart["seeds"][str(seed)][place] for seed in range(4)] == pytest.approx(at)


def test_series_live_reads_only_new_rows_and_starts_over_when_truncated(own: View):
    run, path = own.run("demo_sums"), own.session("demo_sums") / "metrics.jsonl"

    def steps() -> list[float]:
        return own.get("series", run=run, metric="reward")["runs"][run]["series"]["reward"]["x"]

    assert steps()[-1] == 40
    with path.open("a") as file:
        file.write('{"step": 41, "reward": 0.5}\n{"step": 42, "rew')
    assert steps()[-1] == 41  # the torn line is not a row yet
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]) + b'{"step": 21, "reward": 7.0}\n')
    answer = own.get("series", run=run, metric="reward")["runs"][run]
    assert answer["series"]["reward"]["x"][-1] == 21
    assert answer["series"]["reward"]["mean"][-1] == 7.0
    assert answer["rows"] == 21


def test_series_long_are_thinned_but_keep_every_peak(own: View):
    run, path = own.run("demo_sums"), own.session("demo_sums") / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "reward": {100 if n == 7777 else n % 5}}}\n' for n in range(20_000)))
    chart = own.get("series", run=run, metric="reward", points=200)["runs"][run]["series"]["reward"]
    assert len(chart["x"]) <= 202
    assert (max(chart["mean"]), chart["x"][chart["mean"].index(100)]) == (100, 7777)
    zoomed = own.get("series", run=run, metric="reward", low=7700, high=7800)["runs"][run]["series"]["reward"]
    assert zoomed["x"] == list(range(7700, 7801))


def test_series_of_a_file_that_grows_long_are_of_some_rows_at_even_distances(
    own: View, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(series, "WHOLE", 20_000)
    monkeypatch.setattr(series, "SAMPLED", 50)
    run, path = own.run("demo_sums"), own.session("demo_sums") / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "reward": {n}.5}}\n' for n in range(100)))
    answer = own.get("series", run=run, metric="reward")["runs"][run]
    assert (answer["rows"], answer["sampled"]) == (100, 0)
    for end in (4000, 4050, 9000):
        path.write_text("".join(f'{{"step": {n}, "reward": {n}.5}}\n' for n in range(end)))
        answer = own.get("series", run=run, metric="reward")["runs"][run]
        chart = answer["series"]["reward"]
        assert answer["rows"] < 110
        assert answer["sampled"] > 20_000
        assert (chart["x"][0], chart["x"][-1], chart["mean"][-1]) == (0, end - 1, end - 0.5)


def test_compare_has_differing_fields_and_last_values_with_intervals(view: View):
    rows = view.get("runs")["runs"]
    answer = view.get("compare", run=[rows[1]["run"], rows[2]["run"]])
    assert list(answer["spec"].values()) == [[4e-5, 1e-5]]
    final = answer["finals"][0]["eval/accuracy"]
    last = Run(view.root / rows[1]["run"]).metrics()[-1]
    assert final["value"] == pytest.approx(last["eval/accuracy"])
    assert final["high"] - final["value"] == pytest.approx(1.96 * last["eval/accuracy_se"])
    seeds = view.get("compare", run=rows[0]["run"])["finals"][0]["return"]
    assert seeds["seeds"] == 4
    assert seeds["low"] < seeds["value"] < seeds["high"]


def test_log_continues_from_its_cursor(own: View):
    run, path = own.run("demo_sums"), own.session("demo_sums") / "log.txt"
    path.write_text("one\ntwo\n")
    first = own.get("log", run=run)
    assert first["text"] == "one\ntwo\n"
    with path.open("a") as file:
        file.write("three\nfo")
    assert own.get("log", run=run, after=first["cursor"])["text"] == "three\n"
    path.write_text("new\n")
    assert own.get("log", run=run, after=10_000)["text"] == "new\n"


def test_notes_are_merged_and_kept_beside_the_run(own: View):
    run = own.run("demo_sums")
    for changes in (
        {"groups": {"a": {"favorite": True, "text": "x"}}},
        {"groups": {"b": {"text": "y"}}, "tags": ["t"]},
    ):
        assert own.client.patch("/api/notes", params={"run": run}, json=changes).status_code == 200
    answer = own.client.patch("/api/notes", params={"run": run}, json={"groups": {"a": None}}).json()
    stored = json.loads((own.root / run / "notes.json").read_text())
    assert stored == answer
    assert (stored["groups"], stored["tags"]) == ({"b": {"text": "y"}}, ["t"])


def test_notes_of_a_read_only_folder_say_so(own: View, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, obj: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("palestra.view.runs.write_json", refuse)  # root may write anywhere
    answer = own.client.patch("/api/notes", params={"run": own.run("demo_sums")}, json={"text": "x"})
    assert answer.status_code == 409
    assert "cannot be written (Permission denied)" in answer.json()["detail"]


# ---- what it refuses


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "..", "/etc/passwd", "plots/../../secret.txt", ".hidden", "sessions/.lease", "link",
     "folder/secret",      "a\\b", "", "sessions", "%2e%2e/secret.txt", "sessions//0", "\0"],
)  # fmt: skip
def test_file_outside_hidden_or_linked_is_refused(own: View, path: str):
    run = own.run("demo_sums")
    folder = own.root / run
    (folder.parent / "secret.txt").write_text("secret")
    (folder / ".hidden").write_text("secret")
    (folder / "link").symlink_to(folder.parent / "secret.txt")
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "secret").write_text("secret")
    (folder / "folder").symlink_to(folder.parent / "elsewhere")
    answer = own.client.get("/api/file", params={"run": run, "path": path})
    assert answer.status_code == 404
    assert "secret" not in answer.json()["detail"].replace(path, "")


@pytest.mark.parametrize("name", ["..", "demo_sums", "demo_sums/../demo_cartpole", "/etc", "", "demo_sums/nothing"])
def test_run_that_is_not_listed_is_not_there(view: View, name: str):
    assert "there is no run" in view.get("run", 404, run=name)["detail"]


def test_links_in_place_of_a_run_and_of_its_files_are_not_followed(own: View, tmp_path: Path):
    (tmp_path / "secret.json").write_text('{"name": "secret", "token": "abc"}')
    run = own.run("demo_sums")
    (own.root / "other").symlink_to(own.root / "demo_sums")
    before = len(own.get("runs")["runs"])
    manifest = own.session("demo_sums") / "manifest.json"
    manifest.unlink()
    manifest.symlink_to(tmp_path / "secret.json")
    rows = View(own.root).get("runs")["runs"]
    assert len(rows) == before
    assert next(row for row in rows if row["run"] == run)["state"] == "unreadable"
    assert "is a link" in own.get("run", 404, run=run)["detail"]
    metrics = own.session("demo_cartpole") / "metrics.jsonl"
    metrics.unlink()
    metrics.symlink_to(tmp_path / "secret.json")
    assert "is a link" in own.get("series", 404, run=own.run("demo_cartpole"))["detail"]


def test_page_files_stay_inside_the_static_folder(view: View):
    for path in ("/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/.", "/static/../../server.py"):
        answer = view.client.get(path)
        assert "create_app" not in answer.text
        assert answer.status_code in (200, 404)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8765"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:8765", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_requests_of_other_hosts_and_sites_are_refused(view: View, headers: dict[str, str], status: int):
    assert view.client.get("/api/runs", headers=headers).status_code == status


def test_writes_need_json_and_a_length(own: View):
    params = {"run": own.run("demo_sums")}
    plain = own.client.patch("/api/notes", params=params, content=b"{}", headers={"Content-Type": "text/plain"})
    large = own.client.patch("/api/notes", params=params, json={"text": "x" * (1 << 20)})
    other = own.client.patch("/api/notes", params=params, json=[1])
    assert (plain.status_code, large.status_code, other.status_code) == (415, 413, 422)
    assert own.client.post("/api/runs", json={}).status_code == 405


def test_every_answer_forbids_foreign_scripts_and_guessed_types(own: View):
    run = own.run("demo_sums")
    (own.root / run / "plots" / "x.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>")
    (own.root / run / "page.html").write_text("<script>alert(1)</script>")
    for path in ("/", "/api/runs", "/nothing"):
        headers = own.client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    picture = own.client.get("/api/file", params={"run": run, "path": "plots/x.svg"})
    assert picture.headers["content-type"] == "image/svg+xml"
    page = own.client.get("/api/file", params={"run": run, "path": "page.html"})
    assert page.headers["content-type"].startswith("text/plain")
    assert page.headers["content-disposition"] == "attachment"
    for answer in (picture, page):
        assert answer.headers["content-security-policy"].startswith("sandbox")


def test_key_is_needed_and_becomes_a_cookie(demo_folder: Path):  # noqa: F811
    view = View(demo_folder, key="s3cret ü")
    assert view.client.get("/api/runs").status_code == 401
    assert view.client.get("/", params={"key": "other"}).status_code == 401
    answer = view.client.get("/", params={"key": "s3cret ü"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert view.client.get("/api/runs").status_code == 200


def test_folder_removed_while_viewed_is_a_sentence_and_the_others_stay(own: View):
    run, other = own.run("demo_sums"), own.run("demo_cartpole")
    own.get("series", run=run, metric="reward")
    shutil.rmtree(own.root / run)
    for path in ("run", "series", "rollouts", "timeline", "log", "files", "notes", "compare"):
        assert own.get(path, 404, run=run)["detail"]
    assert own.get("run", run=other)["run"] == other


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "{",
        '"x"',
        "[" * 100_000,
        '{"name": 1, "id": []}',
        "",
        '{"name": [], "id": {}, "seeds": 3, "created": 0, "spec": [1]}',
    ],
)
@pytest.mark.parametrize("file", ["trial.json", "sessions/0/manifest.json", "sessions/0/status.json", "notes.json"])
def test_malformed_files_are_a_sentence_and_hide_no_other_run(own: View, file: str, content: str):
    run = own.run("demo_sums")
    (own.root / run / file).write_text(content)
    rows = own.get("runs")["runs"]
    assert sum(row["state"] == "done" for row in rows) >= 2
    answer = own.client.get("/api/run", params={"run": run})
    assert answer.status_code in (200, 404, 409)
    assert answer.status_code == 200 or answer.json()["detail"]


def test_malformed_metrics_are_skipped_and_counted(own: View):
    run, path = own.run("demo_sums"), own.session("demo_sums") / "metrics.jsonl"
    good = path.read_text().splitlines()
    bad = ["{", "[1]", "null", '{"step": "x", "reward": []}', "\xff", '{"step": 99, "reward": NaN}', "[" * 50_000]
    path.write_bytes("\n".join([*good[:10], *bad, *good[10:], ""]).encode("latin-1"))
    answer = own.get("series", run=run, metric="reward")["runs"][run]
    assert answer["skipped"] == 5
    assert len(answer["series"]["reward"]["x"]) == 40


def test_requests_with_wrong_values_are_one_sentence(view: View):
    run = view.run("demo_sums")
    assert "is not a step" in view.get("rollouts", 404, run=run, step="-1")["detail"]
    assert "limit" in view.get("rollouts", 422, run=run, limit=0)["detail"]
    assert "run" in view.get("run", 422)["detail"]
    assert "no session of seed 7" in view.get("log", 404, run=run, seed=7)["detail"]
    assert view.get("timeline", 422, run=run, low="x")["detail"]


def test_command_serves_prints_its_address_and_stops(demo_folder: Path, tmp_path: Path):  # noqa: F811
    command = [sys.executable, "-m", "palestra", "view", str(demo_folder), "--port", "0"]
    environment = os.environ | {"PALESTRA_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{address}api/runs") as answer:
                assert len(json.load(answer)["runs"]) == 3
            port = address.rpartition(":")[2].rstrip("/")
            taken = subprocess.run([*command[:-1], port], capture_output=True, text=True, env=environment)
            assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
            assert f"cannot listen on 127.0.0.1:{port}" in taken.stderr
            request = urllib.request.Request(f"{address}api/runs", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request)
        finally:
            process.terminate()
        process.wait()


def test_command_takes_a_run_by_its_name_and_refuses_what_is_not_there(demo_folder: Path, tmp_path: Path):  # noqa: F811
    (tmp_path / "runs").symlink_to(demo_folder)
    command = [sys.executable, "-m", "palestra", "view", "demo_cartpole", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            address = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{address}api/runs") as answer:
                assert [row["name"] for row in json.load(answer)["runs"]] == ["demo_cartpole"]
        finally:
            process.terminate()
        process.wait()
    refused = subprocess.run([*command[:4], "demo_cartpol"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "Did you mean demo_cartpole" in refused.stderr


def test_command_beyond_loopback_makes_a_key(demo_folder: Path, tmp_path: Path):  # noqa: F811
    command = [sys.executable, "-m", "palestra", "view", str(demo_folder), "--port", "0", "--host", "0.0.0.0"]
    environment = os.environ | {"PALESTRA_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            address = process.stdout.readline().strip().replace("0.0.0.0", "127.0.0.1")
            bare, _, key = address.partition("?key=")
            assert len(key) >= 32
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{bare}api/runs")
        finally:
            process.terminate()
        process.wait()


def test_view_never_imports_torch():
    code = "import sys, palestra.view.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_window_of_a_long_file_has_all_its_rows(own: View, monkeypatch: pytest.MonkeyPatch):
    run, path = own.run("demo_sums"), own.session("demo_sums") / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "tokens": 10 * n, "v": n % 7}) + "\n" for n in range(1, 20001)))
    monkeypatch.setattr("palestra.view.series.WHOLE", path.stat().st_size // 4)
    monkeypatch.setattr("palestra.view.series.SAMPLED", 100)
    whole = own.get("series", run=run, metric="v")["runs"][run]["series"]["v"]
    assert len(whole["x"]) < 200  # a sample
    for axis, scale in (("step", 1), ("tokens", 10)):
        window = {"low": 5003 * scale, "high": 5102 * scale, "x": axis}
        part = own.get("series", run=run, metric="v", **window)["runs"][run]["series"]["v"]
        assert part["x"] == [scale * n for n in range(5003, 5103)]
        assert part["mean"] == [n % 7 for n in range(5003, 5103)]
