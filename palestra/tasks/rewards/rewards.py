"""Rewards in place of a task's verifier: functions of the user, language models as judges, reward models."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from palestra.errors import UsageError
from palestra.spec.imports import load_function
from palestra.spec.tasks import RewardSpec
from palestra.tasks.rewards.reward_model import OpenGenerator, open_generator
from palestra.tasks.task import Completion, Problem, Status, Verdict

F = TypeVar("F", bound=Callable[..., Any])
ISOLATED = "palestra_isolated"  # the mark that `reward` leaves on a function


class Reward(Protocol):
    """Verifies completions in place of a task."""

    isolated: bool
    """Whether it is constructed again in a worker process, which is killed where it hangs."""

    def verify(self, problem: Problem, completion: Completion) -> Verdict | Awaitable[Verdict]: ...

    def close(self) -> None: ...


def make_reward(spec: RewardSpec, root: Path, *, opened: OpenGenerator = open_generator) -> Reward:
    """The reward of a spec; `root` is the folder of runs, `opened` finds and opens a judge's language model."""
    if spec.function is not None:
        return FunctionReward(spec.function)
    if spec.judge is not None:
        from palestra.tasks.rewards.llm_judge import make_judge  # these need torch, which functions do without

        return make_judge(spec.judge, root, opened)
    if spec.model is not None:
        from palestra.tasks.rewards.reward_model import RewardModel

        return RewardModel.load(spec.model, root)
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
        self.function = load_function(name, "reward.function")
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
