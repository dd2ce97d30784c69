"""Groups in checkpoints: numbers as arrays, bit for bit, and the problem by its id."""

from collections.abc import Callable
from typing import Any

import numpy as np

from palestra.rollout.types import Group, Trajectory
from palestra.tasks.types import Problem, Status, Verdict


def group_state(group: Group) -> dict[str, Any]:
    """A group as plain data."""
    return {
        "number": group.number,
        "problem": group.problem.id,
        "version": group.version,
        "asked": group.asked,
        "seconds": group.seconds,
        "trajectories": [_trajectory_state(one) for one in group.trajectories],
    }


def load_group(state: dict[str, Any], find: Callable[[str], Problem]) -> Group:
    """The group again, given what finds problems by their ids."""
    return Group(
        number=state["number"],
        problem=find(state["problem"]),
        version=state["version"],
        trajectories=tuple(_load_trajectory(one) for one in state["trajectories"]),
        asked=state["asked"],
        seconds=state["seconds"],
    )


def _trajectory_state(one: Trajectory) -> dict[str, Any]:
    verdict = one.verdict
    return {
        "tokens": np.asarray(one.tokens, np.int32),
        "loss_mask": np.asarray(one.loss_mask, np.bool_),
        "logprobs": np.asarray(one.logprobs, np.float64),
        "versions": np.asarray(one.versions, np.int64),
        "reward": one.reward,
        "verdict": [
            verdict.score, str(verdict.status), dict(verdict.parts), verdict.seconds, verdict.sandbox, verdict.note
        ],
        "stop_reason": one.stop_reason,
        "completion": one.completion,
        "turns": [list(turn) for turn in one.turns],
    }  # fmt: skip


def _load_trajectory(state: dict[str, Any]) -> Trajectory:
    score, status, parts, seconds, sandbox, note = state["verdict"]
    return Trajectory(
        tokens=tuple(np.asarray(state["tokens"]).tolist()),
        loss_mask=tuple(np.asarray(state["loss_mask"]).tolist()),
        logprobs=tuple(np.asarray(state["logprobs"]).tolist()),
        versions=tuple(np.asarray(state["versions"]).tolist()),
        reward=state["reward"],
        verdict=Verdict(score, Status(status), parts, seconds, sandbox, note),
        stop_reason=state["stop_reason"],
        completion=state["completion"],
        turns=tuple((begin, end) for begin, end in state["turns"]),
    )
