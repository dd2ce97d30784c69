"""What the kinds of language-model training share: model, tokenizer, engine, checkpoints and samples put together."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from palestra.data.example import Example
from palestra.errors import UsageError
from palestra.generate.language_model import LanguageModel
from palestra.kinds.keeper import Keeper, scored_model
from palestra.kinds.models import open_model
from palestra.kinds.samples import Samples, sample_prompts
from palestra.kinds.start import (
    Start,
    build_model,
    device_of,
    keep_start,
    settled,
    start_of,
    starting_from,
    with_model,
)
from palestra.kinds.suites import Suites, check_suites
from palestra.kinds.together import check_ranks, done, follow, following, threads_each, together
from palestra.kinds.trial import Launch, run_sessions
from palestra.lm.compiling import compile_cache, compile_for_training
from palestra.lm.datasets import Data, bytes_of_tokens, mixture_of
from palestra.lm.engine import TrainEngine
from palestra.lm.model import Transformer
from palestra.lm.next_token import NextToken
from palestra.lm.optim import Ema, Optimiser
from palestra.lm.ranks import Ranks
from palestra.lm.trainer import Objective, train
from palestra.runs.plot import trial_plots
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.lm import LmSpec, WritingSpec
from palestra.spec.load import resolved
from palestra.spec.plain import plain
from palestra.spec.suites import SuiteUse
from palestra.track.hooks import load_hooks
from palestra.track.sinks import require_sinks

CONTENTS = "data.json"

Prepare = Callable[[Any, Start], Any]
"""The data of a spec, ready to be read."""
MakeObjective = Callable[[Any, Start, Any, int, Transformer], Objective]
"""What a spec trains for: with its data, its seed and its model as it starts."""


def run_lm(spec: LmSpec, launch: Launch, session: Callable[[Path, Launch], None], prepare: Prepare) -> Run:
    """Train every seed of the spec, then summarise and plot the trial. Under `torchrun`, all ranks call it."""
    device = device_of(spec)
    ranks = Ranks.join(device)
    check_ranks(spec, ranks, device)
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)
    if not ranks.first:
        return follow(session, ranks, replace(launch, spec=plain(spec)))
    launch = with_model(spec, launch)
    # A spec that cannot run ends here, before it has a folder.
    meant = starting_from(spec, launch.init)
    start = start_of(meant, launch.root)
    mixture_of(prepare(meant, start), spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=spec.seed)
    sample_prompts(meant, start)
    check_suites(_suites(spec), start, launch.root)
    keep_start(launch.init)
    threads = threads_each(spec, device)
    trial = run_sessions(
        spec,
        launch,
        together(session, spec, ranks, threads),
        fixed=("kind", "model", "data", "optim.name", "train.batch", "train.ema"),
        threads=threads,
        total=spec.train.steps,
        unit="steps",
    )
    trial.trial.write_summary(summary(trial))
    with clear_write_errors(trial.path):
        trial_plots(trial)
    return done(ranks, trial)


def run_lm_session(
    folder: Path,
    launch: Launch,
    prepare: Prepare,
    make_objective: MakeObjective,
    *,
    scalar: bool = False,
) -> None:
    """Train the one seed whose session folder this is."""
    session = Session.open(folder)
    spec = resolved(launch.spec)
    assert isinstance(spec, LmSpec)
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
            data = prepare(spec, start)
            if ranks.first:
                check_data(session, data, start)
            model = build_model(spec, start, session.seed, device)
            objective = make_objective(spec, start, data, session.seed, model)
            trained = scored_model(model, start) if scalar else model
            ranks.shard(trained)
            compile_for_training(model, spec.train, device)
            keeper = Keeper(trained, start, ranks)
            engine = TrainEngine(
                trained,
                Optimiser(trained, spec.optim, spec.train.steps),
                ranks,
                micro_tokens=spec.train.micro_tokens,
                flops_per_token=start.shape.flops_per_token(spec.data.context),
                ema=None if spec.train.ema is None else Ema(trained, spec.train.ema),
            )
            sampler = Samples(spec, engine, start, session)
            suites = Suites(_suites(spec), engine, start, session, launch.root, stack)
            train(spec, session, engine, objective, keeper, sampler, suites, show=launch.show)
    finally:
        torch.set_num_threads(threads)


def next_token(spec: LmSpec, start: Start, found: Data[Example], seed: int, model: Transformer) -> NextToken:
    """The objective of the kinds that predict tokens: all of a text, or those of the assistant's turns."""
    return NextToken(
        mixture_of(found, spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=seed),
        found.evals,
        bytes_of_tokens(start.tokenizer, model.shape.vocab or 0),
        batch=spec.train.batch,
        eval_examples=spec.eval.examples,
    )


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


def load_lm(run: Run, which: str = "best") -> LanguageModel:
    """The model of a run's checkpoint, ready to write."""
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
