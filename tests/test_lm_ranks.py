"""Training on two ranks: the numbers of one process, one run folder, stops, failures, and resumes on fewer or more."""

import json
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zygote
from conftest import ENVIRONMENT, Scratch, last_step, numbers
from ranks_worker import CASES
from safetensors.torch import load_file
from torch import Tensor

import palestra
from palestra.errors import Interrupted, PalestraError, UsageError
from palestra.runs.session import state_of
from palestra.work.pool import TaskFailed

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
SHAPE = {"layers": 2, "width": 16, "heads": 2, "mlp": 32, "context": 48}
EXPERTS = {"experts": 4, "active": 2, "mlp": 8, "bias_rate": 0.01}


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*TORCHRUN, *arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False
    )


# ---- the engine


def on_ranks(folder: Path, size: int, *arguments: str) -> list[dict[str, dict[str, float]]]:
    """What tests/ranks_worker.py writes down on each rank, by jobs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code = f"import runpy\nrunpy.run_path({str(HERE / 'ranks_worker.py')!r}, run_name='__main__')"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    ranks = [
        zygote.Popen(
            [sys.executable, "-c", code, str(folder), *arguments], env=ENVIRONMENT | where | {"RANK": str(rank)}
        )
        for rank in range(size)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * size
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


QUICK = ("adapters", "micro-batches", "one pair")


@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param([*CASES.keys() - QUICK], marks=pytest.mark.slow)], ids=["quick", "others"]
)
def test_two_ranks_compute_what_one_process_computes_with_half_of_the_model_each(tmp_path, cases):
    jobs = [f"shard=2/{case}/measure" for case in cases]
    both = on_ranks(tmp_path, 2, "float32", *jobs, "shard=2/untied/shares")
    shares = [found.pop("shard=2/untied/shares") for found in both]
    for found in both:
        assert found.keys() == set(jobs)
        # Losses and gradients to 1e-6; over several steps Adam, which divides by the gradient's size, makes more of it.
        within = {what: 5e-6 if what.startswith("steps") else 1e-6 for case in found for what in found[case]}
        far = {(case, what): by for case in found for what, by in found[case].items() if not by <= within[what]}
        assert not far
    assert sum(share["mine"] for share in shares) == shares[0]["all"]
    assert all(0.45 < share["mine"] / share["all"] < 0.55 for share in shares)


DENSE = ("untied", "gemma", "recomputed", "scalar", "one_pair")
EVERY = ("micro-batches", "one_sequence", "gated")
DEEP = ("deep", "deep_dense")
AXES = [
    ("tensor=2", (*DENSE, *EVERY, "gpt-oss", "gpt2")),
    ("context=2", ("adapters", *DENSE, *EVERY, "gpt-oss", "gpt2")),
    ("expert=2", (*EVERY, "gpt-oss")),
    ("pipeline=2", ("tied", "adapters", *DENSE, *EVERY, "gpt-oss", "gpt2")),
]
BOTH = [
    "data=2,shard=2",
    "shard=2,tensor=2",
    "shard=2,expert=2",
    "context=2,tensor=2",
    "expert=2,tensor=2",
    "pipeline=2,shard=2",
    "pipeline=2,tensor=2",
]
SCHEDULES = [
    f"pipeline=2,schedule={name}/{case}" for name in ("interleaved", "zero_bubble") for case in ("deep", "deep_dense")
]


@pytest.mark.parametrize(
    ("size", "jobs"),
    [
        pytest.param(2, [f"{axes}/one_sequence/measure" for axes, _ in AXES], id="quick"),
        *(
            pytest.param(2, [f"{axes}/{case}/measure" for case in cases], marks=pytest.mark.slow, id=axes)
            for axes, cases in AXES
        ),
        *(
            pytest.param(4, [f"{axes}/{c}/measure" for c in cases], marks=pytest.mark.slow, id=axes)
            for axes in BOTH
            for cases in [EVERY if "expert" in axes else (*EVERY, "untied")]
        ),
        pytest.param(2, [f"{job}/measure" for job in SCHEDULES], marks=pytest.mark.slow, id="schedules"),
        pytest.param(
            2, [f"{a}/{c}/twenty" for a, _ in AXES for c in EVERY], marks=pytest.mark.slow, id="twenty steps of two"
        ),
        pytest.param(
            4, [f"{a}/{c}/twenty" for a in BOTH for c in EVERY], marks=pytest.mark.slow, id="twenty steps of four"
        ),
    ],
)
def test_ranks_that_share_a_model_compute_in_float64_what_one_process_computes(tmp_path, size, jobs):
    for found in on_ranks(tmp_path, size, "float64", *jobs):
        assert found.keys() == set(jobs)
        assert not {(job, what): by for job in found for what, by in found[job].items() if not by <= 1e-12}


@pytest.mark.slow
def test_losses_in_single_precision_are_those_of_one_process_over_twenty_steps(tmp_path):
    jobs = [f"{axes}/{case}/twenty" for axes, _ in AXES for case in EVERY]
    for found in on_ranks(tmp_path, 2, "float32", *jobs):
        assert max(found[job]["losses"] for job in jobs) < 1e-5


# ---- runs


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """A short run on random words."""
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefgh", k=draws.randint(2, 5))) for _ in range(40)]
    path = folder / "text.txt"
    if not path.exists():
        path.write_text(" ".join(draws.choices(words, k=2000)))
        pairs = [
            {"prompt": " ".join(draws.choices(words, k=2)), "chosen": a, "rejected": f"{a[::-1]} h"} for a in words
        ]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
        asked = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
        (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, asked)))
    spec = {
        "kind": "pretrain",
        "name": "small",
        "model": {"shape": {**SHAPE, "mlp": None, "moe": EXPERTS}, "tokenizer": "characters"},
        "data": {"train": {"words": {"path": str(path)}}, "holdout": 0.1, "context": 32},
        "train": {"steps": 8, "batch": 5, "micro_tokens": 96, "precision": "fp32"},
        "every": {"log": "1 steps", "eval": "3 steps", "checkpoint": "5 steps"},
        "eval": {"examples": 9},
        "device": "cpu",
        "threads": 1,
    }
    return spec | changes


def chat(folder: Path, kind: str, init: Path | None = None, **changes: Any) -> dict[str, Any]:
    """The same on conversations or pairs."""
    spec = small(folder, kind=kind, name=changes.pop("name", kind))
    model = {"tokenizer": "characters", "shape": SHAPE} if init is None else {"init": str(init)}
    file = "chat.jsonl" if kind == "sft" else "pairs.jsonl"
    data = {"train": {"words": {"path": str(folder / file)}}, "holdout": 0.2, "context": 48}
    return spec | {"model": model, "data": data} | changes


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The session's folders of runs by one process and by two ranks."""
    folder = tmp_path_factory.mktemp("both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(folder / "cache"))
        return _trained_by_both(folder)


def _trained_by_both(folder: Path) -> dict[str, list[Path]]:
    base = palestra.run(chat(folder, "sft", name="base"), root=folder / "base", quiet=True)
    model = base.checkpoint("last") / "model"
    samples = {"prompts": ["abc"], "max_new_tokens": 4, "every": "4 steps"}
    specs = [
        small(folder, name="experts", samples=samples, train={**small(folder)["train"], "ema": 0.8}),
        chat(folder, "sft", model, name="adapters", samples=samples, model={"init": str(model), "lora": {"rank": 2}}),
        chat(folder, "dpo", model),
        chat(folder, "reward_model", model),
    ]
    for spec in specs:
        palestra.run(spec, root=folder / "one", quiet=True)
    run_on_ranks(folder, [{"spec": spec, "root": "two"} for spec in specs])
    return {
        spec["name"]: [next(folder.glob(f"{root}/{spec['name']}/*/sessions/0")) for root in ("one", "two")]
        for spec in specs
    }


def run_on_ranks(folder: Path, calls: list[dict[str, Any]]) -> None:
    """Call `palestra.run` on two ranks with each of these arguments."""
    (folder / "calls.json").write_text(json.dumps(calls))
    result = torchrun(str(HERE / "ranks_runs.py"), "calls.json", cwd=folder)
    assert result.returncode == 0, result.stderr


def assert_same_numbers(one: Path, two: Path) -> None:
    rows, others = numbers(one), numbers(two)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert other == pytest.approx(row, rel=1e-5, abs=1e-5)


def files(session: Path) -> list[str]:
    """All files of a session's trial, and its checkpoints.

    But for the pictures, which processes of tests do not draw, and the traces that other ranks write beside the first.
    """
    trial = session.parent.parent
    found = (path.relative_to(trial) for path in trial.rglob("*") if path.is_file())
    counted = (path for path in found if path.parts[0] != "plots" and not path.match("trace.trainer-*.json"))
    return sorted({"/".join(path.parts[:4]) for path in counted})


def weights(model: Path) -> dict[str, Tensor]:
    """All that a model's folder has."""
    return {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "adapters", "dpo", "reward_model"])
def test_run_of_two_ranks_has_the_files_and_numbers_of_one_process(both, name):
    one, two = both[name]
    assert_same_numbers(one, two)
    assert files(one) == files(two)
    models = sorted(one.glob("checkpoints/*/model"))
    assert models
    for path in models:
        mine, other = weights(path), weights(two / path.relative_to(one))
        assert mine.keys() == other.keys()
        for key, tensor in mine.items():
            assert (tensor - other[key]).abs().max() < 1e-5, key
    if (one / "samples.jsonl").exists():
        assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()


@pytest.fixture
def cached(scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    """A scratch folder with a cache of its own, in which this process is too."""
    monkeypatch.chdir(scratch.path)
    monkeypatch.setenv("PALESTRA_CACHE", str(scratch.path / "cache"))
    monkeypatch.setitem(ENVIRONMENT, "PALESTRA_CACHE", str(scratch.path / "cache"))
    return scratch


def assert_stopped(session: Path) -> None:
    assert state_of(session) == "interrupted"
    assert 6 <= last_step(session) < 12
    assert (session / "checkpoints" / f"step_{last_step(session):09}").exists()


@pytest.mark.slow
def test_stopped_run_goes_on_with_fewer_and_with_more_ranks(cached):
    train = {**small(cached.path)["train"], "steps": 12, "ema": 0.9}
    spec = small(cached.path, train=train, hooks=["stopping_run:hook"])
    reference = palestra.run(spec | {"name": "reference"}, quiet=True).path / "sessions" / "0"

    Path("stop").touch()
    result = torchrun("-m", "palestra", "train", cached.spec("fewer", base=spec), "--quiet", cwd=cached.path)
    assert result.returncode != 0
    assert "stopped at step" in result.stderr
    assert_stopped(cached.session("fewer"))
    palestra.run(resume="fewer", quiet=True)
    assert_same_numbers(reference, cached.session("fewer"))

    Path("stop").touch()
    with pytest.raises(Interrupted):
        palestra.run(spec | {"name": "more"}, quiet=True)
    assert_stopped(cached.session("more"))
    # The second time there is nothing left to train, and nobody waits for it.
    run_on_ranks(cached.path, [{"resume": "more"}, {"resume": "more"}])
    assert_same_numbers(reference, cached.session("more"))


@pytest.mark.slow
def test_failing_rank_ends_all_of_them_with_its_traceback(cached):
    spec = cached.spec("failing", base=small(cached.path, hooks=["failing_rank:hook"]))
    result = torchrun("-m", "palestra", "train", spec, "--quiet", cwd=cached.path)
    assert result.returncode != 0
    assert "in _fail" in result.stderr
    assert "the second rank has had enough" in result.stderr
    session = cached.session("failing")
    assert state_of(session) == "failed"
    assert "the second rank has had enough" in (session / "log.txt").read_text()


# ---- devices: 2


@pytest.mark.slow
def test_devices_start_ranks_by_themselves_stop_them_and_give_the_numbers_of_one(cached):
    spec = small(cached.path, hooks=["stopping_run:hook"])
    one = palestra.run(spec, devices=1, quiet=True).path / "sessions" / "0"
    Path("stop").touch()
    with pytest.raises(Interrupted, match="stopped at step"):
        palestra.run(spec | {"name": "two"}, devices=2, quiet=True)
    two = cached.session("two")
    assert_stopped(two)
    palestra.run(resume="two", quiet=True)
    assert_same_numbers(one, two)
    assert files(one) == files(two)


@pytest.mark.slow
def test_devices_with_a_failing_rank_raise_its_error(cached):
    with pytest.raises(TaskFailed, match=r"in _fail(.|\n)*the second rank has had enough"):
        palestra.run(small(cached.path, hooks=["failing_rank:hook"]), devices=2, quiet=True)
    session = cached.session("small")
    assert state_of(session) in ("failed", "killed")  # by what ended the first rank: the second's end, or its patience
    assert "the second rank has had enough" in (session / "log.txt").read_text()


def test_devices_for_several_seeds_are_refused(tmp_path):
    with pytest.raises(PalestraError, match="devices"):
        palestra.check(small(tmp_path, devices=2, max_session=2))


def test_devices_other_than_the_started_ranks_are_refused(tmp_path):
    import torch

    from palestra.kinds.ranks import check_ranks
    from palestra.lm.ranks import Ranks

    spec = palestra.check(small(tmp_path, devices=3)).spec
    with pytest.raises(UsageError, match="torchrun has started 2"):
        check_ranks(spec, Ranks(0, 2), torch.device("cpu"))
