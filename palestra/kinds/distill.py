"""The kind `distill`: a language model that learns from what a teacher says of its answers."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from palestra.data.mixture import Mixture
from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds.lm import check_data
from palestra.kinds.models import Start, build_model, device_of, find_model, keep_start, open_model
from palestra.kinds.posttrain import assemble, run_tasks, run_tasks_session
from palestra.kinds.trial import Launch
from palestra.lm.datasets import Data, chat_data, mixture_of
from palestra.lm.engine import TrainEngine, compile_for_training
from palestra.lm.hf import empty_model, has_tokenizer, read_folder
from palestra.lm.hf_config import is_classifier
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.distill import Distiller, Teacher, privileged, silence
from palestra.posttrain.trainer import PosttrainParts
from palestra.rollout.episode import encode_problem
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.distill import DistillSpec
from palestra.tasks.task import Problem, make_task

FIXED = ("kind", "model", "teacher", "tasks.train", "tasks.mix", "on_policy", "data", "optim.name",
         "train.prompts_per_step", "rollout.replay")  # fmt: skip
"""What checkpoints depend on."""
TEACHER = "teacher.json"

log = logging.getLogger("palestra.posttrain")


def run(spec: DistillSpec, launch: Launch) -> Run:
    """Train every seed of the spec, then summarize and plot the trial."""
    folder = _teacher_folder(spec, launch)

    def check(start: Start) -> None:
        if folder is not None:
            check_teacher(folder, start.tokenizer)
            keep_start(str(folder))
        _given(spec, start, spec.seed)
        if spec.teacher.prompt is not None:
            for problem in _firsts(spec):
                encode_problem(privileged(problem, spec.teacher.prompt), start.tokenizer)

    return run_tasks(spec, launch, partial(run_session, teacher=folder), FIXED, check)


def run_session(folder: Path, launch: Launch, teacher: Path | None) -> None:
    """Train the one seed whose session folder this is, with the teacher in a folder, or itself for one."""
    run_tasks_session(folder, launch, partial(_parts, folder=teacher))


def check_teacher(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse a teacher that cannot say anything about the student's tokens."""
    found = find_model(folder)
    config, _ = read_folder(found.weights)
    if is_classifier(config):
        raise UsageError(f"teacher.init: {folder} is a reward model, which scores whole answers and no tokens")
    if not has_tokenizer(found.tokenizer):
        raise UsageError(f"teacher.init: {folder} has no tokenizer to compare with the student's")
    theirs = Tokenizer.load(found.tokenizer)
    if theirs.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"teacher.init: {folder} has another tokenizer than the student: theirs is {theirs.name} with "
            f"{theirs.vocab_size} tokens, the student's {tokenizer.name} with {tokenizer.vocab_size}. A teacher scores "
            "the student's own tokens: take one with the same tokenizer"
        )


def _teacher_folder(spec: DistillSpec, launch: Launch) -> Path | None:
    """The very model that `teacher.init` meant when the trial began; None where the student teaches itself."""
    if spec.teacher.init is None:
        return None
    begun = [] if launch.resume is None else [one.path / TEACHER for one in launch.resume.sessions()]
    pinned = next((read_json(path)["model"] for path in begun if path.exists()), None)
    return find_model(pinned or spec.teacher.init, launch.root).folder.absolute()


def _parts(
    spec: DistillSpec, session: Session, start: Start, launch: Launch, stack: ExitStack, folder: Path | None
) -> PosttrainParts:
    model = build_model(spec, start, session.seed, device_of(spec))
    compile_for_training(model, spec.train, model.embed.device)
    engine = TrainEngine(
        model,
        Optimizer(model, spec.optim, spec.train.steps),
        Ranks(),
        micro_tokens=spec.train.micro_tokens,
        flops_per_token=start.shape.flops_per_token(spec.rollout.max_new_tokens),
    )
    given = _given(spec, start, session.seed)
    if given is not None:
        check_data(session, given[0], start)
    teacher = _teacher(spec, session, start, engine, folder)
    learner = Distiller(spec, engine, teacher, None if given is None else given[1])
    parts = assemble(spec, session, start, launch, stack, learner, prompts=spec.answered)

    def introduce() -> dict[str, float]:
        found = parts.introduce()
        tokens = teacher.prompt_of(_firsts(spec)[0])
        if tokens is not None:
            shown = start.tokenizer.decode(tokens, specials=True)
            log.info("the teacher reads in its place, %d tokens:\n%s", len(tokens), shown)
        return found

    return replace(parts, introduce=introduce, silence=silence)


def _teacher(spec: DistillSpec, session: Session, start: Start, engine: TrainEngine, folder: Path | None) -> Teacher:
    """The model in a folder, which is written down at the first start, or a copy of the student as it starts."""
    dtype, device = engine.transformer.dtype, engine.device
    if folder is None:
        model = empty_model(start.shape, dtype, dtype, device)
        model.load_state_dict(engine.weights())
    else:
        path = session.path / TEACHER
        if not path.exists():
            write_json(path, {"model": str(folder)})
        check_teacher(Path(read_json(path)["model"]), start.tokenizer)
        loaded, _ = open_model(read_json(path)["model"], dtype=dtype, param_dtype=dtype, device=device)
        model = loaded.model
    return Teacher(model, start.tokenizer, prompt=spec.teacher.prompt)


def _given(spec: DistillSpec, start: Start, seed: int) -> tuple[Data[Example], Mixture[Example]] | None:
    """The answers that the student does not write itself, and their order."""
    if spec.data is None:
        return None
    if spec.data.context > start.shape.context:
        raise UsageError(
            f"data.context: {spec.data.context} tokens are more than the {start.shape.context} that the student reads"
        )
    data = chat_data(spec.data, start.tokenizer_folder)
    return data, mixture_of(data, spec.data, batch=spec.given, steps=spec.train.steps, seed=seed)


def _firsts(spec: DistillSpec) -> list[Problem]:
    """The first problem of each task to train on."""
    return [make_task(use.task, use.args, use.label).problems(use.split)[0] for use in spec.tasks.train]
