"""The kind `evaluate`: how good a model is at tasks, and how likely it finds given answers."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from palestra.errors import Interrupted, UsageError
from palestra.evaluate.completions import Evaluation, Questions, ask, evaluate_model
from palestra.evaluate.likelihood import (
    ScoredChoice,
    TextScore,
    likelihood_metrics,
    likelihood_outcome,
    score_choices,
    score_texts,
    text_metrics,
    text_outcome,
)
from palestra.evaluate.likelihood_data import Choices, ScoredSet, Texts, load_choices, load_texts
from palestra.evaluate.records import EvaluationRecord, growing, json_lines, line, read_records, write_records
from palestra.evaluate.suites import SETUP, check_setup, files_sha256, write_report
from palestra.kinds.lm import summary
from palestra.kinds.models import Start, device_of, find_model, named_dtype, open_model, trained_start
from palestra.kinds.trial import Launch, run_sessions
from palestra.lm.hf import weight_files
from palestra.lm.lora import CONFIG, WEIGHTS
from palestra.lm.model import Transformer
from palestra.runs.recorder import Moment, Recorder, call_hooks, load_hooks
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_bytes
from palestra.spec.kinds.evaluate import EvaluateSpec
from palestra.spec.lm import ModelSpec
from palestra.spec.load import resolved
from palestra.spec.shape import precision
from palestra.tasks.verify.workers import Verifiers
from palestra.track.sinks import require_sinks

log = logging.getLogger("palestra.evaluate")

ANSWERS, SCORES, TEXTS = "answers.jsonl", "likelihood.jsonl", "texts.jsonl"
FIXED = ("kind", "model", "tasks", "eval", "likelihood", "texts", "dtype")
"""What answers depend on."""


@dataclass(frozen=True)
class Asked:
    """What is asked of which model; known before its weights are read."""

    start: Start
    questions: list[Questions]
    suites: list[Choices]
    texts: list[Texts]
    modes: int
    """Ways of decoding: greedy, samples, or both."""

    @property
    def count(self) -> int:
        """Problems in each mode, rows with given answers, and documents."""
        rows = sum(len(one.items) for one in self.suites) + sum(len(one.items) for one in self.texts)
        return self.modes * sum(len(one.questions) for one in self.questions) + rows


def run(spec: EvaluateSpec, launch: Launch) -> Run:
    """Evaluate with every seed of the spec, then summarize."""
    device = device_of(spec)
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)
    launch = replace(launch, init=str(_model_folder(spec, launch)))
    # A spec that cannot run ends here, before it has a folder.
    with Verifiers(spec.tasks, root=launch.root) as judges:
        asked = _asked(spec, launch, judges, spec.seed)
    trial = run_sessions(
        spec,
        launch,
        run_session,
        fixed=FIXED,
        threads=spec.threads or max(1, (os.cpu_count() or 1) // (1 if device.type == "cuda" else spec.max_session)),
        total=asked.count,
        unit="steps",
    )
    trial.trial.write_summary(summary(trial))
    return trial


def load(run: Run, which: str = "best") -> Any:
    """An evaluation has trained nothing."""
    raise UsageError(f"{run.path} is an evaluation: load the model that it evaluated, {run.spec['model']['init']}")


def run_session(folder: Path, launch: Launch) -> None:
    """Evaluate with the one seed whose session folder this is, from where an earlier process was stopped."""
    session = Session.open(folder)
    spec = resolved(launch.spec)
    assert isinstance(spec, EvaluateSpec)
    threads = torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        with session, ExitStack() as stack:
            session.restore()
            judges = stack.enter_context(Verifiers(spec.tasks, workers=spec.eval.verifiers, root=launch.root))
            asked = _asked(spec, launch, judges, session.seed)
            setup = check_setup(session.path, _setup(spec, asked, launch, session.seed))
            record = stack.enter_context(Recorder(session, spec, total=asked.count, unit="problems", show=launch.show))
            _Evaluating(spec, session, launch, asked, judges, record).run(setup)
    finally:
        torch.set_num_threads(threads)


class _Evaluating:
    """One session at work: counts what is done, and stops when it is asked to."""

    def __init__(
        self,
        spec: EvaluateSpec,
        session: Session,
        launch: Launch,
        asked: Asked,
        judges: Verifiers,
        record: Recorder,
    ):
        self.spec, self.session, self.launch, self.asked = spec, session, launch, asked
        self.judges, self.record, self.done = judges, record, 0

    def run(self, setup: dict[str, Any]) -> None:
        """All of it; the report comes last."""
        dtype, start = _dtype(self.spec), self.asked.start
        assert start.folder is not None
        for one in self.asked.questions:
            prompt = setup["tasks"][one.label]
            shown = (one.label, len(prompt["first_prompt_tokens"]), prompt["first_prompt"])
            log.info("the first prompt of %s, %d tokens:\n%s", *shown)
        loaded, _ = open_model(start.folder, self.launch.root, dtype=named_dtype(dtype), param_dtype=named_dtype(dtype))
        model = loaded.model.to(device_of(self.spec))
        scored = self._scored(model, SCORES, self.asked.suites, ScoredChoice.read, score_choices)
        scores = {choices.label: likelihood_outcome(choices, scored[choices.label]) for choices in self.asked.suites}
        scored = self._scored(model, TEXTS, self.asked.texts, lambda row: TextScore(**row), score_texts)
        texts = {source.label: text_outcome(source, scored[source.label]) for source in self.asked.texts}
        # Back on the CPU: the engine makes its own copy on the device, and takes what that leaves free for its cache.
        model = model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        evaluation = self._answers(model) if self.asked.questions else Evaluation((), {}, {})
        metrics = evaluation.metrics | likelihood_metrics(scores) | text_metrics(texts)
        write_report(self.session.path, setup, evaluation, scores, texts, metrics)
        if evaluation.records:  # in the order of the problems, not in that of their ends
            write_records(self.session.path / ANSWERS, evaluation.records)
        call_hooks(load_hooks(self.spec.hooks), Moment(self.done, self.done, metrics, model, self.session.path))
        headline = [
            "eval/accuracy",
            *(f"eval/pass@{k}" for k in self.spec.eval.k),
            "eval/centred",
            "eval/bits_per_byte",
        ]
        self.record.row(metrics, {"steps": self.done, "problems": self.done}, headline=headline)

    def _scored(
        self,
        model: Transformer,
        file: str,
        sets: Sequence[ScoredSet[Any, Any]],
        read: Callable[[Mapping[str, Any]], Any],
        score: Callable[..., list[Any]],
    ) -> dict[str, list[Any]]:
        """The scores of the items of each set; those of an earlier process are in the file, which grows by chunks."""
        if not sets:
            return {}
        path, scores, before = self.session.path / file, {}, self.done
        done = [read(row) for row in json_lines(path)]
        with self.record.span(path.stem), growing(path, map(_scored_line, done)) as append:

            def keep(chunk: Sequence[Any]) -> None:
                append("".join(map(_scored_line, chunk)))
                self._tell(self.done + len(chunk))
                self._look()

            for source in sets:
                self._look()
                scores[source.label] = score(model, self.asked.start.tokenizer, source, done=done, keep=keep)
                before += len(source.items)
                self._tell(before)
        # Once each, and in order: a chunk that a kill cut in two was scored again.
        write_bytes(path, "".join(_scored_line(row) for rows in scores.values() for row in rows).encode())
        return scores

    def _answers(self, model: Transformer) -> Evaluation:
        path, start = self.session.path / ANSWERS, self.asked.start
        # A judge that failed may have been out of memory: it is asked again.
        done = [record for record in read_records(path) if not record.failed]
        self._tell(self.done + len(done))
        with self.record.span("answers"), growing(path, map(line, done)) as append:

            def keep(record: EvaluationRecord) -> None:
                append(line(record))
                self._tell(self.done + 1)

            return evaluate_model(
                model,
                start.tokenizer,
                start.eos,
                self.judges.verify,
                self.asked.questions,
                self.spec.eval,
                device=device_of(self.spec),
                dtype=named_dtype(_dtype(self.spec)),
                seed=self.session.seed,
                done=done,
                keep=keep,
                look=self._look,
            )

    def _tell(self, done: int) -> None:
        self.done = done
        self.record.progress.update(self.done)
        self.session.progress(step=self.done)

    def _look(self) -> None:
        if self.session.stop_requested:
            raise Interrupted(
                f"stopped after {self.done} of {self.asked.count} with everything saved; continue with: "
                f"palestra train --resume {self.session.path.parent.parent}"
            )


def _dtype(spec: EvaluateSpec) -> str:
    return precision(spec.dtype, device_of(spec).type)


def _asked(spec: EvaluateSpec, launch: Launch, judges: Verifiers, seed: int) -> Asked:
    model = ModelSpec(init=launch.init, chat_template=spec.model.chat_template)
    start = trained_start(model, launch.root, chat=True)  # as in training, so that answers end at the same tokens
    questions = ask(spec.tasks, judges.tasks, start.tokenizer, spec.eval.problems)
    suites = [load_choices(use, seed) for use in spec.likelihood]
    texts = [load_texts(use) for use in spec.texts]
    return Asked(start, questions, suites, texts, spec.eval.greedy + bool(spec.eval.samples))


def _setup(spec: EvaluateSpec, asked: Asked, launch: Launch, seed: int) -> dict[str, Any]:
    """All that makes the numbers comparable with others; plain data."""
    start, decoding = asked.start, spec.eval.model_dump(mode="json", exclude={"problems", "verifiers"})
    model = {
        "init": spec.model.init,
        "folder": launch.init,
        "sha256": files_sha256(_weights(str(launch.init), launch.root)),
        "tokenizer_sha256": start.tokenizer.fingerprint,
        "chat_template": start.tokenizer.chat_template if any(one.chat for one in asked.questions) else None,
        "end_tokens": list(start.eos),
        "context": start.shape.context,
        "dtype": _dtype(spec),
        "device": device_of(spec).type,
    }
    return {
        "model": model,
        "decoding": {**decoding, "top_p": 1.0, "top_k": None, "estimator": "1 - C(n-c, k) / C(n, k)"},
        "seed": seed,
        "tasks": {one.label: one.identity(start.tokenizer) for one in asked.questions},
        "likelihood": {suite.label: suite.identity() for suite in asked.suites},
        "texts": {texts.label: texts.identity() for texts in asked.texts},
    }


def _model_folder(spec: EvaluateSpec, launch: Launch) -> Path:
    """The very model that was meant when the trial began: a name goes on to newer runs."""
    begun = [] if launch.resume is None else [one.path / SETUP for one in launch.resume.sessions()]
    pinned = next((read_json(path)["model"]["folder"] for path in begun if path.exists()), None)
    return find_model(pinned or spec.model.init, launch.root).folder.absolute()


def _weights(folder: str, root: Path) -> list[Path]:
    """The files of a model's config and weights, and of the models below it where these are adapters."""
    found, paths = find_model(folder, root), []
    while found.base is not None:
        paths += [found.folder / CONFIG, found.folder / WEIGHTS]
        found = find_model(found.base, root)
    return [*paths, *(found.folder / name for name in ("config.json", *weight_files(found.folder)))]


def _scored_line(scored: ScoredChoice | TextScore) -> str:
    return json.dumps(asdict(scored)) + "\n"
