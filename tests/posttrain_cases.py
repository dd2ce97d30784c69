"""Groups of trajectories for tests of the algorithms: by hand, and at random with everything that may occur."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from palestra.lm.batch import Batch
from palestra.posttrain.batch import pack, with_advantages
from palestra.rollout.types import Group, Trajectory
from palestra.spec.algorithm import AlgorithmSpec
from palestra.tasks.task import Problem, Status, Verdict

MAX_NEW_TOKENS = 6


def algorithm(preset: str = "dr_grpo", **changes: object) -> AlgorithmSpec:
    """A preset with some keys changed; it must fit together."""
    spec = AlgorithmSpec.model_validate({"preset": preset, **changes})
    assert spec.all_conflicts() == []
    return spec


def answer(
    logprobs: Sequence[float | None],
    reward: float,
    *,
    prompt: int = 1,
    stop: str = "eos",
    versions: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    turns: tuple[tuple[int, int], ...] = (),
    turn_rewards: tuple[float, ...] = (),
) -> Trajectory:
    """A prompt of so many tokens, then tokens with these log-probabilities; None is a token of a tool."""
    drawn = [x is not None for x in logprobs]
    ages = versions or [0] * len(logprobs)
    return Trajectory(
        tokens=(1,) * prompt + tuple(tokens or [2] * len(logprobs)),
        loss_mask=(False,) * prompt + tuple(drawn),
        logprobs=(0.0,) * prompt + tuple(0.0 if x is None else x for x in logprobs),
        versions=(-1,) * prompt + tuple(v if d else -1 for v, d in zip(ages, drawn, strict=True)),
        reward=reward,
        verdict=Verdict(reward, Status.CORRECT if reward > 0 else Status.WRONG),
        stop_reason=stop,
        completion="",
        turns=turns,
        turn_rewards=turn_rewards,
    )


def groups_of(*groups: Sequence[Trajectory], asked: int = 4) -> list[Group]:
    """A group of each list of answers."""
    return [
        Group(number, Problem(f"test/train/{number}", "?"), 0, tuple(answers), asked)
        for number, answers in enumerate(groups)
    ]


def random_groups(seed: int, sizes: Sequence[int] = (4, 3, 1, 2, 4), vocab: int = 64) -> list[Group]:
    """Partial groups and one of one; tokens of tools inside and at the end; answers cut off; several versions.

    The first answer has a log-probability that is no number, the second was cut off before its first token.
    """
    draw = np.random.default_rng(seed)

    luck = np.random.default_rng([seed, 2])

    def one(place: int) -> Trajectory:
        logprobs: list[float | None] = []
        turns: list[tuple[int, int]] = []
        for turn in range(draw.integers(1, 3)):
            if turn:
                logprobs += [None] * int(draw.integers(1, 3))
            begin = len(logprobs)
            logprobs += [float(np.float32(-x)) for x in draw.exponential(1.5, draw.integers(1, MAX_NEW_TOKENS))]
            turns.append((begin, len(logprobs)))
        logprobs += [None] * int(draw.integers(0, 2))
        if place == 0:
            logprobs[0] = float("nan")
        if place == 1:
            logprobs, turns = [], []
        reward, prompt = float(draw.choice([0.0, 0.5, 1.0])), int(draw.integers(1, 4))
        early = [float(part) for part in luck.choice([0.0, 0.25, -0.5], max(0, len(turns) - 1))]
        return answer(
            logprobs,
            reward,
            prompt=prompt,
            turns=tuple((prompt + begin, prompt + end) for begin, end in turns),
            turn_rewards=(*early, reward - sum(early)) if turns and place % 3 else (),
            stop="length" if draw.random() < 0.3 or place == 1 else "eos",
            versions=sorted(draw.integers(0, 4, len(logprobs)).tolist()),
            tokens=draw.integers(3, vocab, len(logprobs)).tolist(),
        )

    answers = [one(place) for place in range(sum(sizes))]
    ends = np.cumsum(sizes)
    return groups_of(*(answers[end - size : end] for size, end in zip(sizes, ends, strict=True)))


def double(batch: Batch) -> Batch:
    """The same in FP64, so that everything computed from it is."""
    wide = {name: values.double() for name, values in batch.per_token.items()}
    columns = {name: values.double() for name, values in batch.per_sequence.items()}
    return replace(batch, loss_mask=batch.loss_mask.double(), per_token=wide, per_sequence=columns)


@dataclass(frozen=True)
class Case:
    """A batch in FP64, and what models say of its tokens, at random near what drew them."""

    groups: list[Group]
    batch: Batch
    now: Tensor
    """log π (T) of the policy that is trained."""
    anchor: Tensor
    reference: Tensor
    values: Tensor
    entropy: Tensor


def random_case(spec: AlgorithmSpec, seed: int, spread: float = 0.4) -> Case:
    """Random groups, packed, with all that `with_advantages` may need."""
    groups = random_groups(seed)
    batch = double(pack(groups, spec))
    draw = np.random.default_rng([seed, 1])
    behavior = batch.per_token["behavior"]

    def near(size: float) -> Tensor:
        moved = behavior + torch.from_numpy(draw.normal(0.0, size, len(behavior)))
        return moved.clamp(max=-1e-3)

    now, anchor, reference = near(spread), near(spread / 2), near(spread)
    values, entropy = (torch.from_numpy(draw.random(len(behavior))) for _ in range(2))
    batch = with_advantages(
        batch,
        spec,
        max_new_tokens=MAX_NEW_TOKENS,
        reference=reference if spec.needs_reference else None,
        values=values if spec.critic is not None else None,
        anchor=anchor if spec.needs_anchor else None,
    )
    return Case(groups, batch, now, anchor, reference, values, entropy)
