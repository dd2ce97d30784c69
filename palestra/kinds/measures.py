"""What is measured of a language model while it trains: evaluation suites, and sampled text."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from palestra.data.chat import encode_chat
from palestra.errors import UsageError
from palestra.evaluate.suites import Suite, add_result, begin_results, check_suite, measure, open_suite, suite_metrics
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import Start, model_copy, writes_chat
from palestra.lm.engine import TrainEngine
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
        with Verifiers(spec.tasks, root=root) as verifiers:
            suite = open_suite(use.label, spec, verifiers.tasks, start.tokenizer)
            check_suite(suite, start.tokenizer, start.shape.context)


class Suites:
    """Measures a copy of the weights, without any effect on training or its randomness."""

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
        if not engine.ranks.first:  # rank 0 measures, while the others wait
            return
        for use in uses:
            spec = suite_spec(use)
            verifiers = stack.enter_context(Verifiers(spec.tasks, workers=spec.eval.verifiers, root=root))
            self.opened[use.label] = (open_suite(use.label, spec, verifiers.tasks, start.tokenizer), verifiers)
        with clear_write_errors(session.path):
            identities = {label: suite.identity(start.tokenizer) for label, (suite, _) in self.opened.items()}
            begin_results(session.path, identities)

    def due(self, before: Counters, after: Counters, last: bool) -> list[str]:
        """The names of those that are due between `before` and `after`, which may be the last step."""
        ended = {use.label for use in self.uses if last and use.mode != "during"}
        return [use.label for use in self.uses if use.label in ended or due(use.cadence, before, after)]

    def measure(
        self, labels: Sequence[str], counters: Counters, look: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """`suite/<name>/<task>` of some suites with the current weights, also added to results.json.

        Every rank calls it, and gets them. `look` is called repeatedly and may raise to end it.
        """
        if not labels:
            return {}
        weights = self.engine.weights()
        return self.engine.ranks.on_first(lambda: self._measured(labels, counters, look, weights))

    def _measured(
        self, labels: Sequence[str], counters: Counters, look: Callable[[], None], weights: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        # A copy: another length of the input of a compiled model can lead to other kernels, and with them to other bits
        # of the next training step.
        model, row = model_copy(self.start, self.engine, weights, torch.float32), {}
        for label in labels:
            suite, verifiers = self.opened[label]
            result = measure(suite, model, self.start.tokenizer, verifiers.verify, eos=self.start.eos, look=look)
            with clear_write_errors(self.session.path):
                add_result(self.session.path, label, counters, result)
            row |= suite_metrics(label, result)
            shown = ", ".join(f"{task} {one['value']:.4f}" for task, one in result["tasks"].items())
            log.info("step %d: suite %s: %s", counters["steps"], label, shown)
        if model.embed.device.type == "cuda":  # training needs this memory again
            del model
            torch.cuda.empty_cache()
        return row


SAMPLES = "samples.jsonl"


class Samples:
    """Text that the model generates during training, in samples.jsonl of the session."""

    def __init__(self, spec: LmSpec, engine: TrainEngine, start: Start, session: Session):
        self.spec = spec.samples if isinstance(spec, WritingSpec) else SampleSpec()
        self.engine, self.start, self.session = engine, start, session
        self.prompts = sample_prompts(spec, start)
        self.writer: Engine | None = None
        session.follow(SAMPLES, lambda: None)

    def due(self, before: Counters, after: Counters) -> bool:
        """Whether samples are due."""
        return bool(self.prompts) and due(self.spec.every, before, after)

    def write(self, step: int) -> None:
        """One text for each prompt, with the current weights."""
        if not self.prompts:
            return
        weights = self.engine.weights()
        if not self.engine.ranks.first:
            return
        if self.writer is None:
            self.writer = Engine(
                model_copy(self.start, self.engine, weights, torch.float32),
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
    """The tokens of the sample prompts, in the format of the training data."""
    if not isinstance(spec, WritingSpec):
        return []
    tokenizer, most, prompts = start.tokenizer, start.shape.context - 1, []
    for text in spec.samples.prompts:
        if writes_chat(spec):
            turn = [{"role": "user", "content": text}]
            prompts.append(encode_chat(tokenizer, turn, add_generation_prompt=True).tokens)
        else:
            prompts.append(tokenizer.encode_prompt(text))
        if not 0 < (tokens := len(prompts[-1])) <= most:
            raise UsageError(f"samples.prompts: {text!r:.100} is {tokens} tokens; expected 1 to {most}")
    return prompts
