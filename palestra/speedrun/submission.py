"""A submission: its predicted cost, the device's peak, the run, and speedrun.json with all that was measured."""

import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from palestra.api import run
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.kinds.models import named_dtype
from palestra.lm.trainer import peak_flops
from palestra.runs.run import Run, open_run
from palestra.runs.session import read_status
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.lm import PretrainSpec
from palestra.spec.load import Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.spec.renames import translated
from palestra.spec.shape import Shape, precision

MFU = (0.5, 0.2)
"""The shares of a device's peak that well and badly tuned training reaches: between them an estimate lies."""


@dataclass(frozen=True)
class Cost:
    """What follows from a spec whose vocabulary is known."""

    parameters: int
    active: int
    tokens: int
    flops_per_token: float
    """Forward floating-point operations a token; training is three times as much."""

    @property
    def flops(self) -> float:
        """Floating-point operations of the whole training."""
        return 3 * self.flops_per_token * self.tokens


def cost(spec: PretrainSpec, shape: Shape) -> Cost:
    """The cost of a spec whose model has that shape, its vocabulary included."""
    return Cost(
        parameters=shape.parameters(),
        active=shape.parameters(active=True),
        tokens=spec.train.steps * spec.train.batch * spec.data.context,
        flops_per_token=shape.flops_per_token(spec.data.context),
    )


def pretraining(
    spec: Source, variables: Mapping[str, Any] | None, overrides: Iterable[str] | Mapping[str, Any]
) -> PretrainSpec:
    """The spec of a speedrun: kind `pretrain`, which measures bits per byte."""
    loaded = load_spec(spec, variables=variables, overrides=overrides).spec
    if not isinstance(loaded, PretrainSpec):
        raise UsageError(f"{loaded.name}: a speedrun is of kind 'pretrain', which measures bits per byte")
    if not loaded.data.eval and loaded.data.holdout == 0:
        raise UsageError(f"{loaded.name}: bits per byte of what? Set data.eval or data.holdout")
    return loaded


def shape_of(spec: PretrainSpec, root: Path = Path("runs")) -> Shape:
    """The shape of a spec's model; a vocabulary that is not given comes from the tokenizer, made where it must be."""
    shape = spec.model.shape
    if shape is not None and shape.vocab is not None:
        return shape
    try:
        from palestra.kinds.models import start_of
    except ModuleNotFoundError as error:
        raise MissingExtra("counting a model whose vocabulary the tokenizer says", "train") from error
    return start_of(spec, root).shape


def about(
    spec: Source, *, variables: Mapping[str, Any] | None = None, overrides: Iterable[str] | Mapping[str, Any] = ()
) -> dict[str, str]:
    """What `palestra speedrun info` prints."""
    loaded = pretraining(spec, variables, overrides)
    found = cost(loaded, shape_of(loaded))
    low, high = (found.flops / mfu for mfu in MFU)
    at_peak = 989.5e12  # of an H100 or H200, for a feeling of hours
    return {
        "parameters": f"{found.parameters:,}",
        "active parameters": f"{found.active:,}",
        "steps": f"{loaded.train.steps:,}",
        "tokens": f"{found.tokens:,}",
        "tokens per parameter": f"{found.tokens / found.active:.1f} (active)",
        "FLOPs a token, forward": f"{found.flops_per_token:.4e}",
        "model FLOPs": f"{found.flops:.5e}",
        "hardware FLOPs, estimated": f"{low:.2e} to {high:.2e} ({MFU[0]:.0%} to {MFU[1]:.0%} of the peak used)",
        "hours on one H100 or H200": f"{low / at_peak / 3600:.3g} to {high / at_peak / 3600:.3g}",
    }


NAME = "speedrun.json"
SCORE = "eval/bits_per_byte"


@dataclass(frozen=True)
class Author:
    """Who submits."""

    name: str
    affiliation: str = ""
    url: str = ""

    @classmethod
    def found(cls, name: str | None, affiliation: str, url: str) -> "Author":
        """The author as given; without a name, the one that git knows."""
        known = name or _git_name()
        if not known:
            raise UsageError("a submission needs an author: give --author NAME, or set git's user.name")
        return cls(known, affiliation, url)


def submit(
    spec: Source | None,
    *,
    author: Author,
    description: str = "",
    peak: float | None = None,
    resume: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    overrides: Iterable[str] | Mapping[str, Any] = (),
) -> Path:
    """Train a spec, or go on with a run, to its end and write its speedrun.json; where that is.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; left out when resuming.
        author: Who submits.
        description: What is new about it.
        peak: Floating-point operations a second of one device; null takes the data sheet of a known GPU, and measures
            any other device.
        resume: A run to go on with; one that is done is only written up.
        variables: Values of the `${…}` in the spec.
        root: The folder of all runs.
        quiet: Show no progress.
        overrides: Fields of the spec, as on the command line.
    """
    if (spec is None) == (resume is None):
        raise UsageError("give a spec to run, or a run to go on with (--resume), and not both")
    if spec is not None:
        meant = pretraining(spec, variables, overrides)
        done = run(meant, root=root, quiet=quiet)
    else:
        assert resume is not None
        before = open_run(resume, root)
        pretraining(resolved(before.spec), None, ())
        done = before if before.state == "done" else run(resume=before, root=root, quiet=quiet)
    path = done.trial.path / NAME
    written = {"runs": [{"run_info": _info(done, seed, author, description, peak)} for seed in done.seeds]}
    with clear_write_errors(path.parent):
        write_json(path, written)
    return path


def _info(done: Run, seed: int, author: Author, description: str, peak: float | None) -> dict[str, Any]:
    """What was measured of one seed. The keys are those of Marin's speedruns where they mean the same."""
    from palestra.kinds.trial import device_of  # torch, which the commands must do without until here

    folder = done.session(seed)
    manifest = read_json(folder / "manifest.json")
    spec = resolved(translated(manifest["spec"]))
    assert isinstance(spec, PretrainSpec)
    rows = done.metrics(seed)
    score = next((row[SCORE] for row in reversed(rows) if SCORE in row), None)
    if score is None:
        raise PalestraError(f"{folder} has no {SCORE}: its evaluation texts have no bytes to count")
    if manifest["host"] != socket.gethostname():
        raise UsageError(f"{folder} was trained on {manifest['host']}: write it up there, where its device can be seen")
    device = device_of(spec)
    chosen = precision(spec.train.precision, device.type)
    flops, source = (peak, "given") if peak is not None else peak_of(device, chosen)
    devices = spec.devices or 1
    trained = cost(spec, shape_of(spec, done.trial.path.parent.parent))
    training, wall = seconds(rows)
    git = manifest["git"] or {}
    status = read_status(folder) or {}
    return {
        "author": asdict(author),
        "description": description,
        "run": f"{done.name}/{done.id}",
        "seed": seed,
        "spec": plain(spec),
        "model_config": plain(spec.model),
        "train_config": {"train": plain(spec.train), "optim": plain(spec.optim)},
        "tokenized_dataset": plain(spec.data),
        "resources": {"device": gpu_name(device) or manifest["cpu"], "devices": devices, "cpu": manifest["cpu"]},
        "model_size": trained.parameters,
        "active_parameters": trained.active,
        "total_tokens": trained.tokens,
        "model_flops_per_token": trained.flops_per_token,
        "model_flops": trained.flops,
        "num_devices": devices,
        "num_chips": devices,
        "device_flops": flops,
        "device_flops_source": source,
        "training_time": training,
        "wall_time": wall,
        "training_hardware_flops": training * devices * flops,
        SCORE: score,
        "eval/loss": next(row["eval/loss"] for row in reversed(rows) if "eval/loss" in row),
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "run_completion_timestamp": datetime.fromtimestamp(status["heartbeat"], UTC).isoformat(timespec="seconds"),
    }


def seconds(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of training steps, and with evaluations, samples and checkpoints, over all starts of a session.

    The device is waited for at every row but the first after a start, so between rows the tokens and their rate say
    how long it took; up to that first row it is what the steps took here, compilation included.
    """
    training = others = 0.0
    before = 0
    for row in rows:
        rate = row.get("time/tokens_per_s")
        training += row.get("time/train", 0.0) if rate is None else (row["tokens"] - before) / rate
        others += sum(row.get(f"time/{span}", 0.0) for span in ("eval", "sample", "checkpoint"))
        before = row["tokens"]
    return training, training + others


def _git_name() -> str:
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return ""
    return done.stdout.strip()


SIZE = 1024
SECONDS = 0.5


def gpu_name(device: torch.device) -> str | None:
    """The name of the GPU, where it is one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def peak_of(device: torch.device, precision: str) -> tuple[float, str]:
    """Floating-point operations a second of one device, and how that is known."""
    known = peak_flops(device)
    if known is not None:
        return known, "data sheet, dense bf16"
    return measured_peak(device, precision), f"measured, {precision} matrix products of {SIZE} rows and columns"


def measured_peak(device: torch.device, precision: str) -> float:
    """The fastest of the products that fit into half a second: others at work on the machine only slow some down."""
    size = SIZE if device.type == "cpu" else 8 * SIZE
    a = torch.ones(size, size, dtype=named_dtype(precision), device=device)
    best, since = 0.0, time.perf_counter()
    while best == 0 or time.perf_counter() - since < SECONDS:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
