"""Models by name or path, what a run starts from, and how a model is stored in checkpoints."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from palestra.data.chat import end_of_turn
from palestra.data.media import PixelLimits
from palestra.data.mixture import stream_key
from palestra.data.sources import model_folder
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds.trial import Launch
from palestra.lm import hf
from palestra.lm.datasets import kept_tokenizer, made_tokenizer
from palestra.lm.engine import TrainEngine
from palestra.lm.hf_config import is_classifier, read_folder
from palestra.lm.lora import CONFIG as ADAPTER_CONFIG
from palestra.lm.lora import (
    adapted,
    adapter_state,
    adapter_weights,
    add_lora,
    load_peft,
    merged_weights,
    peft_config,
    save_peft,
)
from palestra.lm.model import Transformer
from palestra.lm.ranks import ALONE, Ranks
from palestra.lm.scorer import ScalarModel
from palestra.lm.shards.folder import SCORE, fill, sample, save_folder
from palestra.lm.shards.saver import copied
from palestra.runs.checkpoint import is_checkpoint, keep
from palestra.runs.loop import AT_ONCE
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.kinds.lm import ChatData
from palestra.spec.lm import LanguageModelSpec, LmSpec, ModelSpec
from palestra.spec.shape import Shape, precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named_dtype(name: str) -> torch.dtype:
    """A torch dtype by its short name."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: expected {', '.join(DTYPES)}, or to leave it out")
    return DTYPES[name]


@dataclass(frozen=True)
class FoundModel:
    """A model folder, and the folders that it depends on."""

    folder: Path
    """With weights, or with adapters for the model in `base`."""
    base: Path | None
    """The model that adapters belong to; it may have adapters itself."""
    weights: Path
    """The base model below all adapters."""
    tokenizer: Path
    """With the tokenizer: that of the adapters if they have one."""
    generation: Path
    """With the generation_config.json that applies, or config.json."""


def find_model(ref: str | Path, root: Path | str = "runs", seen: tuple[Path, ...] = ()) -> FoundModel:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub.

    `seen` are the folders of the adapters above it.
    """
    folder = model_folder(str(ref), Path(root))
    if not (folder / ADAPTER_CONFIG).exists():
        return FoundModel(folder, None, folder, folder, folder)
    if folder.resolve() in seen:
        raise UsageError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path leads back to these adapters themselves")
    named = peft_config(folder).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UsageError(f"{folder / ADAPTER_CONFIG}: expected the model that it adapts in base_model_name_or_path")
    base = find_model(named, root, (*seen, folder.resolve()))
    return FoundModel(
        folder,
        base.folder,
        base.weights,
        folder if hf.has_tokenizer(folder) else base.tokenizer,
        folder if (folder / hf.GENERATION_CONFIG).exists() else base.generation,
    )


def open_model(
    ref: str | Path,
    root: Path | str = "runs",
    *,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[hf.Pretrained, Tokenizer]:
    """A model with its adapters merged into its weights, and its tokenizer."""
    place = find_model(ref, root)
    if not hf.has_tokenizer(place.tokenizer):
        raise UsageError(f"{place.tokenizer} has no tokenizer: put a tokenizer.json next to its weights")
    if place.base is None:
        loaded = hf.load_pretrained(place.folder, dtype, param_dtype, device)
    else:
        loaded, _ = open_model(place.base, root, dtype=dtype, param_dtype=param_dtype, device=device)
        load_peft(place.folder, loaded.model)
        plain = hf.empty_model(loaded.model.shape, dtype, param_dtype, device)
        plain.load_state_dict(merged_weights(loaded.model))
        eos = hf.read_eos(place.generation, loaded.config)
        loaded = replace(loaded, model=plain, tokenizer=place.tokenizer, eos=eos)
    return loaded, Tokenizer.load(place.tokenizer)


INIT = "init.json"
VOCAB_MULTIPLE = 64  # a vocabulary that is a multiple of it multiplies faster

log = logging.getLogger("palestra.lm")

Kind = TypeVar("Kind", bound=LanguageModelSpec)


@dataclass(frozen=True)
class Start:
    """What a run starts from, known before any weights are loaded."""

    shape: Shape
    tokenizer: Tokenizer
    tokenizer_folder: Path
    eos: tuple[int, ...]
    """Tokens that end a generation."""
    folder: Path | None
    """The initial weights; None initializes new ones."""
    config: dict[str, Any]
    """The config.json of the model that the weights come from."""


def pinned_model(
    init: str, launch: Launch, file: str, folder_in: Callable[[Any], str] = lambda content: content["model"]
) -> Path:
    """The folder of the model that `init` resolved to when the trial started: a run's name moves on to newer runs.

    A session writes it to `file` at its first start.
    """
    files = [] if launch.resume is None else [session.path / file for session in launch.resume.sessions]
    pinned = next((folder_in(read_json(path)) for path in files if path.exists()), None)
    return find_model(pinned or init, launch.root).folder.absolute()


def with_model(spec: LanguageModelSpec, launch: Launch) -> Launch:
    """The launch with the folder of `model.init`, pinned when the trial started."""
    init = spec.model.init
    return launch if init is None else replace(launch, init=str(pinned_model(init, launch, INIT)))


def keep_start(init: str | None) -> None:
    """Mark the checkpoint this run starts from as kept: a resume reads it again, so its own run must not prune it."""
    if init is None or not is_checkpoint(Path(init).parent):
        return
    try:
        keep(Path(init).parent)
    except OSError as error:  # another user's run
        log.warning("%s cannot be marked as kept (%s): its own run could delete it", Path(init).parent, error.strerror)


def starting_from(spec: Kind, init: str | None) -> Kind:
    """The spec with another `model.init`."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"init": init})})


def settled(spec: Kind, session: Session, init: str | None) -> Kind:
    """The spec with the model that the session started from, which is written to its folder at the first start."""
    path = session.path / INIT
    if init is not None and not path.exists():
        write_json(path, {"model": init})
    return starting_from(spec, None if init is None else read_json(path)["model"])


def start_of(spec: LmSpec, root: Path) -> Start:
    """The shape, tokenizer and initial weights of a spec that trains on examples."""
    wanted = spec.model
    if wanted.init is not None:
        start = trained_start(wanted, root, chat=writes_chat(spec), scores=spec.kind == "reward_model")
        check_context("data.context", spec.data.context, start, wanted.init)
        return start
    assert wanted.shape is not None  # ModelSpec.problems
    assert wanted.tokenizer is not None
    pairs, images = spec.kind == "reward_model", wanted.shape.vision is not None
    folder = made_tokenizer(wanted.tokenizer, spec.data, wanted.chat_template, pairs=pairs, images=images)
    return _start(wanted, wanted.shape, folder, (), None, {}, writes_chat(spec))


def check_context(place: str, tokens: int, start: Start, whose: str) -> None:
    """Refuse examples that are longer than what the model reads."""
    if tokens > start.shape.context:
        raise UsageError(f"{place}: {tokens} tokens exceed {whose}'s context of {start.shape.context}")


def trained_start(model: ModelSpec, root: Path, *, chat: bool, scores: bool = False) -> Start:
    """The shape, tokenizer and weights of `model.init`, which may be a reward model only if `scores`."""
    assert model.init is not None
    place = find_model(model.init, root)
    config, shape = read_folder(place.weights)
    if is_classifier(config) and not scores:
        raise UsageError(f"model.init: {model.init} is a reward model, which cannot generate text")
    return _start(model, shape, place.tokenizer, hf.read_eos(place.generation, config), place.folder, config, chat)


def _start(
    model: ModelSpec,
    shape: Shape,
    tokenizer_folder: Path,
    eos: tuple[int, ...],
    folder: Path | None,
    config: dict[str, Any],
    chat: bool,
) -> Start:
    tokenizer = Tokenizer.load(tokenizer_folder)
    if model.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(model.chat_template)
        tokenizer_folder = kept_tokenizer(tokenizer)
    if shape.vision is not None:
        if tokenizer.pixels is None:
            tokenizer = tokenizer.with_images(PixelLimits())
            tokenizer_folder = kept_tokenizer(tokenizer)
        if shape.vision.tokens is None:
            shape = shape.model_copy(
                update={"vision": shape.vision.model_copy(update={"tokens": tokenizer.vision_ids})}
            )
    vocab = shape.vocab or -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocab < tokenizer.vocab_size:
        whose = "model.shape.vocab:" if model.init is None else f"model.init: {model.init} has embeddings for"
        raise UsageError(
            f"{whose} {vocab} tokens, fewer than the {tokenizer.vocab_size} of the tokenizer in {tokenizer_folder}"
        )
    turn = end_of_turn(tokenizer) if chat and tokenizer.chat_template is not None else None
    ends = sorted({token for token in (*eos, tokenizer.eos, turn) if token is not None})
    return Start(shape.model_copy(update={"vocab": vocab}), tokenizer, tokenizer_folder, tuple(ends), folder, config)


def writes_chat(spec: LmSpec) -> bool:
    """Whether texts are conversations, written with the tokenizer's chat template."""
    return isinstance(spec.data, ChatData) and spec.data.format == "chat"


def build_model(
    spec: LanguageModelSpec, start: Start, seed: int, device: torch.device, ranks: Ranks = ALONE
) -> Transformer:
    """The model before the first step; for several ranks without memory, which it gets when it is split."""
    dtype = named_dtype(precision(spec.train.precision, device.type))
    key = stream_key(seed, "weights") >> 1
    generator = torch.Generator().manual_seed(key)
    if ranks.size > 1 and (start.folder is None or not (start.folder / ADAPTER_CONFIG).exists()):
        model = hf.skeleton(start.shape, dtype)
        model.source = partial(sample, seed=key) if start.folder is None else partial(fill, folder=start.folder)
    elif start.folder is not None:
        kept = named_dtype(spec.train.weights)
        model = open_model(start.folder, dtype=dtype, param_dtype=kept, device=device)[0].model
    else:
        model = Transformer(start.shape, dtype)
        model.initialize(generator)
        model.to(device)
    if spec.train.weights == "bf16":
        for parameter in model.parameters():  # those of norms and biases are few and near 1, where bf16 is coarse
            parameter.data = parameter.data.to(torch.bfloat16 if parameter.ndim >= 2 else torch.float32)
    if spec.model.lora is not None:
        add_lora(model, spec.model.lora, generator)
    every = {"none": None, "selective": 2, "full": 1}[spec.train.checkpointing]
    model.checkpointing = lambda layer: every is not None and layer % every == 0
    return model


def rounding_seed(spec: LanguageModelSpec, seed: int) -> int | None:
    """The seed of the stochastic rounding of a run's weights; None where they are FP32."""
    return seed if spec.train.weights == "bf16" else None


def model_copy(start: Start, engine: TrainEngine, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Transformer:
    """A model with a copy of `engine.weights()`: not compiled, not split over ranks, its adapters merged."""
    model = hf.empty_model(start.shape, engine.transformer.dtype, dtype, engine.device)
    model.load_state_dict(weights)
    return model


def scored_model(model: Transformer, start: Start) -> ScalarModel:
    """The model with a scalar head: that of the initial reward model, else zeros."""
    scored = ScalarModel(model)
    if is_classifier(start.config):
        assert start.folder is not None
        with torch.no_grad():
            scored.value.weight.copy_(hf.Shards(start.folder).tensor("score.weight"))
    return scored


class ModelCheckpoint:
    """The model in checkpoints: a Hugging Face folder with FP32 weights, or the adapters if only they are trained."""

    def __init__(self, model: Transformer | ScalarModel, start: Start, ranks: Ranks):
        self.model, self.start, self.ranks = model, start, ranks
        self.transformer = model.transformer if isinstance(model, ScalarModel) else model

    def writer(self) -> Callable[..., None]:
        """What writes the weights into a folder: those of now, unless they are written at once.

        All ranks call it, with their group.
        """
        tokenizer, eos, config = self.start.tokenizer, self.start.eos, self.start.config
        if adapted(self.transformer):
            assert self.start.folder is not None  # ModelSpec.problems
            base = str(self.start.folder.absolute())  # adapters are read from anywhere
            adapters = self.ranks.gather(adapter_state(self.transformer))
            adapters = adapters if self.ranks.saver is AT_ONCE else copied(adapters)

            def write(folder: Path, group: Any = None) -> None:
                if self.ranks.first:
                    save_peft(folder, self.transformer, base, adapters, tokenizer=tokenizer, eos=eos)

            return write
        about = {"tokenizer": tokenizer, "eos": eos, "base_config": config}
        score = self.model.value.weight if isinstance(self.model, ScalarModel) else None
        if self.ranks.size == 1:
            if self.ranks.saver is AT_ONCE:
                return partial(hf.save_pretrained, model=self.transformer, score=score, **about)
            weights = copied(dict(self.transformer.state_dict()))
            return partial(hf.save_weights, shape=self.start.shape, weights=weights, score=copied(score), **about)
        weights = self.transformer.state_dict() | ({} if score is None else {SCORE: score})
        return partial(save_folder, shape=self.start.shape, mine=self.ranks.keep(weights), **about)

    def load(self, folder: Path) -> None:
        """Load the weights of a folder that `writer` wrote."""
        if adapted(self.transformer):
            self.ranks.scatter(adapter_weights(folder, self.transformer), self.transformer)
        else:
            fill(self.model, folder)
