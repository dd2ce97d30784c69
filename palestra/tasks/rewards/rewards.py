"""Rewards in place of a task's verifier: functions of the user, reward models, and language models as judges."""

import asyncio
import inspect
import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from palestra.data.sources import model_folder
from palestra.errors import UsageError
from palestra.spec.imports import load_named
from palestra.spec.tasks import RewardSpec
from palestra.tasks.task import Completion, Message, Problem, Status, Verdict

if TYPE_CHECKING:
    from palestra.generate.local import LocalGenerator
    from palestra.lm.scorer import Scorer

F = TypeVar("F", bound=Callable[..., Any])
ISOLATED = "palestra_isolated"  # the mark that `reward` leaves on a function


class Reward(Protocol):
    """Verifies completions in place of a task."""

    isolated: bool
    """Whether it is constructed again in a worker process, which is killed where it hangs."""

    def verify(self, problem: Problem, completion: Completion) -> Verdict | Awaitable[Verdict]: ...

    def close(self) -> None: ...


OpenGenerator = Callable[[str, Path], "LocalGenerator"]
"""Opens a language model by its name and the folder of runs; its engine has a tokenizer."""

ROWS = 16  # completions judged at the same time: the trainer needs most of the memory


def whole_model(ref: str, root: Path) -> Path:
    """The folder of a model without adapters."""
    folder = model_folder(ref, root)
    if (folder / "adapter_config.json").exists():
        raise UsageError(f"{folder} has adapters without their base model: give a model with merged weights")
    return folder


def open_generator(ref: str, root: Path) -> "LocalGenerator":
    """A generator for a model, in a thread of its own: on the GPU where there is one, else on the CPU."""
    import torch

    from palestra.generate.engine.engine import Engine
    from palestra.generate.local import LocalGenerator

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    engine = Engine.from_folder(whole_model(ref, root), dtype=dtype, device=device, max_running=ROWS)
    return LocalGenerator(engine)


def make_reward(spec: RewardSpec, root: Path) -> Reward:
    """The reward of a spec; `root` is the folder of runs."""
    if spec.function is not None:
        return FunctionReward(spec.function)
    if spec.judge is not None:
        from palestra.tasks.rewards.llm_judge import make_judge  # these need torch, which functions do without

        return make_judge(spec.judge, root, open_generator)
    if spec.model is not None:
        from palestra.lm.scorer import Scorer

        return RewardModel(Scorer.load(whole_model(spec.model, root)))
    raise UsageError("reward: expected one of function, judge and model")


@overload
def reward(function: F) -> F: ...
@overload
def reward(*, isolated: bool = True) -> Callable[[F], F]: ...
def reward(function: F | None = None, *, isolated: bool = True) -> F | Callable[[F], F]:
    """Mark a function as a reward, `@reward` or `@reward(isolated=False)`.

    A spec names any function, marked or not. The mark says where it runs: in a worker process, which is killed where
    it hangs, or with `isolated=False` on the event loop itself, for what takes microseconds or awaits.
    """

    def mark(marked: F) -> F:
        setattr(marked, ISOLATED, isolated)
        return marked

    return mark if function is None else mark(function)


class FunctionReward:
    """A function of the user: `def reward(prompt, completion, *, prompt_ids, completion_ids, **row)`, sync or async.

    It is passed by name the arguments that it declares: these four, of which the first two are text, and fields of the
    row, with the rest of them in `**row`. It returns a number, of which 1 and more count as correct, or a `Verdict`.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = load_named(name, "reward.function")
        self.isolated: bool = getattr(self.function, ISOLATED, True)
        self._parameters = inspect.signature(self.function).parameters.values()
        for parameter in self._parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise UsageError(f"{name}: its argument {parameter.name!r} cannot be passed by name: remove the '/'")

    def verify(self, problem: Problem, completion: Completion) -> Verdict | Awaitable[Verdict]:
        result = self.function(**self._arguments(problem, completion))
        return self._awaited(result) if inspect.isawaitable(result) else self._verdict(result)

    def close(self) -> None:
        """Nothing is open."""

    async def _awaited(self, result: Awaitable[Any]) -> Verdict:
        return self._verdict(await result)

    def _arguments(self, problem: Problem, completion: Completion) -> dict[str, Any]:
        known: Mapping[str, Any] = {
            **problem.row,
            "prompt": problem.text,
            "completion": completion.text,
            "prompt_ids": list(completion.prompt_ids),
            "completion_ids": list(completion.completion_ids),
        }
        arguments = {}
        for parameter in self._parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments = {**problem.row, **arguments}
            elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name in known:
                arguments[parameter.name] = known[parameter.name]
            elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.default is parameter.empty:
                raise UsageError(
                    f"{self.name} asks for {parameter.name!r}, which {problem.id} does not have: there is "
                    f"{', '.join(known)}"
                )
        return arguments

    def _verdict(self, result: Any) -> Verdict:
        score = result.score if isinstance(result, Verdict) else result
        if not isinstance(score, Real) or not math.isfinite(score):
            shown = f"a Verdict with the score {score}" if isinstance(result, Verdict) else f"{result!r:.80}"
            note = f"{self.name} returned {shown}: expected a finite number or a palestra.tasks.task.Verdict"
            return Verdict(0.0, Status.ERROR, note=note)
        if isinstance(result, Verdict):
            return result
        return Verdict(float(score), Status.CORRECT if float(score) >= 1.0 else Status.WRONG)


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
