"""A trained reward model as a reward, and how models are found by run, checkpoint, folder, URL or Hub name."""

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from palestra.errors import UsageError
from palestra.runs.run import open_run
from palestra.tasks.task import Completion, Message, Problem, Status, Verdict

if TYPE_CHECKING:
    from palestra.generate.local import LocalGenerator
    from palestra.lm.scorer import Scorer


OpenGenerator = Callable[[str, Path], "LocalGenerator"]
"""Opens a language model by its name and the folder of runs; its engine has a tokenizer."""

ROWS = 16  # completions judged at the same time: the trainer needs most of the memory


def model_folder(ref: str, root: Path) -> Path:
    """The folder of a model without adapters."""
    folder = _folder(ref, root)
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} has adapters without their base model: give a model with merged weights")
    return folder


def open_generator(ref: str, root: Path) -> "LocalGenerator":
    """A generator for a model, in a thread of its own: on the GPU where there is one, else on the CPU."""
    import torch

    from palestra.generate.engine.engine import Engine
    from palestra.generate.local import LocalGenerator

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    engine = Engine.from_folder(model_folder(ref, root), dtype=dtype, device=device, max_running=ROWS)
    return LocalGenerator(engine)


def _folder(ref: str, root: Path) -> Path:
    path = Path(ref).expanduser()
    if (path / "config.json").exists() or (path / "adapter_config.json").exists():
        return path
    if (path / "meta.json").exists():
        return _model_of(path)
    if "://" not in ref:
        try:
            return _model_of(open_run(ref, root).checkpoint("best"))
        except UsageError:
            if path.exists() or path.parts[0] == root.name:  # something of this machine was meant, not of the Hub
                raise
    from palestra.data.sources import resolve

    return resolve(ref, kind="model", root=root)


def _model_of(checkpoint: Path) -> Path:
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} has no language model")
    return checkpoint / "model"


AT_ONCE = 256
"""Largest batch of completions, so that later ones wait for no more than these."""

Waiting = tuple[list[Message], "Future[Verdict]"]


class RewardModel:
    """Scores completions with a reward model in a thread of its own, batched as they arrive. Above 0 is correct.

    Batching changes no score: `Scorer` is batch-invariant.
    """

    isolated = False

    def __init__(self, scorer: "Scorer"):
        self.scorer = scorer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._waiting: deque[Waiting] = deque()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, ref: str, root: Path) -> "RewardModel":
        """The reward model of a run, a checkpoint or a folder."""
        from palestra.lm.scorer import Scorer

        return cls(Scorer.load(model_folder(ref, root)))

    async def verify(self, problem: Problem, completion: Completion) -> Verdict:
        messages = [*problem.messages, {"role": "assistant", "content": completion.text}]
        verdict: Future[Verdict] = Future()
        with self._lock:
            self._waiting.append((messages, verdict))
        self._thread.submit(self._work)  # an earlier batch may include it; then there is nothing left to do
        return await asyncio.wrap_future(verdict)

    def close(self) -> None:
        """End the thread; pending verdicts are cancelled."""
        self._thread.shutdown(cancel_futures=True)
        for _, verdict in self._waiting:
            verdict.cancel()
        self._waiting.clear()

    def _work(self) -> None:
        """In the thread: score what waits."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        batch: list[tuple[list[int], Future[Verdict]]] = []
        for messages, verdict in taken:
            if not verdict.set_running_or_notify_cancel():
                continue
            try:
                tokens = self.scorer.encode(messages)
            except Exception as error:  # of this conversation alone: it rises where its verdict is awaited
                verdict.set_exception(error)
                continue
            if len(tokens) <= self.scorer.context:
                batch.append((tokens, verdict))
                continue
            # Neither the spec's fault nor a sign of a bad completion.
            note = f"it has {len(tokens)} tokens, and the reward model reads at most {self.scorer.context}"
            verdict.set_result(Verdict(0.0, Status.ERROR, note=note))
        try:
            scores = self.scorer.token_scores([tokens for tokens, _ in batch])
        except Exception as error:  # it rises where the verdicts are awaited
            for _, verdict in batch:
                verdict.set_exception(error)
            return
        for score, (_, verdict) in zip(scores, batch, strict=True):
            verdict.set_result(_verdict(score))


def _verdict(score: float) -> Verdict:
    if not math.isfinite(score):
        return Verdict(0.0, Status.ERROR, note=f"the reward model gave {score}")
    return Verdict(score, Status.CORRECT if score > 0 else Status.WRONG, {"reward_model": score})
