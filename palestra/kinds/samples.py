"""What a model writes during training, for people to read."""

import json
import logging

import torch

from palestra.data.chat import encode_chat
from palestra.errors import UsageError
from palestra.generate.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.start import Start, writes_chat
from palestra.lm.engine import TrainEngine
from palestra.lm.hf import empty_model
from palestra.runs.due import due
from palestra.runs.session import Session
from palestra.spec.lm import LmSpec, SampleSpec, WritingSpec

SAMPLES = "samples.jsonl"

log = logging.getLogger("palestra.lm")


class Samples:
    """What the model writes during training, in samples.jsonl of the session."""

    def __init__(self, spec: LmSpec, engine: TrainEngine, start: Start, session: Session):
        self.spec = spec.samples if isinstance(spec, WritingSpec) else SampleSpec()
        self.engine, self.start, self.session = engine, start, session
        self.prompts = sample_prompts(spec, start)
        self.writer: Engine | None = None
        session.follow(SAMPLES, lambda: None)

    def due(self, before: dict[str, int], after: dict[str, int]) -> bool:
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
