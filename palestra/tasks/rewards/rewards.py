"""What judges answers in place of their task: functions of the user, language models, reward models."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload

from palestra.errors import UsageError
from palestra.spec.imports import load_function
from palestra.spec.tasks import RewardSpec
from palestra.tasks.prompts import text_of
from palestra.tasks.rewards.reward_model import OpenGenerator, open_generator
from palestra.tasks.task import Answer, Problem, Status, Verdict

F = TypeVar("F", bound=Callable[..., Any])
ISOLATED = "palestra_isolated"  # the mark that `reward` leaves on a function


class Reward(Protocol):
    """Judges answers as a task does."""

    isolated: bool
    """Whether it is made again in a process of its own, and killed there where it hangs."""

    def judge(self, problem: Problem, answer: Answer) -> Verdict | Awaitable[Verdict]:
        """Whether an answer is right."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


def make_reward(spec: RewardSpec, root: Path, *, opened: OpenGenerator = open_generator) -> Reward:
    """What a spec asks for; `root` is the folder of runs, `opened` finds and opens a language model that judges."""
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

    A spec names any function, marked or not. The mark says where it runs: in a process of its own, which is killed
    where it hangs, or with `isolated=False` on the event loop itself, which suits what takes microseconds and what
    awaits.
    """

    def mark(marked: F) -> F:
        setattr(marked, ISOLATED, isolated)
        return marked

    return mark if function is None else mark(function)


class FunctionReward:
    """A function of the user: `def reward(prompt, completion, *, prompt_ids, completion_ids, **row)`, sync or async.

    It is passed by name what it asks for and nothing else: these four, of which the first two are text, and fields of
    the row, whose others are in `**row`. It gives a number, of which 1 and more count as correct, or a `Verdict`.
    """

    def __init__(self, name: str):
        self.name = name
        self.function = load_function(name, "reward.function")
        self.isolated: bool = getattr(self.function, ISOLATED, True)
        self._parameters = inspect.signature(self.function).parameters.values()
        for one in self._parameters:
            if one.kind is one.POSITIONAL_ONLY:
                raise UsageError(f"{name}: its argument {one.name!r} cannot be passed by name: take out the '/'")

    def judge(self, problem: Problem, answer: Answer) -> Verdict | Awaitable[Verdict]:
        """What the function says of an answer, to be awaited where it is async."""
        given = self.function(**self._arguments(problem, answer))
        return self._awaited(given) if inspect.isawaitable(given) else self._verdict(given)

    def close(self) -> None:
        """Nothing is held."""

    async def _awaited(self, given: Awaitable[Any]) -> Verdict:
        return self._verdict(await given)

    def _arguments(self, problem: Problem, answer: Answer) -> dict[str, Any]:
        known: Mapping[str, Any] = {
            **problem.row,
            "prompt": text_of(problem),
            "completion": answer.text,
            "prompt_ids": list(answer.prompt_ids),
            "completion_ids": list(answer.completion_ids),
        }
        passed = {}
        for one in self._parameters:
            if one.kind is one.VAR_KEYWORD:
                passed = {**problem.row, **passed}
            elif one.kind is not one.VAR_POSITIONAL and one.name in known:
                passed[one.name] = known[one.name]
            elif one.kind is not one.VAR_POSITIONAL and one.default is one.empty:
                raise UsageError(
                    f"{self.name} asks for {one.name!r}, which {problem.id} does not have: there is {', '.join(known)}"
                )
        return passed

    def _verdict(self, given: Any) -> Verdict:
        if isinstance(given, Verdict):
            return given if math.isfinite(given.score) else self._refused(f"a Verdict with the score {given.score}")
        if not isinstance(given, Real):
            return self._refused(repr(given)[:80])
        score = float(given)
        if not math.isfinite(score):
            return self._refused(str(score))
        return Verdict(score, Status.CORRECT if score >= 1.0 else Status.WRONG)

    def _refused(self, what: str) -> Verdict:
        note = f"{self.name} gave {what}: expected a finite number or a palestra.tasks.task.Verdict"
        return Verdict(0.0, Status.ERROR, note=note)
