"""Before the first step: a prompt as the model reads it, and the trainer's log-probabilities beside the generator's.

Most of the time that is lost in this field is lost to a wrong template and to two models that are not the same.
"""

import logging

import torch

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError
from palestra.generate.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine
from palestra.rollout.episode import Episode

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
