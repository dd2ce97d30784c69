"""What a practitioner looks at beside the loss, and the first look before training at prompts and log-probabilities.

Most of the time that is lost in this field is lost to a wrong template and to two models that are not the same.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

import torch

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.rollout.episode import Episode
from palestra.rollout.types import Group
from palestra.tasks.task import Status

SAME = 1e-6
"""Rewards closer than this are equal."""


def group_metrics(taken: Sequence[Group], filtered: Sequence[Group], version: int) -> dict[str, float]:
    """Rewards of all that was judged, filtered or not; lengths and ages of what is trained on."""
    everything = [*taken, *filtered]
    answers = [t for group in everything for t in group.trajectories]
    trained = [t for group in taken for t in group.trajectories]
    found = {
        "reward": fmean(t.reward for t in answers),
        "reward_std": pstdev(t.reward for t in answers),
        "reward_trained": fmean(t.reward for t in trained),
        "groups/no_variance": fmean(_spread(group) <= SAME for group in everything),
        "groups/all_correct": fmean(_all(group, Status.CORRECT) for group in everything),
        "groups/partial": fmean(len(group.trajectories) < group.asked for group in everything),
        "length": fmean(t.sampled for t in trained),
        "length_max": float(max(t.sampled for t in trained)),
        "truncated": fmean(t.stop_reason == "length" for t in answers),
        "turns": fmean(len(t.turns) for t in trained),
        "time/verify": fmean(t.verdict.seconds for t in answers),
    }
    found |= {f"status/{status}": fmean(t.verdict.status == status for t in answers) for status in Status}
    for task in sorted({group.problem.task for group in everything}):
        of_task = [t.reward for group in everything if group.problem.task == task for t in group.trajectories]
        found[f"reward/{task}"] = fmean(of_task)
    for part in sorted({part for t in answers for part in t.verdict.parts}):
        found[f"part/{part}"] = fmean(t.verdict.parts[part] for t in answers if part in t.verdict.parts)
    return found | _pass_rates(everything) | _staleness(trained, version)


def silence(taken: Sequence[Group], row: dict[str, float]) -> str | None:
    """Why nothing is learned in this step, where nothing is."""
    if all(_spread(group) <= SAME for group in taken):
        rewards = sorted({round(t.reward, 6) for group in taken for t in group.trajectories})
        if len(rewards) == 1:
            why = (
                "the task may be too hard, or its prompt not what the model knows"
                if rewards[0] <= 0
                else "it is learned"
            )
            return f"every answer has the reward {rewards[0]:g}, so none is better than another: {why}"
        return "all answers to a prompt have the same reward, in every group: raise the temperature or the group's size"
    return no_gradient(taken, row)


def no_gradient(taken: Sequence[Group], row: dict[str, float]) -> str | None:
    """The same for algorithms that learn from equal rewards too."""
    if row.get("grad_norm") == 0.0:
        return "the gradient is 0: every token is masked or clipped, or every advantage is 0"
    return None


def _pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """The share of prompts with a right answer, of those with whole groups."""
    whole = [group for group in groups if len(group.trajectories) == group.asked and group.asked > 1]
    if not whole:
        return {}
    solved = fmean(any(t.verdict.status == Status.CORRECT for t in group.trajectories) for group in whole)
    return {f"pass@{whole[0].asked}": solved}


def _staleness(trained: Sequence, version: int) -> dict[str, float]:
    """How many versions each trained token is behind."""
    ages = Counter(
        version - v for t in trained for v, drawn in zip(t.versions, t.loss_mask, strict=True) if drawn
    )  # fmt: skip
    tokens = sum(ages.values()) or 1
    found = {
        "staleness": sum(age * count for age, count in ages.items()) / tokens,
        "staleness_max": float(max(ages, default=0)),
    }
    return found | {f"staleness/{age}": count / tokens for age, count in sorted(ages.items())}


def _spread(group: Group) -> float:
    return max(group.rewards) - min(group.rewards)


def _all(group: Group, status: Status) -> bool:
    return all(t.verdict.status == status for t in group.trajectories)


log = logging.getLogger("palestra.posttrain")

TOKENS = 32
"""How many tokens the self-test draws, four times."""
LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""A larger mean gap means that trainer and generator are not the same model."""


def introduce(episode: Episode, tokenizer: Tokenizer) -> None:
    """Show the first prompt as the model reads it."""
    shown = tokenizer.decode(episode.prompt, specials=True)
    log.info("the first prompt is %s, %d tokens:\n%s", episode.problem.id, len(episode.prompt), shown)
    log.info("its tokens: %s", list(episode.prompt))


def self_test(episode: Episode, writer: Engine, engine: TrainEngine) -> dict[str, float]:
    """Draw a few answers and compare each token's log-probability with the trainer's; an error where they differ."""
    room = min(TOKENS, episode.context - len(episode.prompt))
    sampling = Sampling(temperature=episode.sampling.temperature, max_new_tokens=room, seed=episode.seed >> 1)
    (result,) = writer.run([Request(episode.prompt, sampling, n=4)])
    prompt = episode.prompt
    batch = Batch.pack(
        [prompt + one.tokens for one in result.generations],
        [[0.0] * len(prompt) + [1.0] * len(one.tokens) for one in result.generations],
    )
    drawn = torch.tensor([lp for one in result.generations for lp in (0.0,) * len(prompt) + one.logprobs])
    gap = (engine.logprobs(batch, temperature=sampling.temperature).cpu() - drawn)[batch.loss_mask > 0]
    k3 = (gap.exp() - 1 - gap).mean().item()
    mean, most = gap.abs().mean().item(), gap.abs().max().item()
    found = {"selftest/gap_mean": mean, "selftest/gap_max": most, "selftest/k3": k3}
    log.info(
        "trainer and generator over %d tokens: log-probabilities differ by %.2g (mean) and %.2g (max), k3 %.2g",
        len(gap), mean, most, k3,
    )  # fmt: skip
    limit = LIMIT[engine.transformer.dtype]
    if not mean <= limit:
        raise PalestraError(
            f"the trainer's log-probabilities differ from the generator's by {mean:.2g} a token, "
            f"more than {limit:g}: they are not the same model, and nothing learned from it would be right"
        )
    return found
