"""Rollouts in the web view: steps, filters, histograms, tokens, flags; malformed and huge lines; the index."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from view_runs import View, demo_folder, rows_of  # noqa: F401

from palestra.data.tokenizers import character_tokenizer, train_bpe
from palestra.track.sinks import json_line, long_line
from palestra.view import index as index_module
from palestra.view import lines, rollouts
from palestra.view.flags import flags
from palestra.view.index import Index
from palestra.view.lines import LineFile
from palestra.view.rollouts import token_texts


@pytest.fixture
def view(demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:  # noqa: F811
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rollouts, "STEP_SECONDS", 300.0)  # on a busy machine a step is read in several requests
    shutil.copytree(demo_folder, tmp_path / "runs")
    return View(tmp_path / "runs")


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("encode", [json_line, long_line])
def test_problem_whose_id_is_not_ascii_is_found_however_it_was_written(view: View, indexed, encode):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    rows = rows_of(path)
    for row in rows[::7]:
        row["problem"]["id"] = "größe/日本"
    path.write_bytes(b"".join(map(encode, rows)))
    if indexed:
        Index(path).extend()
    found, after = [], 0
    while after is not None:
        answer = view.get("rollouts", run=run, step="all", problem="größe/日本", after=after)
        found += [group["number"] for group in answer["groups"]]
        after = answer["next"]
    assert sorted(found) == sorted(row["number"] for row in rows[::7])


def test_step_by_default_the_last_with_histograms_of_all_its_completions(view: View):
    run, rows = view.run("demo_sums"), rows_of(view.session("demo_sums") / "rollouts.jsonl")
    answer = view.get("rollouts", run=run)
    last = [row for row in rows if row["step"] == 40]
    assert (answer["step"], answer["first"], answer["last"], answer["previous"]) == (40, 1, 40, 39)
    assert answer["following"] is None
    assert [group["number"] for group in answer["groups"]] == [row["number"] for row in last]
    rewards = [one["reward"] for row in last for one in row["trajectories"]]
    summary = answer["summary"]
    assert summary["reward"]["edges"] == [-0.5, 0.5, 1.5]  # a bin for each of the values 0 and 1
    assert summary["reward"]["counts"] == [rewards.count(0.0), rewards.count(1.0)]
    assert (summary["completions"], answer["count"]) == (64, 8)
    group, row = answer["groups"][3], last[3]
    assert group["reward"] == pytest.approx(fmean(one["reward"] for one in row["trajectories"]))
    assert [one["length"] for one in group["completions"]] == [sum(one["loss_mask"]) for one in row["trajectories"]]


@pytest.mark.parametrize(
    "params",
    [{"status": "wrong"}, {"reward_low": 0.5}, {"reward_high": 0.5, "status": "wrong"}, {"fate": "filtered"},
     {"text": "SO 1"}, {"length_high": 24}, {"flag": "repeated"}, {"task": "other"}, {"text": "nowhere"}],
)  # fmt: skip
def test_filters_agree_with_a_plain_scan_in_every_step(view: View, params: dict):
    run, rows = view.run("demo_sums"), rows_of(view.session("demo_sums") / "rollouts.jsonl")

    def fits(row: dict, one: dict) -> bool:
        text = (one["completion"] + "\n" + row["problem"]["prompt"] + "\n" + one["verdict"]["note"]).casefold()
        return (
            params.get("status") in (None, one["verdict"]["status"])
            and params.get("reward_low", -1) <= one["reward"] <= params.get("reward_high", 9)
            and params.get("fate") in (None, row["fate"])
            and params.get("text", "").casefold() in text
            and sum(one["loss_mask"]) <= params.get("length_high", 1e9)
            and ("flag" not in params or params["flag"] in flags(one["completion"]))
            and params.get("task") in (None, "arithmetic")
        )

    expected = {
        row["number"]: hits
        for row in rows
        if (hits := [i for i, one in enumerate(row["trajectories"]) if fits(row, one)])
    }
    found = {}
    for step in range(1, 41):
        found |= {
            group["number"]: group["hits"] for group in view.get("rollouts", run=run, step=step, **params)["groups"]
        }
    assert found == expected
    everywhere, after = {}, 0
    while after is not None:
        answer = view.get("rollouts", run=run, step="all", after=after, limit=7, **params)
        everywhere |= {group["number"]: group["hits"] for group in answer["groups"]}
        after = answer["next"]
    assert everywhere == expected


def test_pages_of_a_step_are_disjoint_and_complete(view: View):
    run, seen, after = view.run("demo_sums"), [], None
    while True:
        answer = view.get("rollouts", run=run, step=7, limit=3, **({} if after is None else {"after": after}))
        seen += [group["number"] for group in answer["groups"]]
        if (after := answer["next"]) is None:
            break
    assert len(seen) == len(set(seen)) == 8


def test_group_in_full_has_a_text_for_every_token(view: View):
    run = view.run("demo_sums")
    at = view.get("rollouts", run=run, step=5)["groups"][-1]["at"]
    group = view.get("rollouts/group", run=run, at=at)
    assert group["problem"]["row"]["answer"].isdecimal()
    for one in group["trajectories"]:
        assert len(one["texts"]) == len(one["tokens"]) == len(one["advantages"]) == len(one["loss_mask"])
        written = "".join(text for text, sampled in zip(one["texts"], one["loss_mask"], strict=True) if sampled)
        assert written == one["completion"]
        assert len(one["entropy"]) == len(one["ratio"]) == len(one["tokens"])
    rows = rows_of(path := view.session("demo_sums") / "rollouts.jsonl")
    filtered = next(row for row in rows if row["fate"] == "filtered")
    assert not {"entropy", "trained_logprobs"} & filtered["trajectories"][0].keys()
    at = sum(len(line) + 1 for line in path.read_bytes().split(b"\n")[: rows.index(filtered)])
    shown = view.get("rollouts/group", run=run, at=at)["trajectories"][0]
    assert (shown["entropy"], shown["ratio"]) == (None, None)


def test_group_with_trained_logprobs_has_ratios(view: View):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    row = rows_of(path)[0]
    one = row["trajectories"][0]
    one |= {"trained_logprobs": [value - 0.5 for value in one["logprobs"]], "entropy": [0.25] * len(one["tokens"])}
    path.write_text(json.dumps(row) + "\n")
    shown = view.get("rollouts/group", run=run, at=0)["trajectories"][0]
    assert shown["ratio"] == pytest.approx([np.exp(-0.5)] * len(one["tokens"]))
    assert shown["entropy"] == one["entropy"]
    row["trajectories"][0]["tokens"][3] = 10**7  # of another tokenizer
    path.write_text(json.dumps(row) + "\n")
    assert view.get("rollouts/group", run=run, at=0)["trajectories"][0]["texts"] is None


def test_group_at_a_wrong_place_is_a_sentence(view: View):
    run = view.run("demo_sums")
    for at in (1, -5, 10**12):
        assert "there is no group at this place" in view.get("rollouts/group", 404, run=run, at=at)["detail"]


def test_texts_of_split_characters_are_joined_at_the_last_token():
    tokenizer = train_bpe(["plain words only"] * 3, 300)
    ids = tokenizer.encode("a✓ 你b")
    texts, joined = token_texts(ids, tokenizer)
    assert "".join(texts) == "a✓ 你b"
    place = texts.index("✓")
    assert texts[place - 2 : place] == ["", ""]
    assert [joined[place - 2], joined[place - 1], joined[place]] == ["e2", "9c", "93"]
    assert token_texts(ids[:3], tokenizer)[0][-1] == "\ufffd"


def test_html_and_script_come_as_they_are(view: View):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    row = rows_of(path)[0]
    text = "<img src=x onerror=alert(1)></script>\u2028\ud800"
    row["trajectories"][0]["completion"] = text
    path.write_text(json.dumps(row) + "\n")
    response = view.client.get("/api/rollouts", params={"run": run})
    assert response.headers["content-type"] == "application/json"
    assert response.json()["groups"][0]["completions"][0]["completion"] == text


def test_malformed_lines_are_skipped_and_counted(view: View):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    good = path.read_bytes().splitlines()
    bad = [b"{", b'{"number": 1, "step": 40}', b"\xff\xfe", b'{"step": 40, "problem": 3, "trajectories": 7}',
           b'{"number": 1, "step": 40, "problem": ' + b"[" * 60_000]  # fmt: skip
    path.write_bytes(b"\n".join([*good, *bad, b'{"torn": ']))
    answer = view.get("rollouts", run=run, step=40)
    assert (answer["count"], answer["skipped"]["malformed"]) == (8, 5)
    assert len(view.get("rollouts", run=run, step="all", problem="nothing/x")["groups"]) == 0


def test_line_too_long_is_said_and_not_read(view: View, monkeypatch: pytest.MonkeyPatch):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"number": 9, "step": 40, "x": "' + b"y" * (lines.LONGEST + 10) + b'"}\n')
    answer = view.get("rollouts", run=run)
    assert (answer["count"], answer["skipped"]["too_long"]) == (8, 1)
    assert "too long to be shown" in view.get("rollouts/group", 404, run=run, at=size)["detail"]


def test_growing_step_shows_new_groups_and_a_truncated_one_only_what_is_left(view: View):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-3]))
    assert view.get("rollouts", run=run, step=40)["count"] == 5
    with path.open("ab") as file:
        file.write(b"".join(whole[-3:]))
    assert view.get("rollouts", run=run, step=40)["count"] == 8
    path.write_bytes(b"".join(whole[:-6]))
    assert view.get("rollouts", run=run, step=40)["count"] == 2


def test_step_that_a_resumed_run_wrote_anew_at_the_same_place_is_read_anew(view: View):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    earlier = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < 40]
    step = [row for row in rows_of(path) if row["step"] == 40]
    assert view.get("rollouts", run=run, step=40)["count"] == len(step)
    for one in (one for row in step for one in row["trajectories"]):
        one["completion"] = f"again {one['completion']}"
    path.write_text("".join([*earlier, *(f"{json.dumps(row)}\n" for row in step)]))
    answer = view.get("rollouts", run=run, step=40)
    assert (answer["count"], answer["skipped"]["malformed"]) == (len(step), 0)
    assert all(one["completion"].startswith("again ") for group in answer["groups"] for one in group["completions"])


def test_step_that_takes_long_to_read_is_read_on_by_the_next_request(view: View, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollouts, "STEP_SECONDS", 0.0)
    run, counts = view.run("demo_sums"), []
    while True:
        answer = view.get("rollouts", run=run, step=40)
        counts.append(answer["count"])
        if not answer["skipped"]["unread_bytes"]:
            break
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8]


def test_lists_in_memory_are_limited(view: View):
    path = view.session("demo_sums") / "rollouts.jsonl"
    kept = rollouts.Rollouts(limit=100_000)
    with LineFile(path) as file:
        for step in range(1, 41):
            assert kept.step(file, step, rollouts.Wanted(), -1, 9)["count"] == 8
    assert 1 <= len(kept._parts) <= 3


def test_index_gives_the_same_groups_as_the_scan(view: View, monkeypatch: pytest.MonkeyPatch):
    run, path = view.run("demo_sums"), view.session("demo_sums") / "rollouts.jsonl"
    monkeypatch.setattr(index_module, "CHUNK", 50)
    cases = [{"problem": "arithmetic/train/17"}, {"status": "wrong"}, {"reward_low": 0.5, "reward_high": 0.9}, {}]

    def answers() -> list:
        return [
            [group["at"] for group in view.get("rollouts", run=run, step="all", limit=500, **case)["groups"]]
            for case in cases
        ]

    monkeypatch.setattr(rollouts, "SECONDS", 60.0)
    scanned = answers()
    assert len(scanned[0]) == 5
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    Index(path).extend()
    path.write_bytes(whole)  # the same file, grown
    Index(path).extend()
    with LineFile(path) as file:
        meta = Index(path).meta(file)
        assert (meta["cursor"], meta["rows"]) == (len(whole), 320)
    monkeypatch.setattr(rollouts, "listed", _counted(rollouts.listed, calls := []))
    assert answers() == scanned
    assert len([at for at in calls if at in scanned[0]]) <= len(calls) < 320 * 3
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[5:]))  # another beginning: the index is of no use
    with LineFile(path) as file:
        assert Index(path).meta(file)["rows"] == 0


def _counted(function, calls: list):
    def counting(at: int, line: bytes):
        calls.append(at)
        return function(at, line)

    return counting


def test_answers_and_samples_have_the_same_form(view: View):
    run, folder = view.run("demo_sums"), view.session("demo_sums")
    verdict = {"score": 1.0, "status": "correct", "parts": {}, "seconds": 0.1, "sandbox": None, "note": "4"}
    answer = {"text": "It is 4", "tokens": 3, "stop_reason": "eos", "verdict": verdict}
    row = {
        "id": "sums/test/0",
        "task": "sums",
        "mode": "greedy",
        "prompt": "2+2=",
        "prompt_tokens": 4,
        "answers": [answer],
    }
    (folder / "answers.jsonl").write_text(json.dumps(row | {"answers": [answer]}) + "\n")
    sample = {"step": 3, "prompt": "Once", "text": " upon", "stop_reason": "length"}
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    answers, samples = (view.get("rollouts", run=run, file=file) for file in ("answers", "samples"))
    assert answers["groups"][0] | {"problem": "sums/test/0", "reward": 1.0, "task": "sums"} == answers["groups"][0]
    assert (samples["step"], samples["groups"][0]["completions"][0]["completion"]) == (3, " upon")
    assert view.get("rollouts/group", run=run, file="answers", at=0)["trajectories"][0]["completion"] == "It is 4"
    assert view.get("rollouts", 422, run=run, file="../secret")["detail"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("the answer is 4, because " * 30, {"repeated"}), ("ok " * 500, {"repeated"}), ("", set()), ("a", set()),
     ("\ufffd\x00\x01abc" * 4, {"garbled"}), ("Привет world 你好 שלום", {"garbled"}), ("x = 1\ny = 2\n" * 2, set()),
     ("Ein Satz, der nichts wiederholt und über Äpfel spricht. " + " ".join(map(str, range(200))), set())],
)  # fmt: skip
def test_flags(text: str, expected: set[str]):
    assert set(flags(text)) == expected


def test_flags_none_on_code_and_prose_of_this_repository():
    for path in sorted(Path(__file__).parent.parent.glob("palestra/rl/*.py")):
        assert flags(path.read_text()) == {}, path


def test_tokenizer_is_that_of_the_run_it_began_from(view: View):
    run, folder = view.run("demo_sums"), view.session("demo_sums")
    assert view.get("rollouts/group", run=run, at=0)["tokenizer"] is not None
    shutil.rmtree(folder / "checkpoints")
    assert view.get("rollouts/group", run=run, at=0)["trajectories"][0]["texts"] is None
    character_tokenizer([chr(code) for code in range(32, 127)]).save(
        view.root / "demo_model" / "1" / "sessions" / "0" / "checkpoints" / "step_1" / "model"
    )
    shutil.copy(view.root / run / "trial.json", view.root / "demo_model" / "1" / "trial.json")
    assert View(view.root).get("rollouts/group", run=run, at=0)["tokenizer"] is not None
