"""What a language model is measured by while it trains: suites that are due, and samples for people to read."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from palestra.data.chat import encode_chat
from palestra.errors import UsageError
from palestra.evaluate.suites import (
    Suite,
    add_result,
    begin_results,
    check_suite,
    measure,
    open_suite,
    suite_metrics,
)
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import Start, writes_chat
from palestra.lm.engine import TrainEngine
from palestra.lm.hf import empty_model
from palestra.lm.model import Transformer
from palestra.runs.loop import Counters, due
from palestra.runs.session import Session
from palestra.runs.store import clear_write_errors
from palestra.spec.lm import LmSpec, SampleSpec, WritingSpec
from palestra.spec.tasks import SuiteUse, suite_spec
from palestra.tasks.verify.workers import Verifiers

log = logging.getLogger("palestra.evaluate")


def check_suites(uses: Sequence[SuiteUse], start: Start, root: Path) -> None:
    """Refuse suites that cannot be read or scored, before a run has a folder."""
    for use in uses:
        spec = suite_spec(use)
        with Verifiers(spec.tasks, root=root) as judges:
            check_suite(
                open_suite(use.label, spec, judges.tasks, start.tokenizer), start.tokenizer, start.shape.context
            )


class Suites:
    """Measures a copy of the weights: nothing of what is trained or drawn for it is touched."""

    def __init__(
        self,
        uses: Sequence[SuiteUse],
        engine: TrainEngine,
        start: Start,
        session: Session,
        root: Path,
        stack: ExitStack,
    ):
        self.uses, self.engine, self.start, self.session = uses, engine, start, session
        self.opened: dict[str, tuple[Suite, Verifiers]] = {}
        if not engine.ranks.first:  # which measures, while the others wait
            return
        for use in uses:
            spec = suite_spec(use)
            judges = stack.enter_context(Verifiers(spec.tasks, workers=spec.eval.verifiers, root=root))
            self.opened[use.label] = (open_suite(use.label, spec, judges.tasks, start.tokenizer), judges)
        with clear_write_errors(session.path):
            begin_results(
                session.path, {label: suite.identity(start.tokenizer) for label, (suite, _) in self.opened.items()}
            )

    def due(self, before: Counters, after: Counters, last: bool) -> list[str]:
        """The names of those that are due on the way from `before` to `after`, which may be the last step."""
        ended = {use.label for use in self.uses if last and use.mode != "during"}
        return [use.label for use in self.uses if use.label in ended or due(use.cadence, before, after)]

    def measure(
        self, labels: Sequence[str], counters: Counters, look: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """`suite/<name>/<task>` of some suites by the weights as they are, also added to results.json.

        Every rank calls it, and gets them. `look` is called now and then and may raise to end it.
        """
        if not labels:
            return {}
        weights, ranks = self.engine.weights(), self.engine.ranks
        if not ranks.first:
            return ranks.from_first(None)
        model, found = self._copy(weights), {}
        for label in labels:
            suite, judges = self.opened[label]
            result = measure(suite, model, self.start.tokenizer, judges.verify, eos=self.start.eos, look=look)
            with clear_write_errors(self.session.path):
                add_result(self.session.path, label, counters, result)
            found |= suite_metrics(label, result)
            log.info("step %d: suite %s: %s", counters["steps"], label, _told(result["tasks"]))
        if model.embed.device.type == "cuda":  # training had this memory before, and needs it again
            del model
            torch.cuda.empty_cache()
        return ranks.from_first(found)

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> Transformer:
        # Not the model that is trained, which may have adapters, be split over ranks, or be compiled: another length of
        # its input can lead to other kernels, and with them to other bits of the next step.
        model = empty_model(self.start.shape, self.engine.transformer.dtype, torch.float32, self.engine.device)
        model.load_state_dict(weights)
        return model


def _told(tasks: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{label} {found['value']:.4f}" for label, found in tasks.items())


SAMPLES = "samples.jsonl"


class Samples:
    """What the model writes during training, in samples.jsonl of the session."""

    def __init__(self, spec: LmSpec, engine: TrainEngine, start: Start, session: Session):
        self.spec = spec.samples if isinstance(spec, WritingSpec) else SampleSpec()
        self.engine, self.start, self.session = engine, start, session
        self.prompts = sample_prompts(spec, start)
        self.writer: Engine | None = None
        session.follow(SAMPLES, lambda: None)

    def due(self, before: Counters, after: Counters) -> bool:
        """Whether it is time to write."""
        return bool(self.prompts) and due(self.spec.every, before, after)

    def write(self, step: int) -> None:
        """One text for each prompt, by the weights as they are."""
        if not self.prompts:
            return
        weights = self.engine.weights()
        if not self.engine.ranks.first:
            return
        if self.writer is None:
            # Not the model that is trained, which may have adapters or be split over ranks.
            model = empty_model(self.start.shape, self.engine.transformer.dtype, torch.float32, self.engine.device)
            model.load_state_dict(weights)
            self.writer = Engine(
                model,
                eos=frozenset(self.start.eos),
                tokenizer=self.start.tokenizer,
                context=max(map(len, self.prompts)) + self.spec.max_new_tokens,
                max_running=min(8, len(self.prompts)),
                device=self.engine.device,
            )
        self.writer.publish(weights, step)
        sampling = Sampling(temperature=self.spec.temperature, max_new_tokens=self.spec.max_new_tokens, seed=step)
        results = self.writer.run([Request(tuple(prompt), sampling) for prompt in self.prompts])
        with (self.session.path / SAMPLES).open("a") as file:
            for text, result in zip(self.spec.prompts, results, strict=True):
                (written,) = result.generations
                row = {"step": step, "prompt": text, "text": written.text, "stop_reason": str(written.stop_reason)}
                file.write(json.dumps(row) + "\n")
                log.info("step %d: %r → %r", step, text, written.text)


def sample_prompts(spec: LmSpec, start: Start) -> list[list[int]]:
    """The tokens of the prompts that samples begin with, written as the training data are."""
    if not isinstance(spec, WritingSpec):
        return []
    tokenizer, chat, found = start.tokenizer, writes_chat(spec), []
    for text in spec.samples.prompts:
        turn = [{"role": "user", "content": text}]
        found.append(
            encode_chat(tokenizer, turn, add_generation_prompt=True).tokens if chat else tokenizer.encode_prompt(text)
        )
        if not 0 < len(found[-1]) < start.shape.context:
            raise UsageError(
                f"samples.prompts: {text!r:.100} is {len(found[-1])} tokens; the model reads 1 to "
                f"{start.shape.context - 1} before it writes"
            )
    return found
