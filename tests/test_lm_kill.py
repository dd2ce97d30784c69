"""A language-model run that is killed or stopped and resumed ends with the numbers of one that was not."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fast_only, wait_until
from safetensors.torch import load_file
from tiny_lm import EXPERTS, MUON, Lab, rows_of, session_of

import palestra
from palestra.errors import Interrupted, UsageError
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.runs.checkpoint import metas
from palestra.runs.run import Run, open_run

# Forked from a process that has imported torch already: a new one would take seconds to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["palestra.kinds.lm", "torch._dynamo", "pytest"])

SAMPLES: dict[str, Any] = {"prompts": ["red cat", "hen"], "max_new_tokens": 3, "every": "2 steps"}
CASES: dict[str, dict[str, Any]] = {
    "pretrain": {"kind": "pretrain", "optim": MUON, "train__ema": 0.9, "samples": SAMPLES},
    "experts": {"kind": "pretrain", "model__shape__moe": {**EXPERTS, "balance": 0.01}, "optim": MUON},
    "sft_adapters": {"kind": "sft", "model__lora": {"rank": 4}, "model__init": "base", "samples": SAMPLES},
    "sft_adapters_average": {"kind": "sft", "model__lora": {"rank": 4}, "model__init": "base", "train__ema": 0.8},
    "sft_dora": {
        "kind": "sft",
        "model__lora": {"rank": 4, "dora": True, "modules_to_save": ["embed_tokens"]},
        "model__init": "base",
        "train__weights": "bf16",
    },
    "sft_4bit": {
        "kind": "sft",
        "model__lora": {"rank": 4, "quantize": "nf4", "double_quantize": True, "targets": "v_proj"},
        "model__init": "base",
    },
    "narrow": {
        "kind": "pretrain",
        "model__shape__width": 64,
        "optim": {"name": "adamw", "lr": 3e-3, "state": "8bit", "offload": True},
        "train__weights": "bf16",
    },
    "dpo": {"kind": "dpo", "model__init": "base"},
    "reward_model": {"kind": "reward_model"},
}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("PALESTRA_LAB", str(tmp_path))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def case_of(lab: Lab, case: str) -> tuple[str, dict[str, Any]]:
    """The kind and the changes of a case; a run `base` is there where it starts from one."""
    changes = {**CASES[case], "hooks": ["lm_hooks:end"], "every__checkpoint": "3 steps"}
    kind = changes.pop("kind")
    if "model__init" in changes:
        changes["model__init"] = str(lab.run("sft", name="base", train__steps=4).path)
    return kind, changes


def train(path: str, environment: dict[str, str], kind: str, changes: dict[str, Any], resume: str | None) -> None:
    """Train or resume in a process of its own."""
    os.environ.update(environment)
    lab = Lab(Path(path))
    lab.run(kind, **changes) if resume is None else lab.resume(resume)


def kill_at(lab: Lab, step: int, kind: str, changes: dict[str, Any], resume: str | None = None) -> None:
    """Train in another process, which kills itself once it has written the row before `step`."""
    (lab.path / "kill").write_text(str(step))
    environment = {name: os.environ[name] for name in ("PALESTRA_CACHE", "PALESTRA_LAB")} | {"OMP_NUM_THREADS": "1"}
    process = PROCESSES.Process(target=train, args=(str(lab.path), environment, kind, changes, resume))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def assert_equal_runs(run: Run, reference: Run) -> None:
    rows, expected = rows_of(run), rows_of(reference)
    assert [row["step"] for row in rows] == list(range(1, len(expected) + 1))
    for row, one in zip(rows, expected, strict=True):
        assert json.dumps(row) == json.dumps(one)  # as text: every digit counts
    for folder in sorted(path.name for path in (session_of(reference) / "checkpoints").iterdir()):
        ours, theirs = (session_of(one) / "checkpoints" / folder for one in (run, reference))
        for path in theirs.glob("model/*.safetensors"):
            mine, wanted = load_file(ours / "model" / path.name), load_file(path)
            assert mine.keys() == wanted.keys()
            assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
        states = [load_checkpoint(one).state["engine"] for one in (ours, theirs)]
        assert_equal_trees(*states)


def assert_equal_trees(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal_trees(found[key], expected[key])
    else:
        assert found == expected


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
@pytest.mark.parametrize("case", fast_only(CASES, "experts", "sft_adapters_average", "narrow"))
def test_run_killed_equals_one_that_was_not(lab, case, again):
    kind, changes = case_of(lab, case)
    reference = lab.run(kind, **changes, name="reference")
    kill_at(lab, 5, kind, {**changes, "name": "killed"})
    killed = open_run("killed", lab.root)
    assert killed.state == "killed"
    assert metas(session_of(killed))[-1].step == 3
    if again:
        kill_at(lab, 11, kind, changes, resume="killed")
    lab.resume("killed")
    assert killed.state == "done"
    assert_equal_runs(killed, reference)
    if "samples" in changes:
        texts = [(session_of(run) / "samples.jsonl").read_text() for run in (killed, reference)]
        assert texts[0] == texts[1]
        rows = [json.loads(line) for line in texts[0].splitlines()]
        assert [row["step"] for row in rows] == [step for step in (2, 4, 6, 8, 10, 12) for _ in SAMPLES["prompts"]]
    if "adapters" in case:
        model = killed.checkpoint("last") / "model"
        assert [path.name for path in model.glob("*.safetensors")] == ["adapter_model.safetensors"]


def test_resumed_run_goes_on_from_the_model_it_began_with_though_its_name_means_another_now(lab):
    lab.run("sft", name="base", train__steps=4)
    base = str(lab.root / "base")
    reference = lab.run("dpo", name="reference", model__init=base)
    kill_at(lab, 5, "dpo", {"name": "killed", "model__init": base, "hooks": ["lm_hooks:end"]})
    lab.run("sft", name="base", train__steps=6)
    lab.resume("killed")
    assert_equal_runs(open_run("killed", lab.root), reference)


def test_selection_biases_of_experts_are_in_the_checkpoint_and_go_on(lab):
    run = lab.run("pretrain", model__shape__moe=EXPERTS)
    weights = load_file(run.checkpoint("last") / "model" / "model.safetensors")
    biases = [weight for name, weight in weights.items() if name.endswith("mlp.bias")]
    assert len(biases) == 2
    assert all(bias.abs().max() > 0 for bias in biases)


def test_run_stopped_by_sigterm_saves_there_and_resumes_equal(lab):
    kind, changes = case_of(lab, "pretrain")
    reference = lab.run(kind, **changes, name="reference")
    (lab.path / "stop").write_text("7")
    with pytest.raises(Interrupted, match="stopped at step 7 with everything saved; continue with: palestra train"):
        lab.run(kind, **changes, name="stopped")
    stopped = open_run("stopped", lab.root)
    assert stopped.state == "interrupted"
    assert metas(session_of(stopped))[-1].step == 7
    lab.resume("stopped")
    assert_equal_runs(stopped, reference)


def test_resume_with_another_model_or_batch_is_refused_and_more_steps_are_allowed(lab):
    run = lab.run("sft", train__steps=4)
    for field, value in (("train.batch", 3), ("model.shape.layers", 1), ("data.context", 40)):
        with pytest.raises(UsageError, match="do not fit the changed spec"):
            palestra.run(resume=run, root=lab.root, quiet=True, overrides={field: value}, allow=[field])
    longer = lab.resume(run.name, overrides={"train.steps": 6}, allow=["train.steps"])
    assert [row["step"] for row in rows_of(longer)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_command_killed_while_it_trains_equals_one_that_was_not(scratch, lab):
    reference = lab.run("pretrain", train__steps=40, every__checkpoint="7 steps")
    spec = scratch.spec("command", lab.spec("pretrain", train__steps=40, every__checkpoint="7 steps"))
    cache = os.environ["PALESTRA_CACHE"]
    process = scratch.start("train", spec, "--quiet", PALESTRA_CACHE=cache)
    wait_until(lambda: list(scratch.path.glob("runs/command/*/sessions/0/checkpoints/step_*7")), process)
    process.kill()
    process.communicate()
    result = scratch("train", "--resume", "command", "--quiet", PALESTRA_CACHE=cache)
    assert result.returncode == 0, result.stderr
    assert_equal_runs(open_run("command", scratch.path / "runs"), reference)
