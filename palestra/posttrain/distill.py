"""Distillation: the student's answers beside what a teacher says of them, the losses, and the steps on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.data.example import Example
from palestra.data.mixture import Mixture
from palestra.errors import PalestraError
from palestra.lm.batch import Batch, forward, score
from palestra.lm.engine import Loss, LossFunction, TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.moe import router_terms
from palestra.posttrain.divergence import measure_of, token_divergences
from palestra.posttrain.teacher import Teacher
from palestra.rl import kl
from palestra.rl.losses import LOG_RATIO_LIMIT
from palestra.rollout.types import Group
from palestra.spec.kinds.distill import DistillSpec, DivergenceSpec, PolicyLossSpec


class Lesson(NamedTuple):
    """An answer as the student reads it and as the teacher does: they end alike."""

    student: tuple[int, ...]
    teacher: tuple[int, ...]
    trained: int
    """How many tokens at the end may be trained on; the others are a prompt, one token at least."""
    mask: tuple[bool, ...]
    """Which of those are."""
    behaviour: tuple[float, ...] | None
    """Their log-probabilities when the student drew them; None where they were given."""


class Distiller:
    """Takes groups and given answers, moves the student's weights. It stands where RL has `Learner`."""

    def __init__(
        self,
        spec: DistillSpec,
        engine: TrainEngine,
        teacher: Teacher,
        given: Mixture[Example] | None = None,
    ):
        self.spec, self.engine, self.teacher, self.given = spec, engine, teacher, given
        if isinstance(spec.loss, PolicyLossSpec):
            self._loss = policy_loss(spec.loss, spec.rollout.temperature)
        else:
            self._loss = divergence_loss(spec.loss, teacher.model)

    def prepare(self, groups: Sequence[Group], step: int) -> Batch:
        """The answers packed, those of the groups first, with what the teacher says of every token."""
        spec, every = self.spec, self.spec.teacher.refresh
        if every is not None and step > 0 and step % every == 0:
            self.teacher.learn(self.engine.weights())
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
        """One optimizer step on a batch; what people look at.

        `loss` is the divergence a token. `kl_teacher` is k1 of KL(student ‖ teacher) over the tokens that the student
        drew, `entropy` its own over all tokens, `unread` the share of answers that the teacher could not read.
        """
        own, apart = batch.per_token["own"] > 0, batch.per_token["advantages"]
        sums = self.engine.forward_backward(batch, self._loss, max(1.0, float(len(batch.predicted))), between=between)
        drawn = {"kl_teacher": -float(apart[own].mean())} if own.any() else {}
        unread = {"unread": float(batch.per_sequence["unread"].mean())}
        row = {name: float(value) for name, value in sums.items()}
        return row | drawn | unread | self.engine.optim_step(step / self.spec.train.steps)

    def state(self) -> dict[str, Any]:
        """The optimizer, and the teacher where its weights change."""
        moves = self.spec.teacher.refresh is not None
        return {"engine": self.engine.state(), "teacher": self.teacher.state() if moves else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; the student's own weights are in the checkpoint's model."""
        self.engine.load_state(state["engine"])
        if state["teacher"] is not None:
            self.teacher.learn(state["teacher"])


def silence(groups: Sequence[Group], row: dict[str, float]) -> str | None:
    """Why nothing is learned in this step, where nothing is; rewards have no part in it."""
    if row.get("grad_norm") == 0.0:
        return "the gradient is 0: the student says what the teacher says"
    return None


def own_lessons(groups: Sequence[Group], teacher: Teacher) -> list[Lesson]:
    """What the student wrote, after the prompt that each of the two reads."""
    found = []
    for group in groups:
        read = teacher.prompt_of(group.problem)
        for one in group.trajectories:
            # The first turn begins where the prompt ends; a workflow that names no turns began at its first draw.
            begin = one.turns[0][0] if one.turns else one.loss_mask.index(True) if one.drawn else len(one.tokens)
            prompt = one.tokens[:begin] if read is None else read
            mask = tuple(d and np.isfinite(x) for d, x in zip(one.loss_mask, one.logprobs, strict=True))
            answer = one.tokens[begin:]
            found.append(Lesson(one.tokens, prompt + answer, len(answer), mask[begin:], one.logprobs[begin:]))
    return found


def given_lessons(examples: Sequence[Example]) -> list[Lesson]:
    """Answers of somebody else, which both read alike."""
    found = []
    for example in examples:
        tokens = tuple(example.tokens.tolist())
        loss = np.ones(len(tokens), bool) if example.loss is None else example.loss
        found.append(Lesson(tokens, tokens, len(tokens) - 1, tuple(loss[1:].tolist()), None))
    return found


def with_teacher(
    lessons: Sequence[Lesson], teacher: Teacher, *, micro_tokens: int, temperature: float, hidden: bool
) -> Batch:
    """The lessons as the student reads them, packed. What the teacher cannot read is not trained on.

    Per token: `own`, 1 where the student drew it and it is trained on; `behaviour`, its log-probability then;
    `teacher`, the teacher's; `advantages`, what the teacher says more, 0 for given tokens; and, with `hidden`, the
    teacher's hidden states (T, D) from which it is predicted: D numbers a token, where a distribution has V. Per
    sequence: `unread`, 1 where the teacher cannot read it.
    """
    read = [teacher.reads(lesson.teacher) for lesson in lessons]
    if not any(read):
        raise PalestraError(
            f"the teacher can read none of the {len(lessons)} answers of this batch: it reads "
            f"{teacher.model.shape.context} tokens. Shorten teacher.prompt or rollout.max_new_tokens"
        )
    batch = Batch.pack(
        [lesson.student for lesson in lessons],
        [_row(lesson, len(lesson.student), lesson.mask, here) for lesson, here in zip(lessons, read, strict=True)],
        per_token={
            "behaviour": [_row(lesson, len(lesson.student), lesson.behaviour, True) for lesson in lessons],
            "own": [_row(lesson, len(lesson.student), lesson.mask, lesson.behaviour is not None) for lesson in lessons],
        },
        per_sequence={"unread": [not here for here in read]},
    )
    readable = [lesson for lesson, here in zip(lessons, read, strict=True) if here]
    theirs = Batch.pack(
        [lesson.teacher for lesson in readable],
        [_row(lesson, len(lesson.teacher), lesson.mask, True) for lesson in readable],
    )
    said = teacher.read(theirs, micro_tokens=micro_tokens, temperature=temperature, hidden=hidden)
    trained = batch.predicted
    if len(said.logprobs) != len(trained):
        raise ValueError(f"the teacher was asked about {len(said.logprobs)} tokens, the student about {len(trained)}")
    held = torch.zeros(len(batch.tokens)).index_copy(0, trained, said.logprobs)
    own = batch.per_token["own"] * batch.loss_mask
    apart = -kl.k1(batch.per_token["behaviour"], held, clamp=LOG_RATIO_LIMIT)
    added = {"own": own, "teacher": held, "advantages": torch.where(own > 0, apart, 0.0)}
    if said.hidden is not None:
        states = said.hidden.new_zeros(len(batch.tokens), said.hidden.shape[1])
        added["hidden"] = states.index_copy(0, trained, said.hidden)
    return replace(batch, per_token={**batch.per_token, **added})


def _row(lesson: Lesson, length: int, values: Sequence[float] | None, here: bool) -> np.ndarray:
    """(length) FP32: values of the tokens that may be trained on, 0 for the prompt before them; 0 where not `here`."""
    row = np.zeros(length, np.float32)
    if here and values is not None and lesson.trained:
        found = np.asarray(values, np.float32)
        row[-lesson.trained :] = np.where(np.isfinite(found), found, 0.0)
    return row


def policy_loss(spec: PolicyLossSpec, temperature: float) -> LossFunction:
    """The policy gradient of the reverse KL at each token, with nothing said of the tokens after it.

    With x = log π(y) - log q(y), a constant, the gradient is w · x · ∇ log π(y), whose expectation over y from π is
    ∇ KL(π‖q). The weights w = π / behaviour make up for answers by older weights; the value is w · x, k1 of the KL.
    """

    def loss(model: Transformer, batch: Batch) -> Loss:
        scored = score(model, batch, temperature=temperature)
        found = policy_terms(scored.logprobs, batch.per_token["behaviour"], batch.per_token["teacher"], spec.limit)
        total = torch.where(batch.loss_mask > 0, found, 0.0).sum()
        return Loss(total, {"entropy": scored.entropy.detach().sum()}, router_terms(model, scored.router, batch))

    return loss


def policy_terms(logprobs: Tensor, behaviour: Tensor, teacher: Tensor, limit: float | None) -> Tensor:
    """w · x at each token (T), its gradient w · x · ∇ log π; `limit` bounds the weights from above."""
    now, most = logprobs.detach(), LOG_RATIO_LIMIT if limit is None else math.log(limit)
    weights = (now - behaviour).clamp(-LOG_RATIO_LIMIT, min(most, LOG_RATIO_LIMIT)).exp()
    return weights * kl.k1(now, teacher, clamp=LOG_RATIO_LIMIT) * (1.0 + logprobs - now)


def divergence_loss(spec: DivergenceSpec, teacher: Transformer) -> LossFunction:
    """The divergence of both whole distributions at every trained token, summed (GKD, arXiv 2306.13649, eq. 2)."""
    measure = measure_of(spec)

    def loss(model: Transformer, batch: Batch) -> Loss:
        output = forward(model, batch)
        asked = batch.predicted  # never the first of a sequence
        found, entropies = token_divergences(
            output.hidden.index_select(0, asked - 1),
            model.unembed,
            batch.per_token["hidden"].index_select(0, asked),
            teacher.unembed,
            measure,
            spec.temperature,
        )
        return Loss(found.sum(), {"entropy": entropies.sum()}, router_terms(model, output.router, batch))

    return loss
