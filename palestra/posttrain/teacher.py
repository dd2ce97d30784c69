"""The teacher of a distillation: what it reads of an answer, and what it says of the answer's tokens."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from palestra.data.packing import micro_batches
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.lm.batch import Batch, forward
from palestra.lm.head import token_logprobs
from palestra.lm.model import Transformer
from palestra.rollout.episode import encode_problem
from palestra.tasks.types import Problem

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class Said(NamedTuple):
    """What a teacher says of the trained tokens of a batch, in their order."""

    logprobs: Tensor
    """(N) FP32."""
    hidden: Tensor | None
    """(N, D): the states that its whole distributions are computed from, where they were asked for."""


class Teacher:
    """A frozen model, and what it reads in place of the student's prompt."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, *, prompt: str | None = None):
        self.model, self.tokenizer, self.prompt = model.requires_grad_(False), tokenizer, prompt

    def prompt_of(self, problem: Problem) -> tuple[int, ...] | None:
        """The tokens it reads in place of a problem's prompt; None where it reads the same as the student."""
        if self.prompt is None:
            return None
        found = encode_problem(privileged(problem, self.prompt), self.tokenizer)
        if not found:
            raise UsageError(f"teacher.prompt: nothing is left of it for {problem.id}")
        return found

    def reads(self, tokens: tuple[int, ...]) -> bool:
        """Whether it can read so many tokens, and knows all of them."""
        shape = self.model.shape
        return len(tokens) <= shape.context and max(tokens) < (shape.vocab or 0)

    @torch.no_grad()
    def read(self, batch: Batch, *, micro_tokens: int, temperature: float, hidden: bool) -> Said:
        """What it says of the trained tokens of a batch, where the batch lies."""
        count, where, device = len(batch.predicted), batch.tokens.device, self.model.embed.device
        rows = torch.full((len(batch.tokens),), -1, device=where)
        rows[batch.predicted] = torch.arange(count, device=where)
        logprobs = torch.empty(count, device=where)
        kept = torch.empty(count if hidden else 0, self.model.shape.width, dtype=self.model.dtype, device=where)
        for part in micro_batches(batch.lengths, max(micro_tokens, max(batch.lengths))):
            micro = batch.select(part).to(device)
            states = forward(self.model, micro).hidden.index_select(0, micro.predicted - 1)
            targets = micro.tokens[micro.predicted]
            found, _ = token_logprobs(states, self.model.unembed, targets, temperature, entropy=False)
            here = rows[batch.token_index(part)]
            here = here[here >= 0]
            logprobs[here] = found.to(where)
            if hidden:
                kept[here] = states.to(where)
        return Said(logprobs, kept if hidden else None)

    def learn(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights, as `TrainEngine.weights` gives them."""
        self.model.load_state_dict(weights)

    def state(self) -> dict[str, Any]:
        """Its weights."""
        return dict(self.model.state_dict())


def privileged(problem: Problem, template: str) -> Problem:
    """The problem with `template` for its prompt, or for the last message of its conversation.

    {prompt} is what stood there, {name} the row's field of that name; in one pass, so that braces in what is put in
    are never read.
    """
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=_filled(problem, template, problem.prompt))
    *before, last = problem.prompt
    said = {**last, "content": _filled(problem, template, last["content"])}
    return replace(problem, prompt=(*before, said))


def _filled(problem: Problem, template: str, prompt: str) -> str:
    values: Mapping[str, Any] = {**problem.row, "prompt": prompt}

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise UsageError(
                f"teacher.prompt: {{{found[1]}}} is not there for {problem.id}, which has {', '.join(sorted(values))}"
            )
        put = values[found[1]]
        return put if isinstance(put, str) else json.dumps(put, ensure_ascii=False)

    return FIELD.sub(value, template)
