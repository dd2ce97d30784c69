"""RL with completions of another program: vLLM's protocol over our engine, and vLLM itself where it is installed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_servers import vllm_server
from example_specs import ROOT
from posttrain_lab import Lab, log_of, rollouts_of, rows_of, session_of
from tiny_server import running

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.remote.dialects import Vllm
from palestra.generate.remote.generator import Choice
from palestra.generate.serve.server import create_app
from palestra.spec.kinds.evaluate import evaluation

VLLM = os.environ.get("PALESTRA_VLLM")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@contextmanager
def vllm(lab: Lab) -> Iterator[str]:
    with vllm_server(Engine.from_folder(lab.model)) as (address, problems):
        yield address
    assert not problems


def remote(engine: str, url: str, **more: Any) -> dict[str, Any]:
    return {"engine": engine, "url": url, **more}


def test_run_with_a_vllm_server_learns_what_it_learns_with_the_engine_here(lab: Lab) -> None:
    plain = lab.run(name="plain", rollout__temperature=0.7)
    with vllm(lab) as address:
        run = lab.run(name="remote", rollout__temperature=0.7, rollout__generator=remote("vllm", address))
    rows, expected = rows_of(run), rows_of(plain)
    assert [row["reward"] for row in rows if "reward" in row] == [row["reward"] for row in expected if "reward" in row]
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [
        row["eval/accuracy"] for row in expected if "eval/accuracy" in row
    ]
    assert max(row["mismatch"] for row in rows if "mismatch" in row) < 1e-6
    for record in rollouts_of(run):  # trained at this version, sampled by the one before
        for one in record.group.trajectories:
            assert {v for v, mine in zip(one.versions, one.loss_mask, strict=True) if mine} == {record.step - 1}
    assert not (session_of(run) / "weights").exists()


def test_logprobs_of_another_distribution_are_refused_unless_corrected(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Vllm._choice

    def before_temperature(self: Vllm, choice: dict[str, Any]) -> Choice:
        made = read(self, choice)
        made.logprobs[:] = [0.7 * logprob - 0.2 for logprob in made.logprobs]
        return made

    monkeypatch.setattr(Vllm, "_choice", before_temperature)
    with vllm(lab) as address:
        settings = {"rollout__generator": remote("vllm", address), "train__steps": 1}
        with pytest.raises(PalestraError, match=r"rollout\.generator\.mismatch = 0\.001"):
            lab.run(**settings)
        run = lab.run(name="corrected", algorithm__anchor="recomputed", **settings)
    assert max(row["mismatch"] for row in rows_of(run) if "mismatch" in row) > 1e-3


def test_run_with_our_own_server(lab: Lab) -> None:
    engine = Engine.from_folder(lab.model)
    assert engine.tokenizer is not None
    with (
        LocalGenerator(engine, drive="thread") as generator,
        running(create_app(generator, engine.tokenizer, model_name="lab")) as address,
    ):
        run = lab.run(train__steps=2, rollout__staleness=1, rollout__generator=remote("palestra", address))
        assert engine.version == 2
        model = run.checkpoint("last") / "model"
        spec = evaluation(model, tasks=["posttrain_tasks:Letters"], problems=6, max_new_tokens=6, device="cpu")
        here = palestra.run({**spec, "name": "here"}, root=lab.root, quiet=True)
        for name in ("openai", "vllm", "palestra"):
            there = palestra.run({**spec, "name": name, "generator": remote(name, address)}, root=lab.root, quiet=True)
            assert there.summary()["eval/accuracy"] == here.summary()["eval/accuracy"]
    assert max(row["staleness_max"] for row in rows_of(run) if "staleness_max" in row) <= 1


def test_server_that_is_not_there_and_engines_that_cannot_train_are_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match="start the server first"):
        lab.run(rollout__generator=remote("vllm", "http://127.0.0.1:9"))
    for wrong, message in (
        ({"engine": "openai", "url": "http://localhost:1"}, "it is for kind evaluate"),
        ({"engine": "vllm"}, "either `url` or `launch`"),
        ({"engine": "vllm", "url": "http://u:p@host:1"}, "a URL such as"),
        ({"engine": "palestra", "url": "http://localhost:1", "model": "x"}, "has one model"),
        ({"engine": "sglang", "url": "http://localhost:1", "weights": "shared_memory"}, "sglang has no plugin for it"),
        ({"engine": "vllm", "url": "http://localhost:1", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ):
        with pytest.raises(UsageError, match=message):
            lab.run(rollout__generator=wrong)


def test_engine_that_does_not_start_shows_the_end_of_its_log(lab: Lab) -> None:
    launch = {"engine": "sglang", "launch": {"env": {"PYTHONPATH": ""}}}
    with pytest.raises(PalestraError, match=r"(?s)ended with code 1.*No module named .*sglang"):
        lab.run(rollout__generator=launch)


@pytest.mark.slow
def test_server_that_the_run_starts_ends_with_it(lab: Lab) -> None:
    run = lab.run(train__steps=2, rollout__generator={"engine": "palestra", "launch": {}})
    session = session_of(run)
    assert "serving" in (session / "engine.log").read_text()
    assert "the palestra server is ready" in log_of(run)
    assert not (session / "weights").exists()


def trained_sums(folder: Path) -> None:
    """The model of the example, by the commands at its top."""
    subprocess.run([sys.executable, ROOT / "examples/quickstart/teacher.py"], cwd=folder, check=True)
    palestra.run(
        ROOT / "examples/quickstart/sft.yaml",
        root=folder / "runs",
        quiet=True,
        name="sums_wide",
        **{"model.shape.head_dim": 32},
    )


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="PALESTRA_VLLM does not name a Python with vLLM")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weights", ["folder", "shared_memory"])
def test_vllm_itself_trains_and_its_raw_logprobs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trained_sums(tmp_path)
    example, settings = ROOT / "examples/posttrain/vllm.yaml", {"rollout.generator.launch.python": VLLM}
    settings["rollout.generator.weights"] = weights
    run = palestra.run(example, root=tmp_path / "runs", quiet=True, **settings)
    rows = [row for row in run.metrics() if "mismatch" in row]
    assert len(rows) == 20
    assert sum(row["mismatch"] for row in rows) / len(rows) <= 1e-3
    assert sum(row["reward"] for row in rows[-5:]) > sum(row["reward"] for row in rows[:5])
    for record in rollouts_of(run):
        for one in record.group.trajectories:
            assert {v for v, mine in zip(one.versions, one.loss_mask, strict=True) if mine} == {record.step - 1}
    if weights == "shared_memory":
        return
    raw = ["--enforce-eager", "--dtype", "float32", "--skip-tokenizer-init", "--logprobs-mode", "raw_logprobs"]
    with pytest.raises(PalestraError, match="processed_logprobs"):
        palestra.run(example, root=tmp_path / "runs", quiet=True, **settings, **{"rollout.generator.launch.args": raw})
