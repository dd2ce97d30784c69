"""The loop of post-training as one would write it first: answer, judge, learn, publish, one after the other."""

from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from palestra.data.chat import end_of_turn
from palestra.data.mixture import permutation, stream_key
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import open_model
from palestra.lm.batch import Batch
from palestra.lm.engine import TrainEngine, logprobs
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.batch import denominator, informative, pack, with_advantages
from palestra.posttrain.loss import policy_loss
from palestra.rollout.episode import trajectory
from palestra.rollout.types import Group
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.stream import Prompts
from palestra.tasks.task import Completion, make_task


def plain_loop(
    spec: PosttrainSpec, folder: Path, seed: int = 0
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """For each step its groups and its loss; and the last weights."""
    (found, tokenizer), train, rollout, algorithm = open_model(folder), spec.train, spec.rollout, spec.algorithm
    optimizer = Optimizer(found.model, spec.optim, train.steps * train.epochs * train.minibatches)
    learner = TrainEngine(found.model, optimizer, Ranks(), micro_tokens=train.micro_tokens, flops_per_token=1.0)
    ends = frozenset({*found.eos, end_of_turn(tokenizer)})  # a model that chats may also end its turn
    reference = deepcopy(found.model)
    writer = Engine(deepcopy(found.model), eos=ends, tokenizer=tokenizer)
    use, longest, updates = spec.tasks.train[0], rollout.max_new_tokens, 0
    task = make_task(use.task, use.args, use.label)
    prompts, number, rows = Prompts(spec.tasks, {use.label: task}, seed), 0, []
    for step in range(train.steps):
        groups, filtered, losses = [], [], []
        while len(groups) < train.prompts_per_step:
            problem = prompts.sample(number)
            asked = tuple(tokenizer.encode_prompt(str(problem.prompt)))
            draws = stream_key(stream_key(seed, "rollout", number, 0), "turn", 0, 0) >> 1
            sampling = Sampling(rollout.temperature, max_new_tokens=longest, stop=task.stops, seed=draws)
            (answers,) = writer.run([Request(asked, sampling, rollout.group)])
            said = [
                trajectory(asked, one, task.verify(problem, Completion(one.text or ""))) for one in answers.generations
            ]
            group = Group(number, problem, step, tuple(said), rollout.group)
            same = algorithm.filters.zero_variance and len(set(group.rewards)) == 1
            (filtered if same else groups).append(group)
            number += 1
        batch = pack(groups, algorithm)
        anchor = learner.logprobs(batch, temperature=rollout.temperature) if algorithm.needs_anchor else None
        held = _scored(reference, batch, spec) if algorithm.needs_reference else None
        batch = with_advantages(batch, algorithm, max_new_tokens=longest, anchor=anchor, reference=held)
        for epoch in range(train.epochs):
            for part in _minibatches(batch, train.minibatches, stream_key(seed, "minibatches", step, epoch)):
                loss = policy_loss(algorithm, rollout.temperature)
                sums = learner.forward_backward(
                    informative(part, algorithm), loss, denominator(part, algorithm, longest)
                )
                learner.optim_step(updates / (train.steps * train.epochs * train.minibatches))
                losses, updates = [*losses, float(sums["loss"])], updates + 1
        writer.publish(learner.weights(), step + 1)
        rows.append({"groups": groups, "filtered": filtered, "loss": fmean(losses), "batch": batch})
    return rows, learner.weights()


def _scored(model: Transformer, batch: Batch, spec: PosttrainSpec) -> torch.Tensor:
    return logprobs(model, batch, micro_tokens=spec.train.micro_tokens, temperature=spec.rollout.temperature)


def _minibatches(batch: Batch, parts: int, key: int) -> list[Batch]:
    """The batch cut by prompts, drawn anew each epoch."""
    if parts == 1:
        return [batch]
    owner = [int(group) for group in batch.per_sequence["group"]]
    prompts = max(owner) + 1
    order = permutation(prompts, key).tolist()
    cuts = [{order[i] for i in range(prompts) if i * parts // prompts == part} for part in range(parts)]
    return [batch.select([i for i, group in enumerate(owner) if group in cut]) for cut in cuts]
