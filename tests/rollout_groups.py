"""Groups of trajectories for tests: drawn by hypothesis, or written down in a line."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from palestra.rollout.types import Group, Trajectory
from palestra.tasks.task import Problem, Status, Verdict


def trajectory(reward: float = 0.0, drawn: int = 3, prompt: int = 2, **changes: Any) -> Trajectory:
    """A prompt of `prompt` tokens and `drawn` more."""
    status = changes.pop("status", Status.CORRECT if reward > 0 else Status.WRONG)
    given = {
        "tokens": tuple(range(prompt + drawn)),
        "loss_mask": (False,) * prompt + (True,) * drawn,
        "logprobs": (0.0,) * prompt + tuple(-0.1 * place for place in range(1, drawn + 1)),
        "versions": (-1,) * prompt + (4,) * drawn,
        "reward": reward,
        "verdict": Verdict(reward, status),
        "stop_reason": "eos",
        "completion": "an answer",
        "turns": ((prompt, prompt + drawn),),
        **changes,
    }
    return Trajectory(**given)


def group(rewards: Sequence[float], number: int = 0, task: str = "sums", **changes: Any) -> Group:
    """One trajectory for each reward."""
    given = {
        "problem": Problem(f"{task}/train/{number}", f"What is {number}?", {"answer": number}),
        "version": 3,
        "trajectories": tuple(trajectory(reward) for reward in rewards),
        "asked": len(rewards),
        **changes,
    }
    return Group(number, **given)


NUMBERS = st.floats(width=64)
TEXTS = st.text(st.characters(codec=None), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
VERDICTS = st.builds(
    Verdict,
    NUMBERS,
    st.sampled_from(Status),
    st.dictionaries(TEXTS, NUMBERS, max_size=2),
    NUMBERS,
    st.none() | TEXTS,
    TEXTS,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXTS, "content": TEXTS}), max_size=3).map(tuple)
PROBLEMS = st.builds(Problem, TEXTS, TEXTS | MESSAGES, st.dictionaries(TEXTS, JSON, max_size=3))


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Any, with arrays of one length."""
    size = draw(st.integers(0, 8))

    def row(values: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    return Trajectory(
        row(st.integers(0, 2**31)),
        row(st.booleans()),
        row(NUMBERS),
        row(st.integers(-1, 2**40)),
        draw(NUMBERS),
        draw(VERDICTS),
        draw(st.sampled_from(["eos", "stop", "length", "abort"])),
        draw(TEXTS),
        tuple(draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2))),
    )


GROUPS = st.builds(
    Group,
    st.integers(0, 2**60),
    PROBLEMS,
    st.integers(0, 2**40),
    st.lists(trajectories(), max_size=3).map(tuple),
    st.integers(0, 64),
    NUMBERS,
)
