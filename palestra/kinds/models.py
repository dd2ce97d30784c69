"""Models by what people call them, what a run starts from, and how a model is kept in checkpoints."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from palestra.data.chat import end_of_turn
from palestra.data.mixture import stream_key
from palestra.data.sources import resolve
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.kinds.trial import Launch
from palestra.lm.datasets import kept_tokenizer, made_tokenizer
from palestra.lm.hf import (
    GENERATION_CONFIG,
    Pretrained,
    Shards,
    empty_model,
    has_tokenizer,
    load_pretrained,
    read_eos,
    read_folder,
    save_weights,
)
from palestra.lm.hf_config import is_classifier
from palestra.lm.lora import CONFIG as ADAPTER_CONFIG
from palestra.lm.lora import adapted, adapter_state, adapter_weights, add_lora, load_peft, merged_weights, save_peft
from palestra.lm.model import Transformer
from palestra.lm.ranks import Ranks, whole
from palestra.lm.scorer import ScalarModel
from palestra.runs.checkpoint import is_checkpoint, keep
from palestra.runs.run import open_run
from palestra.runs.session import Session
from palestra.runs.store import read_json, write_json
from palestra.spec.base import ExperimentSpec
from palestra.spec.kinds.lm import ChatData
from palestra.spec.lm import LanguageModelSpec, LmSpec, ModelSpec
from palestra.spec.shape import Shape, precision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named_dtype(name: str) -> torch.dtype:
    """The precision that people call by a short name."""
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}: expected {', '.join(DTYPES)}, or to leave it out")
    return DTYPES[name]


@dataclass(frozen=True)
class FoundModel:
    """A model folder that was asked for."""

    folder: Path
    """With weights, or with adapters for the model in `base`."""
    base: Path | None
    """The folder of the model that adapters belong to; it may have adapters itself."""
    weights: Path
    """The folder with the weights that all of it rests on."""
    tokenizer: Path
    """The folder with the tokenizer: that of the adapters, where they have one of their own."""
    generation: Path
    """The folder whose generation_config.json holds, or config.json where there is none."""


def find_model(ref: str | Path, root: Path | str = "runs") -> FoundModel:
    """The folder of a model: a run's best checkpoint, a checkpoint, a model folder, a URL or a name on the Hub."""
    return _found(str(ref), Path(root), ())


def open_model(
    ref: str | Path,
    root: Path | str = "runs",
    *,
    dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Pretrained, Tokenizer]:
    """A model with its adapters put into its weights, and its tokenizer."""
    found = find_model(ref, root)
    if not has_tokenizer(found.tokenizer):
        raise UsageError(f"{found.tokenizer} has no tokenizer: put a tokenizer.json beside its weights")
    if found.base is None:
        loaded = load_pretrained(found.folder, dtype, param_dtype, device)
    else:
        loaded, _ = open_model(found.base, root, dtype=dtype, param_dtype=param_dtype, device=device)
        load_peft(found.folder, loaded.model)
        plain = empty_model(loaded.model.shape, dtype, param_dtype, device)
        plain.load_state_dict(merged_weights(loaded.model))
        eos = read_eos(found.generation, loaded.config)
        loaded = replace(loaded, model=plain, tokenizer=found.tokenizer, eos=eos)
    return loaded, Tokenizer.load(found.tokenizer)


def _found(ref: str, root: Path, seen: tuple[Path, ...]) -> FoundModel:
    folder = _folder(ref, root)
    if not (folder / ADAPTER_CONFIG).exists():
        return FoundModel(folder, None, folder, folder, folder)
    if folder.resolve() in seen:
        raise UsageError(f"{folder / ADAPTER_CONFIG}: base_model_name_or_path leads back to these adapters themselves")
    named = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    base = _found(named, root, (*seen, folder.resolve()))
    return FoundModel(
        folder,
        base.folder,
        base.weights,
        folder if has_tokenizer(folder) else base.tokenizer,
        folder if (folder / GENERATION_CONFIG).exists() else base.generation,
    )


def _folder(ref: str, root: Path) -> Path:
    path = Path(ref).expanduser()
    if (path / "config.json").exists() or (path / ADAPTER_CONFIG).exists():
        return path
    if (path / "meta.json").exists():  # a checkpoint
        return _model_of(path)
    if "://" in ref:
        return resolve(ref, kind="model")
    try:
        run = open_run(ref, root)
    except UsageError:
        if path.exists():
            raise UsageError(
                f"{ref} is no model: it is neither a run, nor a checkpoint, nor a folder with a config.json"
            ) from None
        if path.parts[0] == root.name:  # a run was meant, not an owner on the Hub
            raise
        return resolve(ref, kind="model", root=root)
    return _model_of(run.checkpoint("best"))


def _model_of(checkpoint: Path) -> Path:
    if not (checkpoint / "model").is_dir():
        raise UsageError(f"{checkpoint} holds no language model")
    return checkpoint / "model"


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
        model.initialize(draws)
        model.to(device)
    if spec.model.lora is not None:
        add_lora(model, spec.model.lora, draws)
    every = {"none": None, "selective": 2, "full": 1}[spec.train.checkpointing]
    model.checkpointing = lambda layer: every is not None and layer % every == 0
    return model


def scored_model(model: Transformer, start: Start) -> ScalarModel:
    """The model with a scalar head: that of the reward model it comes from, else one of zeros."""
    scored = ScalarModel(model)
    if is_classifier(start.config):
        assert start.folder is not None
        with Shards(start.folder) as shards, torch.no_grad():
            scored.value.weight.copy_(shards.tensor("score.weight"))
    return scored


class ModelCheckpoint:
    """The model in checkpoints: a Hugging Face folder with FP32 weights, or adapters alone where only they change."""

    def __init__(self, model: Transformer | ScalarModel, start: Start, ranks: Ranks):
        self.model, self.start, self.ranks = model, start, ranks
        self.transformer = model.transformer if isinstance(model, ScalarModel) else model

    def writer(self) -> Callable[[Path], None]:
        """Gathers the weights, on every rank; what it gives writes them into a folder, on the first."""
        if adapted(self.transformer):
            assert self.start.folder is not None  # ModelSpec.problems
            base = str(self.start.folder.absolute())  # adapters are read from anywhere
            adapters = self.ranks.gather(adapter_state(self.transformer))
            tokenizer, eos = self.start.tokenizer, self.start.eos
            return lambda folder: save_peft(folder, self.transformer, base, adapters, tokenizer=tokenizer, eos=eos)
        weights = {name: whole(tensor) for name, tensor in self.transformer.state_dict().items()}
        score = whole(self.model.value.weight) if isinstance(self.model, ScalarModel) else None
        return lambda folder: save_weights(
            folder,
            self.start.shape,
            weights,
            tokenizer=self.start.tokenizer,
            eos=self.start.eos,
            base_config=self.start.config,
            score=score,
        )

    def load(self, folder: Path) -> None:
        """Take the weights that were written there."""
        if adapted(self.transformer):
            self.ranks.scatter(adapter_weights(folder, self.transformer), self.transformer)
            return
        saved = load_pretrained(folder)
        self.ranks.scatter(saved.model.state_dict(), self.transformer)
        if isinstance(self.model, ScalarModel):
            assert saved.score is not None
            self.ranks.scatter({"value.weight": saved.score}, self.model)
