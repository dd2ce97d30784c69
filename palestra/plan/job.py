"""The work of a spec: how many tokens of which lengths a step samples and trains on, and what the model looks like."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError, UsageError
from palestra.spec.kinds.distill import DistillSpec
from palestra.spec.kinds.lm import DpoSpec, PretrainSpec, RewardModelSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.spec.lm import BpeSpec, LanguageModelSpec, LmSpec
from palestra.spec.shape import Shape, precision
from palestra.spec.source import read_file

SHARED = 0.2
"""Share of prompt tokens from which on a group's prompt is trained on once (docs/log.md)."""
SPARED = 0.72
"""What of a token's work is spared if it is computed once: attention and head see it for each completion."""
CHARACTERS = 128
"""Vocabulary that is assumed of a tokenizer made from texts by characters."""

MTBF = 50_000.0
"""Hours of one device: 419 interruptions of 16,384 GPUs in 54 days (Llama 3, arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True)
class Job:
    """A spec with what it does not say: shape, lengths and the time of a verdict."""

    spec: LanguageModelSpec
    shape: Shape
    new: float  # tokens of a completion or an example, mean
    prompt: float = 0.0  # tokens of a prompt, mean
    spread: float = 0.0  # standard deviation of a completion's tokens over their mean
    verify: float = 0.0  # seconds of a verifier for a completion, mean
    mtbf: float = MTBF  # hours between two failures of one device, mean
    assumed: tuple[str, ...] = ()  # what nobody said, for people to read

    @property
    def rollout(self) -> PosttrainSpec | None:
        """The spec, where completions are sampled."""
        return self.spec if isinstance(self.spec, PosttrainSpec) else None

    @property
    def sequences(self) -> int:
        """Sequences that a step trains on."""
        pairs = 2 if isinstance(self.spec, DpoSpec | RewardModelSpec) else 1
        return self.spec.examples * pairs

    @property
    def length(self) -> float:
        """Tokens of a sequence, mean."""
        return self.prompt + self.new

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence."""
        return self.prompt + (self.rollout.rollout.max_new_tokens if self.rollout else self.new)

    @property
    def trained(self) -> float:
        """Tokens that a step puts through the model, prompts that a group shares once."""
        group = self.rollout.rollout.group if self.rollout else 1
        whole, once = group * self.length, self.prompt + group * self.new
        return self.sequences / group * (whole - SPARED * (whole - once) * (1 - once / whole >= SHARED))

    @property
    def sampled(self) -> float:
        """Tokens that a step samples, or else trains on."""
        return self.sequences * (self.new if self.rollout else self.length)

    @property
    def updates(self) -> int:
        """Optimizer steps of a step."""
        train = self.rollout.train if self.rollout else None
        return train.epochs * train.minibatches if train else 1

    @property
    def critic(self) -> bool:
        """Whether a value model is trained too."""
        return self.rollout is not None and self.rollout.algorithm.critic is not None

    def forwards(self, checkpointing: str) -> float:
        """Forward passes over the tokens of a step; a backward pass counts as two, and what is recomputed as well."""
        train = 3.0 + {"none": 0.0, "selective": 0.5, "full": 1.0}[checkpointing]
        if self.rollout is None:
            return train + isinstance(self.spec, DpoSpec)
        algorithm, epochs = self.rollout.algorithm, self.rollout.train.epochs
        critic = 1 + train * epochs if self.critic else 0
        return train * epochs + algorithm.needs_anchor + algorithm.needs_reference + critic

    def used(self, cpu: bool) -> int:
        """Bytes of a number in the arithmetic."""
        return 2 if precision(self.spec.train.precision, "cpu" if cpu else "cuda") == "bf16" else 4


def open_job(
    spec: Any, shape: str | None = None, *, root: Path = Path("runs"), known: Mapping[str, float | None] | None = None
) -> Job:
    """The job of a spec; `known` are `prompt`, `new`, `spread`, `verify` and `mtbf`, where they are known."""
    if not isinstance(spec, LanguageModelSpec) or isinstance(spec, DistillSpec):
        kinds = "pretrain, sft, dpo, reward_model or posttrain"
        raise UsageError(f"palestra plan is for specs that train a language model ({kinds}), not for `{spec.kind}`")
    given = {key: value for key, value in (known or {}).items() if value is not None}
    model, assumed = _shape(spec, shape, root)
    if isinstance(spec, PosttrainSpec):
        limit = float(spec.rollout.max_new_tokens)
        if given.get("new", 0) > limit:
            raise UsageError(f"--new-tokens {given['new']:g}: expected at most rollout.max_new_tokens = {limit:g}")
        defaults = {
            "prompt": (float(spec.rollout.max_prompt_tokens or 128), "tokens a prompt"),
            "new": (limit / 2, "new tokens a completion"),
            "spread": (0.6, "spread of lengths"),
            "verify": (0.01, "seconds a verdict"),
        }
        assumed += [f"{words} {value:g}" for key, (value, words) in defaults.items() if key not in given]
        return Job(spec, model, **{key: value for key, (value, _) in defaults.items()} | given, assumed=tuple(assumed))
    assert isinstance(spec, LmSpec)
    if not isinstance(spec, PretrainSpec) and "new" not in given:
        assumed.append(f"every example has all {spec.data.context} tokens")
    ours = {"new": float(spec.data.context)} | {key: given[key] for key in ("new", "mtbf") if key in given}
    return Job(spec, model, **ours, assumed=tuple(assumed))


def _shape(spec: LanguageModelSpec, given: str | None, root: Path) -> tuple[Shape, list[str]]:
    """The model's shape with its vocabulary, and what was assumed of it."""
    shape, tokenizer = spec.model.shape, spec.model.tokenizer
    if given is not None:
        shape = _read(Path(given))
    elif shape is None:
        from palestra.data.sources import model_folder

        try:
            shape = _read(model_folder(str(spec.model.init), root))
        except PalestraError as error:
            reason = "give its shape: --shape FILE (a config.json, or the fields of `model.shape` as YAML)"
            raise UsageError(f"model.init: {error}. If it is not here, {reason}") from error
    if shape.vocab is not None:
        return shape, []
    vocab = -(-tokenizer.bpe // 64) * 64 if isinstance(tokenizer, BpeSpec) else CHARACTERS
    words = [] if isinstance(tokenizer, BpeSpec) else [f"a vocabulary of {CHARACTERS}"]
    return shape.model_copy(update={"vocab": vocab}), words


def _read(path: Path) -> Shape:
    from palestra.lm.hf_config import read_folder

    if path.is_dir() or path.name == "config.json":
        return read_folder(path if path.is_dir() else path.parent)[1]
    try:
        return Shape.model_validate(read_file(path).data)
    except ValueError as error:
        raise UsageError(f"--shape {path}: not the fields of `model.shape`: {error}") from error
