"""A spec run in a process of its own: seconds of its steps and the most memory it took, by a hook that it calls."""

import json
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from palestra.errors import PalestraError
from palestra.spec.shape import Shape
from palestra.spec.source import write_text

WARM_UP = 2
"""Steps that do not count: kernels are chosen and caches filled in them."""

PROMPT = 8
"""Tokens of a prompt such as 123+456=."""


class Measured(NamedTuple):
    """Of a run."""

    step: float  # seconds of a step, by the clock: mean
    peak: float
    """Bytes of the trainer's first process at most, up to its last step: of the GPU's memory, or else resident."""
    spans: dict[str, float]  # seconds of each span in a step, median
    length: float  # tokens of a completion, mean


def odd(prompt: str, completion: str, **row: Any) -> float:
    """A reward that differs within every group: what has no advantage is not trained on."""
    return sum(ord(character) % 2 for character in completion) / max(1, len(completion))


def watch(context: Any) -> dict[str, float]:
    """The hook of a run to measure: what the clock and the memory say at the end of each step."""
    import torch

    if cuda := torch.cuda.is_available():
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if cuda else _resident_peak()
    return {"measured/at": time.perf_counter(), "measured/peak": float(peak)}


def _resident_peak() -> int:
    """Bytes; on Linux not by `getrusage`, which counts what the process had been before it became this program."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def measured(spec: dict[str, Any], folder: Path) -> Measured:
    """Train a spec that writes a row each step; what fails after the last one, such as a plot, does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(write_text({**spec, "hooks": [f"{watch.__module__}:watch"]}))
    run = f"from palestra.api import run; run({str(folder / 'spec.yaml')!r}, root={str(folder / 'runs')!r}, quiet=True)"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, errors="replace", check=False)
    found = [line for file in (folder / "runs").glob("*/*/sessions/*/metrics.jsonl") for line in file.open()]
    rows = [row for line in found if "measured/at" in (row := json.loads(line))]
    if len(rows) < spec["train"]["steps"]:
        last = " ".join(done.stderr.strip().splitlines()[-3:])
        raise PalestraError(f"a run to measure ended with {done.returncode} after {len(rows)} steps: {last}")
    counted = rows[WARM_UP + 1 :]
    seconds = [b["measured/at"] - a["measured/at"] for a, b in pairwise(rows[WARM_UP:])]
    turns = 1 + spec.get("rollout", {}).get("staleness", 0)  # of which only one may have to wait for completions
    step = statistics.fmean(seconds[len(seconds) % turns :])
    spans = {
        key[5:]: statistics.median(row.get(key, 0.0) for row in counted) for key in counted[0] if key[:5] == "time/"
    }
    length = statistics.fmean(row.get("length", 0.0) for row in counted)
    return Measured(step, rows[-1]["measured/peak"], spans, length)


def small(
    folder: Path, shape: dict[str, Any], kind: str = "posttrain", characters: int = 92, **changes: Any
) -> tuple[dict[str, Any], dict[str, float | None]]:
    """A spec with a new model of so many characters, whose files are written; and how long its texts are."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(map(chr, [10, *range(32, 123), *range(0x4E00, 0x4E00 + characters - 92)]))
    shape, context = {"context": 512, **shape}, changes.pop("context", 64)
    every = {"log": "1 steps", "checkpoint": "1 hours", "eval": None}
    spec: dict[str, Any] = {"kind": kind, "name": "measured", "every": every, "threads": 1, **changes}
    spec["train"] = {"steps": 12, **spec.get("train", {})}
    if kind != "posttrain":
        file = folder / "text.txt"
        file.write_text(text * max(8, 40_000 // characters))
        spec["data"] = {"train": {"texts": {"path": str(file)}}, "context": context}
        return spec | {"model": {"shape": shape | {"vocab": characters + 3}, "tokenizer": "characters"}}, {}
    sampled: dict[str, Any] = {"group": 8, "record": False, "max_prompt_tokens": PROMPT, "max_new_tokens": 24}
    task = {"task": "arithmetic", "args": {"digits": 3, "stop": []}, "reward": {"function": f"{__name__}:odd"}}
    spec = {"algorithm": {"preset": "dr_grpo"}, "optim": {"name": "adamw", "lr": 1e-5}} | spec
    spec |= {"tasks": {"train": [task]}, "model": {"init": str(folder / "model")}}
    spec["rollout"] = sampled | spec.get("rollout", {})
    _write_model(folder / "model", text, shape)
    stays = 1 - 2 / (characters + 3)  # tokens of a model that knows nothing are equally likely, and two of them end
    lasts = [stays**k for k in range(int(spec["rollout"]["max_new_tokens"]))]
    mean, square = sum(lasts), sum((2 * k + 1) * each for k, each in enumerate(lasts))
    return spec, {"prompt": PROMPT, "new": mean, "spread": (square / mean**2 - 1) ** 0.5, "verify": 0.0}


def _write_model(folder: Path, text: str, shape: dict[str, Any]) -> None:
    import torch

    from palestra.data.tokenizers import character_tokenizer
    from palestra.lm.hf import save_pretrained
    from palestra.lm.model import Transformer

    tokenizer = character_tokenizer(text)
    tokenizer.save(folder.with_name("tokenizer"))
    model = Transformer(Shape(vocab=tokenizer.vocab_size, **shape))
    model.initialize(torch.Generator().manual_seed(0))
    save_pretrained(folder, model, tokenizer=tokenizer, eos=())
