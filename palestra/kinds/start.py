"""What a run of a language model starts from: its device, its model, its tokenizer."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from palestra.data.chat import end_of_turn
from palestra.data.shuffle import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds.models import find_model, named_dtype, open_model
from palestra.kinds.trial import Launch
from palestra.lm.datasets import kept_tokenizer, made_tokenizer
from palestra.lm.hf import read_eos, read_folder
from palestra.lm.hf_config import is_classifier
from palestra.lm.lora import add_lora
from palestra.lm.model import Transformer
from palestra.runs.checkpoint import is_checkpoint, keep
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds.sft import ChatData
from palestra.spec.lm import LanguageModelSpec, LmSpec, ModelSpec
from palestra.spec.precision import precision
from palestra.spec.shape import Shape

INIT = "init.json"
VOCAB_MULTIPLE = 64  # a vocabulary that is a multiple of it multiplies faster

log = logging.getLogger("palestra.lm")

Kind = TypeVar("Kind", bound=LanguageModelSpec)


@dataclass(frozen=True)
class Start:
    """What a run starts from, known before there is a model."""

    shape: Shape
    tokenizer: Tokenizer
    tokenizer_folder: Path
    eos: tuple[int, ...]
    """Tokens that end what the model writes."""
    folder: Path | None
    """Where the first weights are; None draws new ones."""
    config: dict[str, Any]
    """The config.json of the model that the weights come from."""


def device_of(spec: ExperimentSpec) -> torch.device:
    """The GPU where there is one, unless the spec says otherwise."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU here: use `device: cpu`, or a torch built for your GPU")
    cuda = torch.cuda.is_available() and spec.device != "cpu"
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")


def with_model(spec: LanguageModelSpec, launch: Launch) -> Launch:
    """The launch with the very model that `model.init` meant when the trial began: a name goes on to newer runs."""
    if spec.model.init is None:
        return launch
    begun = [] if launch.resume is None else [one.path / INIT for one in launch.resume.sessions()]
    pinned = next((read_json(path)["model"] for path in begun if path.exists()), None)
    folder = find_model(pinned or spec.model.init, launch.root).folder.absolute()
    return replace(launch, init=str(folder))


def keep_start(init: str | None) -> None:
    """Let no run prune the checkpoint that this one starts from: resuming reads it again, and so do its adapters."""
    if init is None or not is_checkpoint(Path(init).parent):
        return
    try:
        keep(Path(init).parent)
    except OSError as error:  # somebody else's run
        log.warning("%s cannot be marked as kept (%s): do not let its run go on", Path(init).parent, error.strerror)


def starting_from(spec: Kind, init: str | None) -> Kind:
    """The spec with another `model.init`."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"init": init})})


def settled(spec: Kind, session: Session, init: str | None) -> Kind:
    """The spec with the model that the session began with, which is written down at its first start."""
    path = session.path / INIT
    if init is not None and not path.exists():
        write_json(path, {"model": init})
    return starting_from(spec, None if init is None else read_json(path)["model"])


def start_of(spec: LmSpec, root: Path) -> Start:
    """The shape, the tokenizer and the first weights that a spec of training on examples names."""
    wanted = spec.model
    if wanted.init is not None:
        found = trained_start(wanted, root, chat=writes_chat(spec), scores=spec.kind == "reward_model")
        if spec.data.context > found.shape.context:
            raise UsageError(
                f"data.context: {spec.data.context} tokens are more than the {found.shape.context} that "
                f"{wanted.init} reads"
            )
        return found
    assert wanted.shape is not None  # ModelSpec.problems
    assert wanted.tokenizer is not None
    pairs = spec.kind == "reward_model"
    folder = made_tokenizer(wanted.tokenizer, spec.data, wanted.chat_template, pairs=pairs)
    return _start(wanted, wanted.shape, folder, (), None, {}, writes_chat(spec))


def trained_start(model: ModelSpec, root: Path, *, chat: bool, scores: bool = False) -> Start:
    """The shape, the tokenizer and the weights of `model.init`, which may be a reward model only where it `scores`."""
    assert model.init is not None
    found = find_model(model.init, root)
    config, shape = read_folder(found.weights)
    if is_classifier(config) and not scores:
        raise UsageError(f"model.init: {model.init} is a reward model, which scores texts and writes none")
    return _start(model, shape, found.tokenizer, read_eos(found.generation, config), found.folder, config, chat)


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


def build_model(spec: LanguageModelSpec, start: Start, seed: int, device: torch.device) -> Transformer:
    """The model as it is before the first step."""
    dtype = named_dtype(precision(spec.train.precision, device.type))
    draws = torch.Generator().manual_seed(stream_key(seed, "weights") >> 1)
    if start.folder is not None:
        model = open_model(start.folder, dtype=dtype, device=device)[0].model
    else:
        model = Transformer(start.shape, dtype)
        model.initialise(draws)
        model.to(device)
    if spec.model.lora is not None:
        add_lora(model, spec.model.lora, draws)
    every = {"none": None, "selective": 2, "full": 1}[spec.train.checkpointing]
    model.checkpointing = lambda layer: every is not None and layer % every == 0
    return model
