"""The kinds `pretrain`, `sft`, `dpo` and `reward_model`: each is its data and its objective; the rest is shared."""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from palestra.data.mixture import Mixture
from palestra.errors import UsageError
from palestra.generate.local import LanguageModel
from palestra.kinds.measures import Samples, Suites, check_suites, sample_prompts
from palestra.kinds.models import (
    ModelCheckpoint,
    Start,
    build_model,
    device_of,
    find_model,
    keep_start,
    open_model,
    scored_model,
    settled,
    start_of,
    starting_from,
    with_model,
)
from palestra.kinds.ranks import check_ranks, done, follow, following, threads_each, together
from palestra.kinds.trial import Launch, run_sessions
from palestra.lm.datasets import Data, bytes_of_tokens, chat_data, mixture_of, pair_data, text_data
from palestra.lm.engine import TrainEngine, compile_cache, compile_for_training
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken, PairLoss, Preferences, dpo_loss, reward_loss
from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.scorer import Scorer
from palestra.lm.trainer import LmParts, Objective, train
from palestra.runs.plot import trial_plots
from palestra.runs.recorder import load_hooks
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.lm import DpoSpec, RewardModelSpec
from palestra.spec.lm import LmSpec, WritingSpec
from palestra.spec.load import resolved
from palestra.spec.model import plain
from palestra.spec.tasks import SuiteUse
from palestra.track.sinks import require_sinks

CONTENTS = "data.json"


@dataclass(frozen=True)
class Recipe:
    """What one kind trains on and for."""

    data: Callable[[Any, Path], Data]
    """The data of a spec, ready to be read, in the tokens of the tokenizer in this folder."""
    objective: Callable[[Any, Start, Data, int, Transformer], Objective]
    """What a spec trains for: with its data, its seed and its model as it starts."""
    scalar: bool = False
    """Whether the model ends in a scalar head."""


def run(spec: LmSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial. Under `torchrun`, all ranks call it."""
    device = device_of(spec)
    ranks = Ranks.join(device)
    check_ranks(spec, ranks, device)
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)
    if not ranks.first:
        return follow(run_session, ranks, replace(launch, spec=plain(spec)))
    launch = with_model(spec, launch)
    # A spec that cannot run ends here, before it has a folder.
    meant = starting_from(spec, launch.init)
    start = start_of(meant, launch.root)
    _mixture(meant, RECIPES[spec.kind].data(meant.data, start.tokenizer_folder), spec.seed)
    sample_prompts(meant, start)
    check_suites(_suites(spec), start, launch.root)
    keep_start(launch.init)
    threads = threads_each(spec, device)
    trial = run_sessions(
        spec,
        launch,
        together(run_session, spec, ranks, threads),
        fixed=("kind", "model", "data", "optim.name", "train.batch", "train.ema"),
        threads=threads,
        total=spec.train.steps,
        unit="steps",
    )
    trial.trial.write_summary(summary(trial))
    with clear_write_errors(trial.path):
        trial_plots(trial)
    return done(ranks, trial)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    session = Session.open(folder)
    spec = resolved(launch.spec)
    assert isinstance(spec, LmSpec)
    recipe = RECIPES[spec.kind]
    device = device_of(spec)
    ranks = Ranks.join(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        with ExitStack() as stack:
            stack.enter_context(session if ranks.first else following(folder, ranks.rank))
            stack.enter_context(compile_cache(spec.train.compile_cache))
            spec = ranks.from_first(settled(spec, session, launch.init) if ranks.first else None)
            start = start_of(spec, launch.root)
            data = recipe.data(spec.data, start.tokenizer_folder)
            if ranks.first:
                check_data(session, data, start)
            model = build_model(spec, start, session.seed, device)
            objective = recipe.objective(spec, start, data, session.seed, model)
            trained = scored_model(model, start) if recipe.scalar else model
            ranks.shard(trained)
            compile_for_training(model, spec.train, device)
            keeper = ModelCheckpoint(trained, start, ranks)
            engine = TrainEngine(
                trained,
                Optimizer(trained, spec.optim, spec.train.steps),
                ranks,
                micro_tokens=spec.train.micro_tokens,
                flops_per_token=start.shape.flops_per_token(spec.data.context),
                ema=None if spec.train.ema is None else Ema(trained, spec.train.ema),
            )
            sampler = Samples(spec, engine, start, session)
            suites = Suites(_suites(spec), engine, start, session, launch.root, stack)
            train(spec, session, LmParts(engine, objective, keeper, sampler, suites), show=launch.show)
    finally:
        torch.set_num_threads(threads)


def next_token(spec: LmSpec, start: Start, data: Data, seed: int, model: Transformer) -> NextToken:
    """All tokens of a text, or those of the assistant's turns."""
    known = bytes_of_tokens(start.tokenizer, model.shape.vocab or 0)
    return NextToken(
        _mixture(spec, data, seed), data.evals, known, batch=spec.train.batch, eval_examples=spec.eval.examples
    )


def dpo(spec: DpoSpec, start: Start, data: Data, seed: int, model: Transformer) -> Preferences:
    """The chosen completion more likely than the rejected one, relative to the reference model."""
    reference = deepcopy(model).requires_grad_(False).to(model.dtype)
    return _preferences(spec, data, seed, dpo_loss(spec.loss, reference))


def reward_model(spec: RewardModelSpec, start: Start, data: Data, seed: int, model: Transformer) -> Preferences:
    """A higher score for the chosen conversation."""
    return _preferences(spec, data, seed, reward_loss(spec.loss))


RECIPES = {
    "pretrain": Recipe(text_data, next_token),
    "sft": Recipe(chat_data, next_token),
    "dpo": Recipe(pair_data, dpo),
    "reward_model": Recipe(pair_data, reward_model, scalar=True),
}


def _preferences(spec: LmSpec, data: Data, seed: int, loss: PairLoss) -> Preferences:
    return Preferences(
        _mixture(spec, data, seed), data.evals, loss, batch=spec.train.batch, eval_examples=spec.eval.examples
    )


def _mixture(spec: LmSpec, data: Data, seed: int) -> Mixture:
    return mixture_of(data, spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=seed)


def _suites(spec: LmSpec) -> list[SuiteUse]:
    return spec.suites if isinstance(spec, WritingSpec) else []


def check_data(session: Session, data: Data, start: Start) -> None:
    """Refuse to go on with other data than the session began with, which are written down at its first start."""
    now = {"model.tokenizer": start.tokenizer.fingerprint, **data.contents}
    path = session.path / CONTENTS
    if not path.exists():
        write_json(path, now)
    before = read_json(path)
    changed = [place for place, content in now.items() if before.get(place) != content]
    if changed:
        raise UsageError(
            f"{' and '.join(changed)}: not what {session.path} was started with: resuming would train on other tokens. "
            "Restore the files as they were, or start a new run"
        )


def load(run: Run, which: str = "best") -> LanguageModel | Scorer:
    """The model of a run's checkpoint, ready to write, or where it is a reward model to score."""
    if run.spec["kind"] == "reward_model":
        return Scorer.load(find_model(run.checkpoint(which)).folder)
    loaded, tokenizer = open_model(run.checkpoint(which), run.trial.path.parent.parent)
    return LanguageModel(loaded.model, tokenizer, frozenset(loaded.eos))


def summary(trial: Run) -> dict[str, Any]:
    """The last value of every metric of an evaluation or a suite: its mean over the seeds, and by seed."""
    found: dict[str, Any] = {}
    last = {seed: _last_evaluation(trial.metrics(seed)) for seed in trial.seeds}
    for metric in sorted({metric for row in last.values() for metric in row}):
        by_seed = {str(seed): row[metric] for seed, row in last.items() if metric in row}
        found |= {metric: fmean(by_seed.values()), f"{metric}_by_seed": by_seed}
    return found


def _last_evaluation(rows: list[dict[str, Any]]) -> dict[str, float]:
    evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
    found = {key: value for key, value in evaluated[-1].items() if key.startswith("eval/")} if evaluated else {}
    return found | {key: value for row in rows for key, value in row.items() if key.startswith("suite/")}
