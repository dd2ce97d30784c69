"""Suites beside training: they change no number of it, are of one version of the weights, and resume exactly."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import posttrain_lab
import pytest
import tiny_lm
from tiny_lm import WORDS, rows_of, session_of, write_rows

from palestra.data.tokenizers import Tokenizer
from palestra.errors import Interrupted, UsageError
from palestra.evaluate.suites import measure, open_suite, suite_metrics
from palestra.kinds.models import open_model
from palestra.lm.model import Transformer
from palestra.runs.plot import suite_plots
from palestra.runs.run import Run, diff, measured, open_run
from palestra.runs.store import read_json
from palestra.spec.tasks import SuiteUse, suite_spec
from palestra.tasks.verify.workers import Verifiers

# Forked from a process that has imported torch already: a new one would take seconds to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.kinds.lm", "torch._dynamo", "pytest"])

BPE: dict[str, Any] = {"bpe": 300}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))


def write_suite(folder: Path, **blocks: Any) -> str:
    """A file with choices, texts to be written, bits a byte and a task."""
    pairs = [(a, b) for a in WORDS for b in WORDS if a != b][:12]
    choices = [{"query": f"{a} {b}", "choices": [a, b], "gold": i % 2} for i, (a, b) in enumerate(pairs)]
    written = [{"context": f"{a} {b}", "continuation": a} for a, b in pairs]
    spec = {
        "kind": "evaluate",
        "name": "mine",
        "model": {"init": "none"},
        "likelihood": [
            {"path": write_rows(folder / "pick.jsonl", choices), "shots": 1, "border": "common"},
            {"path": write_rows(folder / "say.jsonl", written)},
        ],
        "texts": [{"path": write_rows(folder / "tales.jsonl", [{"text": f"{a} {b}"} for a, b in pairs])}],
        "tasks": [{"task": "eval_tasks:Letters", "name": "letters"}],
        "eval": {"max_new_tokens": 3, "samples": 2},
        **blocks,
    }
    path = folder / "mine.json"
    path.write_text(json.dumps(spec))
    return str(path)


def results_of(run: Run) -> dict[str, Any]:
    return read_json(session_of(run) / "results.json")["suites"]


def without_suites(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bare = [{key: value for key, value in row.items() if not key.startswith("suite/")} for row in rows]
    return [row for row in bare if row.keys() - {"seed", "step", "tokens"}]


def of_suites(rows: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    found = {row["step"]: {key: value for key, value in row.items() if key.startswith("suite/")} for row in rows}
    return {step: metrics for step, metrics in found.items() if metrics}


def weights(run: Run) -> bytes:
    (path,) = (run.checkpoint("last") / "model").glob("*.safetensors")
    return path.read_bytes()


def by_hand(model: Transformer, tokenizer: Tokenizer, eos: Any, path: str) -> dict[str, float]:
    """What a suite says of a model that is loaded afresh."""
    spec = suite_spec(SuiteUse(suite=path))
    with Verifiers(spec.tasks) as judges:
        suite = open_suite("mine", spec, judges.tasks, tokenizer)
        return suite_metrics("mine", measure(suite, model, tokenizer, judges.verify, eos=eos))


@pytest.mark.parametrize("average", [None, 0.8])
def test_pretraining_has_the_same_bits_with_and_without_suites(tmp_path, average):
    lab, path = tiny_lm.Lab(tmp_path), write_suite(tmp_path)
    suites = [
        {"suite": path, "every": "4 steps"},
        {"suite": path, "name": "end", "mode": "after", "limit": 5},
        {"suite": path, "name": "seven", "mode": "during", "every": "7 steps"},
    ]
    changes = {"model__tokenizer": BPE, "train__ema": average, "every__log": "3 steps"}
    plain = lab.run("pretrain", name="plain", **changes)
    suited = lab.run("pretrain", name="suited", suites=suites, **changes)
    assert without_suites(rows_of(suited)) == rows_of(plain)  # losses, gradients, evaluations: bit for bit
    assert weights(suited) == weights(plain)
    found = of_suites(rows_of(suited))
    due = {step: {key.split("/")[1] for key in metrics} for step, metrics in found.items()}
    assert due == {4: {"mine"}, 7: {"seven"}, 8: {"mine"}, 12: {"mine", "end"}}
    results = results_of(suited)
    steps = {name: [row["step"] for row in one["rows"]] for name, one in results.items()}
    assert steps == {"mine": [4, 8, 12], "end": [12], "seven": [7]}
    assert results["end"]["setup"]["likelihood"]["pick"]["items"] == 5
    for name, one in results.items():
        for row in one["rows"]:
            expected = suite_metrics(name, row)
            assert {key: found[row["step"]][key] for key in expected} == expected
    assert not (session_of(plain) / "results.json").exists()
    # The weights that were measured last are those of the last checkpoint: the moving average where there is one.
    loaded, tokenizer = open_model(suited.checkpoint("last") / "model", lab.root)
    mine = {key: value for key, value in found[12].items() if key.startswith("suite/mine/")}
    assert by_hand(loaded.model, tokenizer, loaded.eos, path) == mine


def train(path: str, environment: dict[str, str], changes: dict[str, Any]) -> None:
    """Train in a process of its own."""
    os.environ.update(environment)
    tiny_lm.Lab(Path(path)).run("pretrain", **changes)


def test_killed_and_stopped_run_has_the_results_of_one_that_was_not(tmp_path):
    lab = tiny_lm.Lab(tmp_path)
    suites = [{"suite": write_suite(tmp_path), "every": "2 steps"}]
    changes = {"model__tokenizer": BPE, "suites": suites, "hooks": ["lm_hooks:end"], "every__checkpoint": "3 steps"}
    whole = lab.run("pretrain", name="whole", **changes)
    (tmp_path / "kill").write_text("8")  # measured at 8, with a checkpoint at 6
    environment = {name: os.environ[name] for name in ("PALESTRA_CACHE", "PALESTRA_LAB")} | {"OMP_NUM_THREADS": "1"}
    process = PROCESSES.Process(target=train, args=(str(tmp_path), environment, {"name": "killed", **changes}))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    left = results_of(open_run("killed", lab.root))["mine"]["rows"]
    assert [row["step"] for row in left] == [2, 4, 6, 8]
    (tmp_path / "stop").write_text("10")
    with pytest.raises(Interrupted):
        lab.resume("killed")
    killed = lab.resume("killed")
    assert results_of(killed) == results_of(whole)
    assert rows_of(killed) == rows_of(whole)
    # Other rows than it began with would make results of two things.
    write_rows(tmp_path / "say.jsonl", [{"context": "red", "continuation": "hen"}] * 12)
    with pytest.raises(UsageError, match=r"suite mine: likelihood\.say is not what"):
        lab.resume("killed", overrides=["train.steps=13"], allow=["train.steps"])


@pytest.mark.parametrize("staleness", [0, 2])
def test_posttraining_has_the_same_bits_with_suites_and_measures_what_it_publishes(tmp_path, staleness):
    lab, path = posttrain_lab.Lab(tmp_path), write_suite(tmp_path)
    changes: dict[str, Any] = {"rollout__staleness": staleness, "tasks": posttrain_lab.letters()}
    suited = lab.run(name="suited", suites=[{"suite": path, "every": "3 steps"}], **changes)
    found = of_suites(rows_of(suited))
    assert list(found) == [3, 5]
    assert [row["step"] for row in results_of(suited)["mine"]["rows"]] == [3, 5]
    loaded, tokenizer = open_model(suited.checkpoint("last") / "model", lab.root)
    assert by_hand(loaded.model, tokenizer, loaded.eos, path) == found[5]
    if staleness == 0:  # above it, numbers depend on when answers come
        plain = lab.run(name="plain", **changes)
        bare = [{key: value for key, value in row.items() if not key.startswith("suite/")} for row in rows_of(suited)]
        assert bare == rows_of(plain)
        assert weights(suited) == weights(plain)


@pytest.mark.slow  # it must be stopped within the suite, which is over in a moment
def test_posttraining_that_is_stopped_in_a_suite_measures_it_again(tmp_path):
    lab = posttrain_lab.Lab(tmp_path)
    path = write_suite(
        tmp_path, tasks=[{"task": "posttrain_tasks:Signalling", "name": "letters", "args": {"pause": 0.05}}]
    )
    changes: dict[str, Any] = {"suites": [{"suite": path, "every": "2 steps"}]}
    whole = lab.run(name="whole", **changes)
    (tmp_path / "signal").write_text(f"{int(signal.SIGTERM)} 3")
    with pytest.raises(Interrupted, match="stopped at step 2"):
        lab.run(name="stopped", **changes)
    assert results_of(open_run("stopped", lab.root))["mine"]["rows"] == []
    stopped = lab.resume("stopped")
    assert results_of(stopped) == results_of(whole)
    posttrain_lab.assert_equal_runs(stopped, whole)


def test_suite_that_cannot_be_scored_ends_a_run_before_it_has_a_folder(tmp_path):
    lab = tiny_lm.Lab(tmp_path)
    with pytest.raises(UsageError, match=r"suite mine: the tokenizer .* has no token for 'j', 'q'"):
        lab.run("pretrain", suites=[{"suite": write_suite(tmp_path)}])
    with pytest.raises(UsageError, match=r"suite mine: pick, row 1: .*no token for '\\n'"):
        lab.run("pretrain", suites=[{"suite": write_suite(tmp_path, tasks=[])}])
    with pytest.raises(UsageError, match=r"missing\.yaml"):
        lab.run("pretrain", suites=[{"suite": str(tmp_path / "missing.yaml")}])
    assert not lab.root.exists() or not list(lab.root.iterdir())


def test_readers_show_suites_of_all_seeds(tmp_path):
    lab, path = tiny_lm.Lab(tmp_path), write_suite(tmp_path, tasks=[])
    changes: dict[str, Any] = {"model__tokenizer": BPE, "train__steps": 4, "max_session": 2, "every__eval": None}
    some = [{"suite": path, "every": "2 steps"}, {"suite": path, "name": "end", "mode": "after"}]
    run = lab.run("pretrain", name="two", suites=some, **changes)
    numbers = measured(run)
    assert {(one.seed, one.step) for one in numbers if one.suite == "mine"} == {(s, n) for s in (0, 1) for n in (2, 4)}
    assert {one.task: one.type for one in numbers} == {
        "pick": "likelihood",
        "say": "likelihood",
        "tales": "texts",
        "centred": "mean",
    }
    both = [one.value for one in numbers if (one.suite, one.task, one.step) == ("mine", "tales", 4)]
    last = run.summary()["suite/mine/tales"]
    assert last == pytest.approx(sum(both) / 2)
    assert run.metrics(0)[-1]["suite/end/centred"] == next(
        o.value for o in numbers if o.suite == "end" and o.task == "centred"
    )
    other = lab.run("pretrain", name="one", suites=some[:1], **{**changes, "max_session": 1, "seed": 5})
    compared = diff(run, other).results
    assert compared["summary.suite/mine/tales"] == (last, other.summary()["suite/mine/tales"])
    drawn = suite_plots(run)
    assert {path.name for path in drawn} == {
        f"suite_{name}.{kind}" for name in ("mine", "end") for kind in ("png", "svg")
    }
    assert all(path.stat().st_size > 5000 for path in drawn)


@pytest.mark.slow
def test_two_ranks_measure_what_one_process_does(tmp_path):
    lab = tiny_lm.Lab(tmp_path)
    # Every suite alone in its step: a rank that has no row then must not leave the others waiting.
    suites = [{"suite": write_suite(tmp_path), "every": "5 steps"}]
    changes: dict[str, Any] = {"model__tokenizer": BPE, "suites": suites, "every__log": "4 steps", "every__eval": None}
    one = lab.run("pretrain", name="one", **changes)
    two = lab.run("pretrain", name="two", devices=2, **changes)
    assert [row["step"] for row in results_of(two)["mine"]["rows"]] == [5, 10, 12]
    assert results_of(two)["mine"]["setup"] == results_of(one)["mine"]["setup"]
    for ours, theirs in zip(results_of(two)["mine"]["rows"], results_of(one)["mine"]["rows"], strict=True):
        assert ours["tasks"]["tales"]["value"] == pytest.approx(theirs["tasks"]["tales"]["value"], rel=1e-4)
