"""Metrics of rollout groups, and the self-test before training: the prompt as it is read, and log-probabilities.

Most time in this field is lost to a wrong chat template and to a generator that is not the same model as the trainer.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, compress
from statistics import fmean, pstdev
from typing import Any

import torch

from palestra.errors import PalestraError
from palestra.evaluate.completions import pumped
from palestra.generate.types import DrivenGenerator, Request, Sampling
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.rollout.episode import Episode
from palestra.rollout.types import Group
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.task import Status

SAME = 1e-6
"""Rewards closer than this are equal."""
SHOWN = 4
"""Prompts in a table of completions."""


def group_metrics(taken: Sequence[Group], filtered: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards of all completions, filtered or not; lengths and staleness of those that are trained on."""
    everything = [*taken, *filtered]
    completions = [t for group in everything for t in group.episodes]
    trained = [t for group in taken for t in group.trajectories]
    row = {
        "reward": fmean(t.reward for t in completions),
        "reward_std": pstdev(t.reward for t in completions),
        "reward_trained": fmean(t.reward for group in taken for t in group.episodes),
        "groups/no_variance": fmean(_spread(group) <= SAME for group in everything),
        "groups/all_correct": fmean(_all(group, Status.CORRECT) for group in everything),
        "groups/partial": fmean(len(group.episodes) < group.asked for group in everything),
        "length": fmean(t.sampled for t in trained),
        "length_max": float(max(t.sampled for t in trained)),
        "truncated": fmean(t.stop_reason == "length" for t in completions),
        "turns": fmean(len(t.turns) for t in trained),
        "time/verify": fmean(t.verdict.seconds for t in completions),
    }
    row |= {f"status/{status}": fmean(t.verdict.status == status for t in completions) for status in Status}
    for task in sorted({group.problem.task for group in everything}):
        of_task = [t.reward for group in everything if group.problem.task == task for t in group.episodes]
        row[f"reward/{task}"] = fmean(of_task)
    for part in sorted({part for t in completions for part in t.verdict.parts}):
        row[f"part/{part}"] = fmean(t.verdict.parts[part] for t in completions if part in t.verdict.parts)
    return row | _pass_rates(everything) | _staleness(trained, version)


def completion_rows(groups: Sequence[Group], step: int) -> list[dict[str, Any]]:
    """The best and the worst completion of the first few prompts, for people."""
    rows = []
    for group in groups[:SHOWN]:
        ordered = sorted(group.trajectories, key=lambda t: -t.reward)
        for one in ordered[:1] + ordered[1:][-1:]:
            row = {"step": step, "task": group.problem.task, "prompt": group.problem.text}
            rows.append(row | {"completion": one.completion, "reward": one.reward, "status": str(one.verdict.status)})
    return rows


def equal_rewards(groups: Sequence[Group]) -> str | None:
    """Why no group has an advantage: the rewards within every group are equal; None if they are not."""
    if any(_spread(group) > SAME for group in groups):
        return None
    rewards = sorted({round(t.reward, 6) for group in groups for t in group.trajectories})
    if len(rewards) > 1:
        return "all rewards within each group are equal: raise the temperature or rollout.group"
    why = "too hard, or its prompt is not what the model knows" if rewards[0] <= 0 else "solved"
    return f"all rewards equal {rewards[0]:g}, so all advantages are zero: the task is {why}"


def _pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """The share of prompts with a correct completion, of those with whole groups."""
    whole = [group for group in groups if len(group.episodes) == group.asked and group.asked > 1]
    if not whole:
        return {}
    solved = fmean(any(t.verdict.status == Status.CORRECT for t in group.trajectories) for group in whole)
    return {f"pass@{whole[0].asked}": solved}


def _staleness(trained: Sequence, version: int) -> dict[str, float]:
    """How many versions the trained tokens are behind: mean, maximum and shares."""
    versions = Counter(chain.from_iterable(compress(t.versions, t.loss_mask) for t in trained))
    ages = {version - sampled: count for sampled, count in versions.items()}
    tokens = sum(ages.values()) or 1
    mean = sum(age * count for age, count in ages.items()) / tokens
    row = {"staleness": mean, "staleness_max": float(max(ages, default=0))}
    return row | {f"staleness/{age}": count / tokens for age, count in sorted(ages.items())}


def _spread(group: Group) -> float:
    return max(group.rewards) - min(group.rewards)


def _all(group: Group, status: Status) -> bool:
    return all(t.verdict.status == status for t in group.trajectories)


log = logging.getLogger("palestra.posttrain")

TOKENS = 32
"""Tokens of each of the four completions of the self-test."""
Sampled = tuple[Batch, torch.Tensor, float]
"""Completions, their log-probabilities by the generator (T), and the temperature."""
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""A larger mean gap means that trainer and generator are not the same model."""


def self_test(sample: Callable[[], Sampled], engine: TrainEngine, bound: float | None = None) -> dict[str, float]:
    """Refuse a generator whose log-probabilities are not the trainer's, by completions that the first rank samples.

    An engine of another program is refused by `bound`, the largest k3, and ours by the largest mean gap.
    """
    batch, sampled, temperature = engine.ranks.on_first(sample)
    gap = (engine.logprobs(batch, temperature=temperature).cpu() - sampled)[batch.loss_mask > 0]
    k3 = (gap.exp() - 1 - gap).mean().item()
    mean, most = gap.abs().mean().item(), gap.abs().max().item()
    log.info(
        "trainer and generator over %d tokens: log-probabilities differ by %.2g (mean) and %.2g (max), k3 %.2g",
        len(gap), mean, most, k3,
    )  # fmt: skip
    limit = LIMIT[engine.transformer.dtype]
    if bound is not None:
        check_mismatch(k3, bound)
    elif not mean <= limit:
        raise PalestraError(
            f"the trainer's log-probabilities differ from the generator's by {mean:.2g} a token, "
            f"more than {limit:g}: they are not the same model, and training on it would be wrong"
        )
    return {"selftest/gap_mean": mean, "selftest/gap_max": most, "selftest/k3": k3}


def mismatch_bound(spec: PosttrainSpec | DistillSpec) -> float | None:
    """The largest k3 between another program's log-probabilities and the trainer's; None if our engine generates."""
    remote = spec.rollout.generator
    corrected = isinstance(spec, PosttrainSpec) and spec.algorithm.correction.type != "none"
    return None if remote is None or spec.rollout.replay is not None else math.inf if corrected else remote.mismatch


def check_mismatch(k3: float, bound: float) -> None:
    """Refuse completions whose log-probabilities are not those of the policy."""
    if not k3 <= bound:
        raise PalestraError(
            f"the generator's log-probabilities are not the trainer's: k3 = {k3:.2g} a token, more than "
            f"rollout.generator.mismatch = {bound:g}. It may send those before the temperature (vLLM needs "
            "--logprobs-mode processed_logprobs), have other weights, or compute in another precision. Correct for it "
            "with `algorithm: {anchor: recomputed}` (truncated importance weights), or raise the bound"
        )


def first_samples(episode: Episode, generator: DrivenGenerator) -> Sampled:
    """Log the first prompt, and sample from it."""
    prompt = episode.prompt
    shown = episode.tokenizer.decode(prompt, specials=True)
    log.info("the first prompt is %s, %d tokens:\n%s", episode.problem.id, len(prompt), shown)
    log.info("its tokens: %s", list(prompt))
    room = min(TOKENS, episode.context - len(prompt))
    sampling = Sampling(temperature=episode.sampling.temperature, max_new_tokens=room, seed=episode.seed >> 1)
    result = pumped(generator, generator.generate(Request(prompt, sampling, n=4, media=episode.media)))
    batch = Batch.pack(
        [prompt + one.tokens for one in result.generations],
        [[0.0] * len(prompt) + [1.0] * len(one.tokens) for one in result.generations],
        images=[episode.media] * len(result.generations),
    )
    sampled = torch.tensor([lp for one in result.generations for lp in (0.0,) * len(prompt) + one.logprobs])
    return batch, sampled, sampling.temperature
