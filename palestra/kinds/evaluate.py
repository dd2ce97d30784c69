"""The kind `evaluate`: a model's accuracy on tasks and the likelihood it assigns to given answers and texts."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from palestra.errors import Interrupted, UsageError, needs_extra
from palestra.evaluate.completions import Evaluation, ask, evaluate_model, evaluate_tasks, pumped
from palestra.evaluate.leaks import leaks
from palestra.evaluate.likelihood import (
    ScoredChoice,
    TextScore,
    likelihood_metrics,
    likelihood_outcome,
    score_set,
    text_outcome,
)
from palestra.evaluate.likelihood_data import Choices, Texts, load_choices, load_texts
from palestra.evaluate.records import (
    Estimate,
    EvaluationRecord,
    estimated,
    growing,
    line,
    read_records,
    record_rows,
    usage,
    write_records,
)
from palestra.evaluate.suites import SETUP, Suite, check_setup, files_sha256, write_report
from palestra.kinds.lm import summary
from palestra.kinds.models import Start, find_model, named_dtype, open_model, pinned_model, trained_start
from palestra.kinds.trial import Launch, check_spec, device_of, in_session, run_sessions, threads_each
from palestra.lm.hf import weight_files
from palestra.lm.lora import CONFIG, WEIGHTS
from palestra.rollout.workflows import make_workflow
from palestra.runs.recorder import HookContext, Recorder, call_hooks, load_hooks
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import read_lines, write_bytes
from palestra.spec.generator import GeneratorSpec
from palestra.spec.kinds.evaluate import EvaluateSpec
from palestra.spec.lm import ModelSpec
from palestra.spec.shape import precision
from palestra.tasks.task import split_rows
from palestra.tasks.verify.workers import Verifiers

log = logging.getLogger("palestra.evaluate")

ANSWERS, SCORES, TEXTS, LM_EVAL = "answers.jsonl", "likelihood.jsonl", "texts.jsonl", "lm_eval.jsonl"
FIXED = ("kind", "model", "tasks", "eval", "likelihood", "texts", "lm_eval", "dtype", "generator.engine",
         "generator.model")  # fmt: skip
"""What results depend on."""
USAGE = "eval/usage/"
"""Before the names of what was counted, and of the cost."""

Score = TypeVar("Score", ScoredChoice, TextScore)


def run(spec: EvaluateSpec, launch: Launch) -> Run:
    """Evaluate with every seed of the spec, then summarize."""
    check_spec(spec)
    # Pinned by the setup that a session writes at its start.
    init = pinned_model(spec.model.init, launch, SETUP, lambda setup: setup["model"]["folder"])
    launch = replace(launch, init=str(init))
    # A spec that cannot run is refused here, before it has a folder.
    with Verifiers(spec.tasks, root=launch.root) as verifiers:
        start, suite = _opened(spec, launch, verifiers, spec.seed)
    for use in spec.lm_eval:
        _lm_eval().task_manager(use)
    if trained := [use.label for use in spec.tasks if split_rows(use.split)[0] == "train"]:
        log.warning("%s: the split that models are trained on is scored, which says little", ", ".join(trained))
    for leak in leaks(suite.questions, suite.choices, init):
        log.warning(leak)
    if spec.generator is not None:
        from palestra.kinds.engines import check_engines  # needs the extra `serve`

        check_engines(spec.generator, start)
    return run_sessions(
        spec,
        launch,
        partial(in_session, run_session),
        fixed=FIXED,
        threads=threads_each(spec),
        total=_count(suite),
        unit="steps",
        summary=summary,
        plots=False,
    )


def load(run: Run, which: str = "best") -> Any:
    """An evaluation has no model of its own."""
    raise UsageError(f"{run.path} is an evaluation: load the model that it evaluated, {run.spec['model']['init']}")


def run_session(session: Session, spec: EvaluateSpec, launch: Launch) -> None:
    """Evaluate with one seed, from where an earlier process was stopped."""
    with session, ExitStack() as stack:
        session.restore()
        verifiers = stack.enter_context(Verifiers(spec.tasks, workers=spec.eval.verifiers, root=launch.root))
        start, suite = _opened(spec, launch, verifiers, session.seed)
        setup = check_setup(session.path, _setup(spec, start, suite, launch))
        record = stack.enter_context(Recorder(session, spec, total=_count(suite), unit="problems", show=launch.show))
        _Evaluation(spec, session, launch, start, suite, verifiers, record).run(setup)


@dataclass
class _Evaluation:
    """One session: counts what is done, and stops on request."""

    spec: EvaluateSpec
    session: Session
    launch: Launch
    start: Start
    suite: Suite
    verifiers: Verifiers
    record: Recorder
    done: int = 0
    model: Any = None
    """Loaded where this process needs it."""

    def run(self, setup: dict[str, Any]) -> None:
        dtype, suite, span = named_dtype(_dtype(self.spec)), self.suite, self.record.span
        assert self.start.folder is not None
        for task in suite.questions:
            prompt = setup["tasks"][task.label]
            shown = (task.label, len(prompt["first_prompt_tokens"]), prompt["first_prompt"])
            log.info("the first prompt of %s, %d tokens:\n%s", *shown)
        if self.spec.generator is None or suite.choices or suite.texts:
            loaded, _ = open_model(self.start.folder, self.launch.root, dtype=dtype, param_dtype=dtype)
            self.model = loaded.model.to(device_of(self.spec)) if suite.choices or suite.texts else loaded.model
        scores, texts = {}, {}
        if suite.choices:
            rows = self._scored(span("likelihood"), SCORES, suite.choices, ScoredChoice)
            scores = {source.label: likelihood_outcome(source, rows[source.label]) for source in suite.choices}
        if suite.texts:
            rows = self._scored(span("texts"), TEXTS, suite.texts, TextScore)
            texts = {source.label: text_outcome(source, rows[source.label]) for source in suite.texts}
        # Back on the CPU: the engine makes its own copy on the device, and takes what that leaves free for its cache.
        model = None if self.model is None else self.model.to("cpu")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        evaluation = self._answers(model) if suite.questions else Evaluation((), {}, {})
        metrics = evaluation.metrics | likelihood_metrics({**scores, **texts})
        lm_eval, records = self._lm_eval(metrics) if self.spec.lm_eval else ({}, [])
        if records := [*evaluation.records, *records]:  # in the order of the problems, not in that of completion
            write_records(self.session.path / ANSWERS, records)
            metrics |= {f"{USAGE}{name}": value for name, value in usage(records, self.spec.price).items()}
        write_report(self.session.path, setup | {"lm_eval": lm_eval}, evaluation, scores, texts, metrics)
        self.record.table("completions/eval", record_rows(records, self.done), self.done)
        call_hooks(load_hooks(self.spec.hooks), HookContext(self.done, self.done, metrics, model, self.session.path))
        shown = ["eval/accuracy", *(f"eval/pass@{k}" for k in self.spec.eval.k), "eval/centred", "eval/bits_per_byte"]
        self.record.row(metrics, {"steps": self.done, "problems": self.done}, headline=shown)

    def _scored(
        self,
        span: AbstractContextManager[None],
        name: str,
        sources: Sequence[Choices] | Sequence[Texts],
        kind: type[Score],
    ) -> dict[str, list[Score]]:
        """The scores of each source by its label, from where the file of that name ends."""
        path, results, before = self.session.path / name, {}, self.done
        done = list(map(TypeAdapter(kind).validate_python, read_lines(path)))
        with span, growing(path, map(_scored_line, done)) as append:

            def keep(chunk: Sequence[Score]) -> None:
                append("".join(map(_scored_line, chunk)))
                self._progress(self.done + len(chunk))
                self._stop_if_requested()

            for source in sources:
                self._stop_if_requested()
                scores = score_set(self.model, self.start.tokenizer, source, done=done, keep=keep)
                results[source.label] = scores
                before += len(scores)
                self._progress(before)
        # Once each, and in order: a chunk that a kill tore was scored again.
        write_bytes(path, "".join(_scored_line(row) for rows in results.values() for row in rows).encode())
        return results

    def _answers(self, model: Any) -> Evaluation:
        path, start = self.session.path / ANSWERS, self.start
        # A verifier that failed may have been out of memory: it is called again.
        done = [record for record in read_records(path) if not record.failed]
        self._progress(self.done + len(done))
        with self.record.span("answers"), growing(path, map(line, done)) as append:

            def keep(record: EvaluationRecord) -> None:
                append(line(record))
                self._progress(self.done + 1)

            if self.spec.generator is not None:
                return self._served(self.spec.generator, done, keep)
            return evaluate_model(
                model,
                start.tokenizer,
                start.eos,
                self.verifiers.verify,
                self.suite.questions,
                self.spec.eval,
                device=device_of(self.spec),
                dtype=named_dtype(_dtype(self.spec)),
                seed=self.session.seed,
                done=done,
                keep=keep,
                look=self._stop_if_requested,
            )

    def _lm_eval(self, metrics: dict[str, float]) -> tuple[dict[str, Any], list[EvaluationRecord]]:
        """The outcomes of lm-eval's tasks by name, which `metrics` get too, and their completions."""
        module, spec, model = _lm_eval(), self.spec, self.model.to(device_of(self.spec))
        outcomes, records, rows = {}, [], []
        for use in spec.lm_eval:
            lm = module.EngineLM(model, self.start.tokenizer, self.start.eos, use.bos)
            lm.look = self._stop_if_requested
            with self.record.span("lm_eval"):
                found = module.run_lm_eval(lm, use, spec.eval.problems)
            outcomes |= {task: {**use.model_dump(mode="json"), **outcome} for task, outcome in found[0].items()}
            records, rows = records + found[1], rows + found[2]
            self._progress(self.done + 1)
        if rows:
            write_bytes(self.session.path / LM_EVAL, "".join(json.dumps(row) + "\n" for row in rows).encode())
        for task, outcome in outcomes.items():
            for name, (value, error) in outcome["metrics"].items():
                metrics |= estimated(f"eval/{task}/{name}", Estimate(value, outcome["documents"], error, None))
        return outcomes, records

    def _served(
        self, generator: GeneratorSpec, done: list[EvaluationRecord], keep: Callable[[EvaluationRecord], None]
    ) -> Evaluation:
        """The same by servers, with what they serve."""
        from palestra.kinds.engines import open_engines  # needs the extra `serve`

        start, settings, context = self.start, self.spec.eval, self.start.shape.context
        with ExitStack() as stack:
            engines = open_engines(generator, self.session, start, stack, context=context)
            work = evaluate_tasks(
                engines,
                start.tokenizer,
                self.verifiers.verify,
                self.suite.questions,
                settings,
                context=context,
                max_new_tokens=settings.max_new_tokens,
                seed=self.session.seed,
                workflow=make_workflow(settings.workflow),
                done=done,
                keep=keep,
            )
            try:
                return pumped(engines, work, self._stop_if_requested)
            finally:
                if engines.retries:
                    log.warning("%d calls to the servers were made again", engines.retries)

    def _progress(self, done: int) -> None:
        self.done = done
        self.record.progress.update(self.done)
        self.session.progress(step=self.done)

    def _stop_if_requested(self) -> None:
        if self.session.stop_requested:
            raise Interrupted(
                f"stopped after {self.done} of {_count(self.suite)} with everything saved; continue with: "
                f"palestra train --resume {self.session.path.parent.parent}"
            )


def _lm_eval() -> ModuleType:
    with needs_extra("a task of lm-eval", "lm-eval"):
        return import_module("palestra.evaluate.lm_eval")


def _dtype(spec: EvaluateSpec) -> str:
    return precision(spec.dtype, device_of(spec).type)


def _opened(spec: EvaluateSpec, launch: Launch, verifiers: Verifiers, seed: int) -> tuple[Start, Suite]:
    """The model and what it is evaluated on, known before its weights are loaded."""
    model = ModelSpec(init=launch.init, chat_template=spec.model.chat_template)
    start = trained_start(model, launch.root, chat=True)  # as in training, so that completions end at the same tokens
    questions = ask(spec.tasks, verifiers.tasks, start.tokenizer, spec.eval.problems)
    choices, texts = (load_choices(use, seed) for use in spec.likelihood), map(load_texts, spec.texts)
    spec = spec.model_copy(update={"seed": seed})
    return start, Suite(spec.name, spec, tuple(choices), tuple(texts), tuple(questions))


def _count(suite: Suite) -> int:
    """Problems in each decoding mode, rows with given answers, documents, and tasks of lm-eval."""
    modes = suite.spec.eval.greedy + bool(suite.spec.eval.samples)
    rows = sum(len(source.items) for source in (*suite.choices, *suite.texts))
    return modes * sum(len(task.questions) for task in suite.questions) + rows + len(suite.spec.lm_eval)


def _setup(spec: EvaluateSpec, start: Start, suite: Suite, launch: Launch) -> dict[str, Any]:
    """Everything the results depend on, as plain data: what makes them comparable with others."""
    decoding = spec.eval.model_dump(mode="json", exclude={"problems", "verifiers"})
    model = {
        "init": spec.model.init,
        "folder": launch.init,
        "sha256": files_sha256(_weights(str(launch.init), launch.root)),
        "tokenizer_sha256": start.tokenizer.fingerprint,
        "chat_template": start.tokenizer.chat_template if any(task.chat for task in suite.questions) else None,
        "end_tokens": list(start.eos),
        "context": start.shape.context,
        "dtype": _dtype(spec),
        "device": device_of(spec).type,
    }
    served = None if spec.generator is None else {"engine": spec.generator.engine, "model": spec.generator.model}
    model |= {} if served is None else {"served_by": served}
    estimator = {"top_p": 1.0, "top_k": None, "estimator": "1 - C(n-c, k) / C(n, k)"}
    return {"model": model, **suite.identity(start.tokenizer), "decoding": decoding | estimator}


def _weights(folder: str, root: Path) -> list[Path]:
    """The config and weight files of a model, and of the models below it if it is adapters."""
    model, paths = find_model(folder, root), []
    while model.base is not None:
        paths += [model.folder / CONFIG, model.folder / WEIGHTS]
        model = find_model(model.base, root)
    return [*paths, *(model.folder / name for name in ("config.json", *weight_files(model.folder)))]


def _scored_line(scored: ScoredChoice | TextScore) -> str:
    return json.dumps(asdict(scored)) + "\n"
