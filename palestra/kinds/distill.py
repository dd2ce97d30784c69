"""The kind `distill`: a language model trained on a teacher's distributions over its completions."""

import logging
from functools import partial
from pathlib import Path

from palestra.data.mixture import Mixture
from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds import models
from palestra.kinds.lm import check_data
from palestra.kinds.models import Start
from palestra.kinds.posttrain import run_tasks, train_engine
from palestra.kinds.trial import Launch, device_of
from palestra.lm.datasets import Data, chat_data, mixture_of
from palestra.lm.engine import TrainEngine
from palestra.lm.hf import has_tokenizer
from palestra.lm.hf_config import is_classifier, read_folder
from palestra.lm.ranks import Ranks
from palestra.posttrain.distill import Distiller, Teacher, privileged
from palestra.rollout.episode import encode_problem
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.distill import DistillSpec
from palestra.tasks.task import Problem, make_task

FIXED = ("kind", "model", "teacher", "tasks.train", "tasks.mix", "on_policy", "data", "optim.name", "optim.state",
         "train.prompts_per_step", "train.weights", "rollout.replay")  # fmt: skip
"""What checkpoints depend on."""
TEACHER = "teacher.json"

log = logging.getLogger("palestra.posttrain")


def run(spec: DistillSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial."""
    folder = None if spec.teacher.init is None else models.pinned_model(spec.teacher.init, launch, TEACHER)

    def check(start: Start) -> None:
        if start.shape.vision is not None:
            raise UsageError("model.init: it reads images, and distillation trains on text alone: use kind posttrain")
        if folder is not None:
            check_teacher(folder, start.tokenizer)
            models.keep_start(str(folder))
        _given(spec, start, spec.seed)
        if spec.teacher.prompt is not None:
            for problem in _firsts(spec):
                encode_problem(privileged(problem, spec.teacher.prompt), start.tokenizer)

    return run_tasks(spec, launch, partial(_learner, folder), FIXED, check)


def check_teacher(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that cannot score the student's tokens."""
    model = models.find_model(folder)
    config, _ = read_folder(model.weights)
    if is_classifier(config):
        raise UsageError(f"teacher.init: {folder} is a reward model, which does not score single tokens")
    if not has_tokenizer(model.tokenizer):
        raise UsageError(f"teacher.init: {folder} has no tokenizer to compare with the student's")
    theirs = Tokenizer.load(model.tokenizer)
    if theirs.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"teacher.init: {folder} has another tokenizer than the student: {theirs.name} with {theirs.vocab_size} "
            f"tokens, the student's is {tokenizer.name} with {tokenizer.vocab_size}. A teacher scores the student's "
            "own tokens: use one with the same tokenizer"
        )


def _learner(folder: Path | None, spec: DistillSpec, session: Session, start: Start, ranks: Ranks) -> Distiller:
    model = models.build_model(spec, start, session.seed, device_of(spec), ranks)
    engine = train_engine(spec, start, model, spec.train.steps, session.seed, ranks)
    given = _given(spec, start, session.seed)
    if given is not None and ranks.first:
        check_data(session, given[0], start)
    teacher = _teacher(spec, session, start, engine, folder)
    if (tokens := teacher.prompt_of(_firsts(spec)[0])) is not None:
        shown = start.tokenizer.decode(tokens, specials=True)
        log.info("the teacher reads %d tokens instead of the first prompt:\n%s", len(tokens), shown)
    return Distiller(spec, engine, teacher, None if given is None else given[1])


def _teacher(spec: DistillSpec, session: Session, start: Start, engine: TrainEngine, folder: Path | None) -> Teacher:
    """The model in a folder, pinned at the first start, or a copy of the initial student."""
    dtype = engine.transformer.dtype
    if folder is None:
        model = models.model_copy(start, engine, engine.weights(), dtype)
    else:
        pinned = engine.ranks.on_first(lambda: _pinned(session.path / TEACHER, folder))
        check_teacher(pinned, start.tokenizer)
        model = models.open_model(pinned, dtype=dtype, param_dtype=dtype, device=engine.device)[0].model
    return Teacher(model, start.tokenizer, prompt=spec.teacher.prompt)


def _pinned(path: Path, folder: Path) -> Path:
    """The teacher's folder at the first start."""
    if not path.exists():
        write_json(path, {"model": str(folder)})
    return Path(read_json(path)["model"])


def _given(spec: DistillSpec, start: Start, seed: int) -> tuple[Data[Example], Mixture[Example]] | None:
    """The given completions, and their order."""
    if spec.data is None:
        return None
    models.check_context("data.context", spec.data.context, start, "the student")
    data = chat_data(spec.data, start.tokenizer_folder)
    return data, mixture_of(data, spec.data, batch=spec.given, steps=spec.train.steps, seed=seed)


def _firsts(spec: DistillSpec) -> list[Problem]:
    """The first problem of each task to train on."""
    return [make_task(use.task, use.args, use.label).part(use.split)[0] for use in spec.tasks.train]
