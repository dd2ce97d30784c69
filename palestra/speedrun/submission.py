"""A submission: trains a spec and writes speedrun.json, the spec with all that was measured, into the run's folder."""

import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.api import run
from palestra.errors import PalestraError, UsageError
from palestra.runs.run import Run, open_run
from palestra.runs.status import read_status
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.pretrain import PretrainSpec
from palestra.spec.load import Source, resolved
from palestra.spec.plain import plain
from palestra.spec.precision import precision
from palestra.speedrun.cost import cost, pretraining, shape_of

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
    from palestra.kinds.start import device_of  # torch, which the commands must do without until here
    from palestra.speedrun.device import gpu_name, peak_of

    folder = done.trial.session(seed).path
    manifest = read_json(folder / "manifest.json")
    spec = resolved(manifest["spec"])
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
