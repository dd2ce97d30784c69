"""A speedrun submission: predicted cost, the run, and speedrun.json with all that was measured."""

import socket
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.api import run
from palestra.errors import MissingExtra, PalestraError, UsageError
from palestra.runs.manifest import git_output
from palestra.runs.run import Run, open_run
from palestra.runs.session import read_status
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.lm import PretrainSpec
from palestra.spec.load import Overrides, Source, resolved
from palestra.spec.load import load as load_spec
from palestra.spec.model import plain
from palestra.spec.renames import translated
from palestra.spec.shape import precision

if TYPE_CHECKING:
    import torch

NAME = "speedrun.json"
SCORE = "eval/bits_per_byte"
MFU = (0.5, 0.2)
"""Model FLOPs utilization of well and badly tuned training: the range of an estimate."""
H100_FLOPS = 989.5e12  # dense bf16, also of an H200


def pretraining(spec: Source, variables: Mapping[str, Any] | None, overrides: Overrides) -> PretrainSpec:
    """The spec of a speedrun: kind `pretrain`, which measures bits per byte."""
    loaded = load_spec(spec, variables=variables, overrides=overrides).spec
    if not isinstance(loaded, PretrainSpec):
        raise UsageError(f"{loaded.name}: a speedrun must be of kind 'pretrain', which measures bits per byte")
    if not loaded.data.eval and loaded.data.holdout == 0:
        raise UsageError(f"{loaded.name}: no text to measure bits per byte on; set data.eval or data.holdout")
    return loaded


def cost(spec: PretrainSpec, root: Path) -> dict[str, Any]:
    """Parameters, tokens and model FLOPs of a spec; a vocabulary that it leaves out comes from the tokenizer."""
    shape = spec.model.shape
    if shape is None or shape.vocab is None:
        try:
            from palestra.kinds.models import start_of
        except ModuleNotFoundError as error:
            raise MissingExtra("the vocabulary size of a tokenizer", "train") from error
        shape = start_of(spec, root).shape
    tokens, forward = spec.train.steps * spec.train.batch * spec.data.context, shape.flops_per_token(spec.data.context)
    return {
        "model_size": shape.parameters(),
        "active_parameters": shape.parameters(active=True),
        "total_tokens": tokens,
        "model_flops_per_token": forward,
        "model_flops": 3 * forward * tokens,  # the backward pass costs twice the forward pass
    }


def about(spec: Source, *, variables: Mapping[str, Any] | None = None, overrides: Overrides = ()) -> dict[str, str]:
    """What `palestra speedrun info` prints."""
    loaded = pretraining(spec, variables, overrides)
    known = cost(loaded, Path("runs"))
    low, high = (known["model_flops"] / mfu for mfu in MFU)
    return {
        "parameters": f"{known['model_size']:,}",
        "active parameters": f"{known['active_parameters']:,}",
        "steps": f"{loaded.train.steps:,}",
        "tokens": f"{known['total_tokens']:,}",
        "tokens per parameter": f"{known['total_tokens'] / known['active_parameters']:.1f} (active)",
        "forward FLOPs per token": f"{known['model_flops_per_token']:.4e}",
        "model FLOPs": f"{known['model_flops']:.5e}",
        "hardware FLOPs, estimated": f"{low:.2e} to {high:.2e} (MFU {MFU[0]:.0%} to {MFU[1]:.0%})",
        "hours on one H100 or H200": f"{low / H100_FLOPS / 3600:.3g} to {high / H100_FLOPS / 3600:.3g}",
    }


def submit(
    spec: Source | None,
    *,
    author: str | None = None,
    affiliation: str = "",
    url: str = "",
    description: str = "",
    peak: float | None = None,
    resume: str | Path | None = None,
    variables: Mapping[str, Any] | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    overrides: Overrides = (),
) -> Path:
    """Train a spec, or continue a run, to its end and write its speedrun.json; returns the path.

    Args:
        spec: A file ("spec.yaml" or "spec.yaml:name"), a dict or a spec; left out when resuming.
        author: The author's name; by default git's `user.name`.
        affiliation: The author's affiliation.
        url: The author's home page.
        description: What is new about it.
        peak: Peak FLOPs per second of one device; by default from the data sheet of a known GPU, measured on any other
            device.
        resume: A run to continue; for one that is done only the submission is written.
        variables: Values of the `${…}` in the spec.
        root: The folder that holds all runs.
        quiet: Do not show progress.
        overrides: Fields of the spec, as on the command line.
    """
    name = author or (git_output(Path.cwd(), "config", "user.name") or "").strip()
    if not name:
        raise UsageError("a submission needs an author: give --author NAME, or set git's user.name")
    if (spec is None) == (resume is None) or (resume is not None and list(overrides)):
        raise UsageError("give either a spec to run or a run to continue (--resume), and not both")
    if spec is not None:
        done = run(pretraining(spec, variables, overrides), root=root, quiet=quiet)
    else:
        assert resume is not None
        before = open_run(resume, root)
        pretraining(resolved(before.spec), None, ())
        done = before if before.state == "done" else run(resume=before, root=root, quiet=quiet)
    about = {"author": {"name": name, "affiliation": affiliation, "url": url}, "description": description}
    path = done.trial.path / NAME
    with clear_write_errors(path.parent):
        write_json(path, {"runs": [{"run_info": about | _measured(done, seed, peak)} for seed in done.seeds]})
    return path


def _measured(done: Run, seed: int, peak: float | None) -> dict[str, Any]:
    """The measurements of one seed. The keys are those of Marin's speedruns where they mean the same."""
    import torch

    from palestra.kinds.trial import device_of

    folder = done.session(seed)
    manifest = read_json(folder / "manifest.json")
    spec = resolved(translated(manifest["spec"]))
    assert isinstance(spec, PretrainSpec)
    rows = done.metrics(seed)
    score = next((row[SCORE] for row in reversed(rows) if SCORE in row), None)
    if score is None:
        raise PalestraError(f"{folder} has no {SCORE}: its evaluation texts have no bytes to count")
    if manifest["host"] != socket.gethostname():
        raise UsageError(f"{folder} was trained on {manifest['host']}: submit it there, where its device can be seen")
    device = device_of(spec)
    chosen = precision(spec.train.precision, device.type)
    flops, source = (peak, "given") if peak is not None else peak_of(device, chosen)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else manifest["cpu"]
    devices = spec.processes
    training, wall = seconds(rows)
    git = manifest["git"] or {}
    status = read_status(folder) or {}
    return {
        "run": f"{done.name}/{done.id}",
        "seed": seed,
        "spec": plain(spec),
        "model_config": plain(spec.model),
        "train_config": {"train": plain(spec.train), "optim": plain(spec.optim)},
        "tokenized_dataset": plain(spec.data),
        "resources": {"device": name, "devices": devices, "cpu": manifest["cpu"]},
        **cost(spec, done.trial.path.parent.parent),
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
    """Seconds of training steps, and the same with evaluations, samples and checkpoints, over all starts of a session.

    The device is synchronized at every row but the first after a start, so between rows the token rate gives the time;
    up to that first row it is what the steps took on the host, compilation included.
    """
    training = others = 0.0
    before = 0
    for row in rows:
        rate = row.get("time/tokens_per_s")
        training += row.get("time/train", 0.0) if rate is None else (row["tokens"] - before) / rate
        others += sum(row.get(f"time/{span}", 0.0) for span in ("eval", "sample", "checkpoint"))
        before = row["tokens"]
    return training, training + others


SIZE = 1024
SECONDS = 0.5


def peak_of(device: "torch.device", precision: str) -> tuple[float, str]:
    """Peak FLOPs per second of one device, and the source of that number."""
    import torch

    from palestra.kinds.models import named_dtype
    from palestra.lm.trainer import peak_flops

    known = peak_flops(device)
    if known is not None:
        return known, "data sheet, dense bf16"
    size = SIZE if device.type == "cpu" else 8 * SIZE
    a = torch.ones(size, size, dtype=named_dtype(precision), device=device)
    best, since = 0.0, time.perf_counter()
    # The fastest of the products that fit into half a second: other load on the machine only slows some down.
    while best == 0 or time.perf_counter() - since < SECONDS:
        start = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best, f"measured, {precision} matrix products of {SIZE} rows and columns"
