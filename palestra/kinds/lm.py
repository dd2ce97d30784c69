"""The kinds `pretrain`, `sft`, `dpo` and `reward_model`: each is its data and its objective; the rest is shared."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from palestra.data.mixture import Mixture
from palestra.errors import UsageError
from palestra.generate.local import LanguageModel
from palestra.kinds import models
from palestra.kinds.measures import Samples, Suites, check_suites, sample_prompts
from palestra.kinds.models import Start
from palestra.kinds.ranks import check_ranks, check_split, done, follow, following, joined, ranks_here, together
from palestra.kinds.trial import Launch, check_spec, device_of, in_session, run_sessions, threads_each
from palestra.lm.datasets import Data, bytes_of_tokens, chat_data, mixture_of, pair_data, text_data
from palestra.lm.engine import TrainEngine, compile_cache, compile_for_training
from palestra.lm.lora import frozen_copy
from palestra.lm.model import Transformer
from palestra.lm.objectives import NextToken, Preferences, dpo_loss, reward_loss
from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import Ranks
from palestra.lm.scorer import Scorer
from palestra.lm.trainer import LmParts, Objective, train
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.lm import DpoSpec, RewardModelSpec
from palestra.spec.lm import LmSpec, WritingSpec
from palestra.spec.model import plain
from palestra.spec.tasks import SuiteUse

CONTENTS = "data.json"
DATA: dict[str, Any] = {"pretrain": text_data, "sft": chat_data, "dpo": pair_data, "reward_model": pair_data}
"""By kind: the data of a spec, tokenized by the tokenizer in a folder."""


def run(spec: LmSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial. Under `torchrun`, all ranks call it."""
    device = device_of(spec)
    ranks = Ranks.join(device)
    check_ranks(spec, ranks, device)
    check_spec(spec)
    session = partial(in_session, run_session)
    if not ranks.first:
        return follow(session, ranks, replace(launch, spec=plain(spec)))
    launch = models.with_model(spec, launch)
    # A spec that cannot run is refused here, before it has a folder.
    pinned = models.starting_from(spec, launch.init)
    start = models.start_of(pinned, launch.root)
    check_split(spec, start.shape)
    _mixture(pinned, DATA[spec.kind](pinned.data, start.tokenizer_folder), spec.seed)
    sample_prompts(pinned, start)
    check_suites(_suites(spec), start, launch.root)
    models.keep_start(launch.init)
    threads = threads_each(spec, ranks_here(spec))
    trial = run_sessions(
        spec,
        launch,
        together(session, spec, ranks, threads),
        fixed=("kind", "model", "data", "optim.name", "optim.state", "train.batch", "train.ema", "train.weights"),
        threads=threads,
        total=spec.train.steps,
        unit="steps",
        summary=summary,
    )
    return done(ranks, trial)


def run_session(session: Session, spec: LmSpec, launch: Launch) -> None:
    """Train one seed."""
    device = device_of(spec)
    ranks = joined(spec, device)
    with ExitStack() as stack:
        stack.enter_context(session if ranks.first else following(session.path, ranks.rank))
        stack.enter_context(compile_cache(spec.train.compile_cache))
        spec = ranks.from_first(models.settled(spec, session, launch.init) if ranks.first else None)
        start = models.start_of(spec, launch.root)
        data = DATA[spec.kind](spec.data, start.tokenizer_folder)
        if ranks.first:
            check_data(session, data, start)
        model = models.build_model(spec, start, session.seed, device, ranks)
        objective = objective_of(spec, start, data, session.seed, model, ranks)
        trained = models.scored_model(model, start) if spec.kind == "reward_model" else model
        ranks.shard(trained)
        compile_for_training(model, spec.train, device)
        engine = TrainEngine(
            trained,
            Optimizer(trained, spec.optim, spec.train.steps, models.rounding_seed(spec, session.seed)),
            ranks,
            micro_tokens=spec.train.micro_tokens,
            flops_per_token=start.shape.flops_per_token(spec.data.context),
            ema=None if spec.train.ema is None else Ema(trained, spec.train.ema),
        )
        keeper = models.ModelCheckpoint(trained, start, ranks)
        sampler = Samples(spec, engine, start, session)
        suites = Suites(_suites(spec), engine, start, session, launch.root, stack)
        train(spec, session, LmParts(engine, objective, keeper, sampler, suites), show=launch.show)


def objective_of(spec: LmSpec, start: Start, data: Data, seed: int, model: Transformer, ranks: Ranks) -> Objective:
    """What a kind trains for, from its initial model, which is not split over the ranks yet."""
    mixture, sizes = _mixture(spec, data, seed), {"batch": spec.train.batch, "eval_examples": spec.eval.examples}
    if isinstance(spec, DpoSpec):  # the chosen completion more likely than the rejected one, relative to the reference
        reference = frozen_copy(model)
        ranks.shard(reference)
        return Preferences(mixture, data.evals, dpo_loss(spec.loss, reference), **sizes)
    if isinstance(spec, RewardModelSpec):  # a higher score for the chosen conversation
        return Preferences(mixture, data.evals, reward_loss(spec.loss), **sizes)
    # All tokens of a text, or those of the assistant's turns.
    return NextToken(mixture, data.evals, bytes_of_tokens(start.tokenizer, model.shape.vocab or 0), **sizes)


def _mixture(spec: LmSpec, data: Data, seed: int) -> Mixture:
    return mixture_of(data, spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=seed)


def _suites(spec: LmSpec) -> list[SuiteUse]:
    return spec.suites if isinstance(spec, WritingSpec) else []


def check_data(session: Session, data: Data, start: Start) -> None:
    """Refuse to resume with other data than the session started with; its fingerprint is written at the first start."""
    now = {"model.tokenizer": start.tokenizer.fingerprint, **data.contents}
    path = session.path / CONTENTS
    if not path.exists():
        write_json(path, now)
    before = read_json(path)
    changed = [field for field, content in now.items() if before.get(field) != content]
    if changed:
        raise UsageError(
            f"{' and '.join(changed)}: not what {session.path} was started with: a resumed run would train on other "
            "tokens. Restore the files as they were, or start a new run"
        )


def load(run: Run, which: str = "best") -> LanguageModel | Scorer:
    """The model of a run's checkpoint: a generator of text, or a scorer if it is a reward model."""
    if run.spec["kind"] == "reward_model":
        return Scorer.load(models.find_model(run.checkpoint(which)).folder)
    loaded, tokenizer = models.open_model(run.checkpoint(which), run.trial.path.parent.parent)
    return LanguageModel(loaded.model, tokenizer, frozenset(loaded.eos))


def summary(trial: Run) -> dict[str, Any]:
    """The last value of every metric of an evaluation or a suite: its mean over the seeds, and by seed."""
    numbers: dict[str, Any] = {}
    last = {seed: _last_evaluation(trial.metrics(seed)) for seed in trial.seeds}
    for metric in sorted({metric for row in last.values() for metric in row}):
        by_seed = {str(seed): row[metric] for seed, row in last.items() if metric in row}
        numbers |= {metric: fmean(by_seed.values()), f"{metric}_by_seed": by_seed}
    return numbers


def _last_evaluation(rows: list[dict[str, Any]]) -> dict[str, float]:
    evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
    last = {key: value for key, value in evaluated[-1].items() if key.startswith("eval/")} if evaluated else {}
    return last | {key: value for row in rows for key, value in row.items() if key.startswith("suite/")}
