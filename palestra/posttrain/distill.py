"""Distillation: the teacher's view of the student's completions, divergences token by token, the steps on them."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.data.mixture import Mixture
from palestra.data.store import Example, micro_batches
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.batch import Batch, forward, score
from palestra.lm.engine import Loss, LossFunction, TrainEngine
from palestra.lm.head import chunk_rows, logits, token_logprobs
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.rl import kl
from palestra.rl.losses import LOG_RATIO_LIMIT
from palestra.rollout.episode import encode_problem
from palestra.rollout.types import Group
from palestra.spec.kinds.distill import DistillSpec, DivergenceSpec, ForwardKlSpec, PolicyLossSpec, ReverseKlSpec
from palestra.tasks.task import Problem

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


class TeacherOutput(NamedTuple):
    """Of the trained tokens of a batch, in their order."""

    logprobs: Tensor
    """(N) FP32."""
    hidden: Tensor | None
    """(N, D): the states that its whole distributions are computed from, if requested."""


class Teacher:
    """A frozen model, and the template of the prompt that it reads instead of the student's."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, *, prompt: str | None = None):
        self.model, self.tokenizer, self.prompt = model.requires_grad_(False), tokenizer, prompt

    def prompt_of(self, problem: Problem) -> tuple[int, ...] | None:
        """The tokens it reads instead of a problem's prompt; None if it reads the student's."""
        if self.prompt is None:
            return None
        tokens = encode_problem(privileged(problem, self.prompt), self.tokenizer)
        if not tokens:
            raise UsageError(f"teacher.prompt: it is empty for {problem.id}")
        return tokens

    def reads(self, tokens: tuple[int, ...]) -> bool:
        """Whether the tokens fit its context and its vocabulary."""
        shape = self.model.shape
        return len(tokens) <= shape.context and max(tokens) < (shape.vocab or 0)

    @torch.no_grad()
    def read(self, batch: Batch, *, micro_tokens: int, temperature: float, hidden: bool) -> TeacherOutput:
        """Its outputs for the trained tokens of a batch, on the batch's device."""
        count, where, device = len(batch.predicted), batch.tokens.device, self.model.embed.device
        rows = torch.full((len(batch.tokens),), -1, device=where)
        rows[batch.predicted] = torch.arange(count, device=where)
        logprobs = torch.empty(count, device=where)
        taught = torch.empty(count if hidden else 0, self.model.shape.width, dtype=self.model.dtype, device=where)
        for part in micro_batches(batch.lengths, max(micro_tokens, max(batch.lengths))):
            micro = batch.select(part).to(device)
            states = forward(self.model, micro).hidden.index_select(0, micro.predicted - 1)
            targets = micro.tokens[micro.predicted]
            scored, _ = token_logprobs(states, self.model.unembed, targets, temperature, entropy=False)
            here = rows[batch.token_index(part)]
            here = here[here >= 0]
            logprobs[here] = scored.to(where)
            if hidden:
                taught[here] = states.to(where)
        return TeacherOutput(logprobs, taught if hidden else None)


def privileged(problem: Problem, template: str) -> Problem:
    """The problem with `template` for its prompt, or for the last message of its conversation.

    {prompt} is the text that it replaces, {name} the row's field of that name. One pass, so that braces in inserted
    text are never expanded.
    """
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=_filled(problem, template, problem.prompt))
    *before, last = problem.prompt
    return replace(problem, prompt=(*before, {**last, "content": _filled(problem, template, last["content"])}))


def _filled(problem: Problem, template: str, prompt: str) -> str:
    values: dict[str, Any] = {**problem.row, "prompt": prompt}

    def expand(field: re.Match[str]) -> str:
        if field[1] not in values:
            raise UsageError(
                f"teacher.prompt: {problem.id} has no field {{{field[1]}}}; it has {', '.join(sorted(values))}"
            )
        value = values[field[1]]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    return FIELD.sub(expand, template)


class Divergence(NamedTuple):
    """Functions of the log-probabilities (T, V) of the student and of the teacher."""

    value: Callable[[Tensor, Tensor], Tensor]
    """(T)."""
    slope: Callable[[Tensor, Tensor], Tensor]
    """(T, V): its gradient in the student's logits."""


def divergence_of(spec: DivergenceSpec) -> Divergence:
    """The divergence that a spec names."""
    if isinstance(spec, ForwardKlSpec):
        return Divergence(kl.forward_kl, kl.forward_kl_slope)
    if isinstance(spec, ReverseKlSpec):
        return Divergence(kl.reverse_kl, kl.reverse_kl_slope)
    return Divergence(partial(kl.jensen_shannon, beta=spec.beta), partial(kl.jensen_shannon_slope, beta=spec.beta))


def token_divergences(
    student: Tensor,
    student_unembed: Tensor,
    teacher: Tensor,
    teacher_unembed: Tensor,
    divergence: Divergence,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Divergences with a gradient and the student's entropies without one, both (T) in FP32, in chunks of tokens.

    From hidden states (T, D) and unembeddings (V, D); the models may differ in width. Both distributions are
    softmax(logits / temperature) over the tokens that both models have rows for. The backward pass recomputes each
    chunk's logits; the teacher gets no gradient.
    """
    common = min(len(student_unembed), len(teacher_unembed))
    return _TokenDivergences.apply(
        student, student_unembed[:common], teacher.detach(), teacher_unembed[:common].detach(), divergence, temperature
    )


class _TokenDivergences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        unembed: Tensor,
        taught: Tensor,
        teacher: Tensor,
        divergence: Divergence,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        values = torch.empty(len(hidden), dtype=_sums(hidden), device=hidden.device)
        entropies = torch.empty_like(values)
        own, theirs = _cast(unembed, hidden), _cast(teacher, taught)
        for part in _parts(hidden, unembed):
            log_p = _log_softmax(hidden[part], own, temperature)
            log_q = _log_softmax(taught[part], theirs, temperature)
            values[part] = divergence.value(log_p, log_q)
            entropies[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, unembed, taught, teacher)
        ctx.divergence, ctx.temperature = divergence, temperature
        ctx.mark_non_differentiable(entropies)
        return values, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, unembed, taught, teacher = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_unembed = torch.zeros_like(unembed, dtype=_sums(hidden)) if ctx.needs_input_grad[1] else None
        own, theirs = _cast(unembed, hidden), _cast(teacher, taught)
        for part in _parts(hidden, unembed):
            log_p = _log_softmax(hidden[part], own, ctx.temperature)
            log_q = _log_softmax(taught[part], theirs, ctx.temperature)
            slope = (ctx.divergence.slope(log_p, log_q) * (grads[0][part, None] / ctx.temperature)).to(hidden.dtype)
            # `logits(a, b)` is a @ b.T in the precision that scores have.
            if to_hidden is not None:
                to_hidden[part] = logits(slope, own.t())
            if to_unembed is not None:
                to_unembed += logits(slope.t(), hidden[part].t())  # the sum over chunks stays in FP32
        grad = None if to_unembed is None else to_unembed.to(unembed.dtype)
        return to_hidden, grad, None, None, None, None


def _parts(hidden: Tensor, unembed: Tensor) -> list[slice]:
    """Chunks of tokens whose logits of both models are in memory at one time."""
    rows = max(1, chunk_rows(len(unembed), hidden.device) // 2)
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def _cast(unembed: Tensor, hidden: Tensor) -> Tensor:
    """The matrix in the compute dtype of a GPU, cast once for all chunks."""
    return unembed.to(hidden.dtype) if hidden.is_cuda else unembed


def _log_softmax(hidden: Tensor, unembed: Tensor, temperature: float) -> Tensor:
    return (logits(hidden, unembed) / temperature).log_softmax(-1)


def _sums(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


class DistillLesson(NamedTuple):
    """A completion as the student reads it and as the teacher does; both end in the same tokens."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    trained: int
    """How many tokens at the end may be trained on; the others are a prompt of at least one token."""
    mask: tuple[bool, ...]
    """Which of those are trained on."""
    behavior: tuple[float, ...] | None
    """Their log-probabilities when the student sampled them; None for given completions."""


class Distiller:
    """Turns rollout groups and given completions into optimizer steps; what `Learner` is for RL."""

    def __init__(self, spec: DistillSpec, engine: TrainEngine, teacher: Teacher, given: Mixture[Example] | None = None):
        self.spec, self.engine, self.teacher, self.given = spec, engine, teacher, given
        if isinstance(spec.loss, PolicyLossSpec):
            self._loss = policy_loss(spec.loss, spec.rollout.temperature)
        else:
            self._loss = divergence_loss(spec.loss, teacher.model)

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """The completions packed, those of the groups first, with the teacher's outputs for every token."""
        spec, every = self.spec, self.spec.teacher.refresh
        if every is not None and step > 0 and step % every == 0:
            self.teacher.model.load_state_dict(self.engine.weights())
        lessons = own_lessons(groups, self.teacher)
        if self.given is not None:
            size = spec.given
            lessons += given_lessons(self.given.examples(np.arange(step * size, (step + 1) * size)))
        return with_teacher(
            lessons,
            self.teacher,
            micro_tokens=spec.train.micro_tokens,
            temperature=spec.rollout.temperature,
            hidden=not isinstance(spec.loss, PolicyLossSpec),
        )

    def learn(self, batch: Batch, step: int, between: Callable[[], object]) -> dict[str, float]:
        """One optimizer step on a batch; its metrics.

        `loss` is the divergence per token. `kl_teacher` is k1 of KL(student ‖ teacher) over the tokens that the student
        sampled, `entropy` its own over all tokens, `unread` the share of completions that the teacher could not read.
        """
        own, gaps = batch.per_token["own"] > 0, batch.per_token["advantages"]
        sums = self.engine.forward_backward(batch, self._loss, max(1.0, float(len(batch.predicted))), between=between)
        sampled = {"kl_teacher": -float(gaps[own].mean())} if own.any() else {}
        unread = {"unread": float(batch.per_sequence["unread"].mean())}
        stepped = self.engine.optim_step(step / self.spec.train.steps)
        return {name: float(value) for name, value in (sums | stepped).items()} | sampled | unread

    def why_no_gradient(self, groups: Sequence[Group], row: dict[str, float]) -> str | None:
        zero = row.get("grad_norm") == 0.0
        return "the gradient is 0: the student's distributions equal the teacher's" if zero else None

    def state(self) -> dict[str, Any]:
        """The optimizer, and the teacher's weights if they change."""
        changes = self.spec.teacher.refresh is not None
        weights = self.teacher.model.state_dict()
        return {"engine": self.engine.state(), "teacher": self.engine.ranks.keep(weights) if changes else None}

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from `state()`; the student's own weights are in the checkpoint's model."""
        self.engine.load_state(state["engine"], checkpoint)
        if state["teacher"] is not None:
            self.engine.ranks.restore(state["teacher"], self.teacher.model.state_dict(), checkpoint)


def own_lessons(groups: Sequence[Group], teacher: Teacher) -> list[DistillLesson]:
    """The student's completions, each after the prompt that the model in question reads."""
    lessons = []
    for group in groups:
        read = teacher.prompt_of(group.problem)
        for t in group.trajectories:
            # The first turn begins where the prompt ends; without turns, at the first sampled token.
            begin = t.turns[0][0] if t.turns else t.loss_mask.index(True) if t.sampled else len(t.tokens)
            prompt = t.tokens[:begin] if read is None else read
            mask = tuple(sampled and np.isfinite(x) for sampled, x in zip(t.loss_mask, t.logprobs, strict=True))
            rest = t.tokens[begin:]
            lessons.append(DistillLesson(t.tokens, prompt + rest, len(rest), mask[begin:], t.logprobs[begin:]))
    return lessons


def given_lessons(examples: Sequence[Example]) -> list[DistillLesson]:
    """Completions from a data set, which both models read alike."""
    lessons = []
    for example in examples:
        tokens = tuple(example.tokens.tolist())
        loss = np.ones(len(tokens), bool) if example.loss is None else example.loss
        lessons.append(DistillLesson(tokens, tokens, len(tokens) - 1, tuple(loss[1:].tolist()), None))
    return lessons


def with_teacher(
    lessons: Sequence[DistillLesson], teacher: Teacher, *, micro_tokens: int, temperature: float, hidden: bool
) -> Batch:
    """The lessons as the student reads them, packed. What the teacher cannot read is not trained on.

    Per token: `own`, 1 where the student sampled it and it is trained on; `behavior`, its log-probability then;
    `teacher`, the teacher's; `advantages`, teacher - behavior, 0 for given tokens; and, with `hidden`, the teacher's
    hidden states (T, D) from which it is predicted: D numbers per token, where a distribution has V. Per sequence:
    `unread`, 1 where the teacher cannot read it.
    """
    read = [teacher.reads(lesson.teacher) for lesson in lessons]
    if not any(read):
        raise PalestraError(
            f"the teacher can read none of the {len(lessons)} completions of this batch: its context is "
            f"{teacher.model.shape.context} tokens. Shorten teacher.prompt or rollout.max_new_tokens"
        )
    batch = Batch.pack(
        [lesson.student for lesson in lessons],
        [_row(lesson, len(lesson.student), lesson.mask, here) for lesson, here in zip(lessons, read, strict=True)],
        per_token={
            "behavior": [_row(lesson, len(lesson.student), lesson.behavior, True) for lesson in lessons],
            "own": [_row(lesson, len(lesson.student), lesson.mask, lesson.behavior is not None) for lesson in lessons],
        },
        per_sequence={"unread": [not here for here in read]},
    )
    readable = [lesson for lesson, here in zip(lessons, read, strict=True) if here]
    masks = [_row(lesson, len(lesson.teacher), lesson.mask, True) for lesson in readable]
    theirs = Batch.pack([lesson.teacher for lesson in readable], masks)
    taught = teacher.read(theirs, micro_tokens=micro_tokens, temperature=temperature, hidden=hidden)
    trained = batch.predicted
    if len(taught.logprobs) != len(trained):
        raise ValueError(f"the teacher scored {len(taught.logprobs)} tokens, the student has {len(trained)}")
    logprobs = torch.zeros(len(batch.tokens)).index_copy(0, trained, taught.logprobs)
    own = batch.per_token["own"] * batch.loss_mask
    gaps = -kl.k1(batch.per_token["behavior"], logprobs, clamp=LOG_RATIO_LIMIT)
    added = {"own": own, "teacher": logprobs, "advantages": torch.where(own > 0, gaps, 0.0)}
    if taught.hidden is not None:
        states = taught.hidden.new_zeros(len(batch.tokens), taught.hidden.shape[1])
        added["hidden"] = states.index_copy(0, trained, taught.hidden)
    return replace(batch, per_token={**batch.per_token, **added})


def _row(lesson: DistillLesson, length: int, values: Sequence[float] | None, here: bool) -> np.ndarray:
    """(length) FP32: values of the tokens that may be trained on, 0 for the prompt before them; all 0 if not `here`."""
    row = np.zeros(length, np.float32)
    if here and values is not None and lesson.trained:
        numbers = np.asarray(values, np.float32)
        row[-lesson.trained :] = np.where(np.isfinite(numbers), numbers, 0.0)
    return row


def policy_loss(spec: PolicyLossSpec, temperature: float) -> LossFunction:
    """The policy gradient of the reverse KL at each token, without credit for the tokens after it.

    With x = log π(y) - log q(y), a constant, the gradient is w · x · ∇ log π(y), whose expectation over y from π is
    ∇ KL(π‖q). The weights w = π / behavior correct for off-policy completions; the value is w · x, k1 of the KL.
    """

    def loss(model: Transformer, batch: Batch) -> Loss:
        scored = score(model, batch, temperature=temperature)
        terms = policy_terms(scored.logprobs, batch.per_token["behavior"], batch.per_token["teacher"], spec.limit)
        total = torch.where(batch.loss_mask > 0, terms, 0.0).sum()
        return Loss(total, {"entropy": scored.entropy.detach().sum()}, router_terms(model, scored.router, batch))

    return loss


def policy_terms(logprobs: Tensor, behavior: Tensor, teacher: Tensor, limit: float | None) -> Tensor:
    """w · x at each token (T), its gradient w · x · ∇ log π; `limit` bounds the weights from above."""
    now, most = logprobs.detach(), LOG_RATIO_LIMIT if limit is None else math.log(limit)
    weights = (now - behavior).clamp(-LOG_RATIO_LIMIT, min(most, LOG_RATIO_LIMIT)).exp()
    return weights * kl.k1(now, teacher, clamp=LOG_RATIO_LIMIT) * (1.0 + logprobs - now)


def divergence_loss(spec: DivergenceSpec, teacher: Transformer) -> LossFunction:
    """The divergence of both whole distributions at every trained token, summed (GKD, arXiv 2306.13649, eq. 2)."""
    divergence = divergence_of(spec)

    def loss(model: Transformer, batch: Batch) -> Loss:
        output = forward(model, batch)
        predicted = batch.predicted  # never the first of a sequence
        values, entropies = token_divergences(
            output.hidden.index_select(0, predicted - 1),
            model.unembed,
            batch.per_token["hidden"].index_select(0, predicted),
            teacher.unembed,
            divergence,
            spec.temperature,
        )
        return Loss(values.sum(), {"entropy": entropies.sum()}, router_terms(model, output.router, batch))

    return loss
