"""What the kinds of language-model training share: model, tokenizer, engine, checkpoints and samples put together."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from palestra.data.chat import encode_chat, end_of_turn
from palestra.data.example import Example
from palestra.data.shuffle import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.engine import Engine
from palestra.generate.language_model import LanguageModel
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import find_model, open_model
from palestra.kinds.together import check_ranks, done, follow, following, threads_each, together
from palestra.kinds.trial import Launch, run_sessions
from palestra.lm.compiling import compile_cache, compile_for_training
from palestra.lm.datasets import Data, bytes_of_tokens, kept_tokenizer, made_tokenizer, mixture_of
from palestra.lm.engine import TrainEngine
from palestra.lm.hf import empty_model, load_pretrained, read_eos, read_folder, save_weights
from palestra.lm.hf_config import is_classifier
from palestra.lm.lora import adapted, adapter_state, add_lora
from palestra.lm.model import Transformer
from palestra.lm.next_token import NextToken
from palestra.lm.optim import Ema, Optimiser
from palestra.lm.peft import adapter_weights, save_peft
from palestra.lm.ranks import Ranks
from palestra.lm.sharding import whole
from palestra.lm.shards import Shards
from palestra.lm.trainer import Objective, train
from palestra.lm.value_head import ScalarModel
from palestra.runs.checkpoint import is_checkpoint, keep
from palestra.runs.due import due
from palestra.runs.plot import trial_plots
from palestra.runs.run import Run
from palestra.runs.session import Session
from palestra.runs.store import clear_write_errors, read_json, write_json
from palestra.spec.kinds.sft import ChatData
from palestra.spec.lm import LmSpec, SampleSpec, WritingSpec
from palestra.spec.load import resolved
from palestra.spec.shape import Shape
from palestra.track.hooks import load_hooks
from palestra.track.sinks import require_sinks

SAMPLES, INIT, CONTENTS = "samples.jsonl", "init.json", "data.json"
VOCAB_MULTIPLE = 64  # a vocabulary that is a multiple of it multiplies faster

log = logging.getLogger("palestra.lm")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


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


Prepare = Callable[[Any, Start], Any]
"""The data of a spec, ready to be read."""
MakeObjective = Callable[[Any, Start, Any, int, Transformer], Objective]
"""What a spec trains for: with its data, its seed and its model as it starts."""


def run_lm(spec: LmSpec, launch: Launch, session: Callable[[Path, Launch], None], prepare: Prepare) -> Run:
    """Train every seed of the spec, then summarise and plot the trial. Under `torchrun`, all ranks call it."""
    device = device_of(spec)
    ranks = Ranks.join(device)
    check_ranks(spec, ranks, device)
    load_hooks(spec.hooks)
    require_sinks(spec.track.sinks)
    if not ranks.first:
        return follow(session, ranks, launch)
    launch = with_model(spec, launch)
    # A spec that cannot run ends here, before it has a folder.
    meant = starting_from(spec, launch.init)
    start = start_of(meant, launch.root)
    mixture_of(prepare(meant, start), spec.data, spec.train, spec.seed)
    sample_prompts(meant, start)
    keep_start(launch.init)
    threads = threads_each(spec, device)
    trial = run_sessions(
        spec,
        launch,
        together(session, spec, ranks, threads),
        fixed=("kind", "model", "data", "optim.name", "train.batch", "train.ema"),
        threads=threads,
        total=spec.train.steps,
        unit="steps",
    )
    trial.trial.write_summary(_summary(trial))
    with clear_write_errors(trial.path):
        trial_plots(trial)
    return done(ranks, trial)


def run_lm_session(
    folder: Path,
    launch: Launch,
    prepare: Prepare,
    make_objective: MakeObjective,
    *,
    scalar: bool = False,
) -> None:
    """Train the one seed whose session folder this is."""
    session = Session.open(folder)
    spec = resolved(session.spec_data)
    assert isinstance(spec, LmSpec)
    device = device_of(spec)
    ranks = Ranks.join(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(session.manifest["threads"])
    try:
        with session if ranks.first else following(folder, ranks.rank), compile_cache(spec.train.compile_cache):
            spec = ranks.from_first(settled(spec, session, launch.init) if ranks.first else None)
            start = start_of(spec, launch.root)
            data = prepare(spec, start)
            if ranks.first:
                check_data(session, data, start)
            model = build_model(spec, start, session.seed, device)
            objective = make_objective(spec, start, data, session.seed, model)
            trained = scored_model(model, start) if scalar else model
            ranks.shard(trained)
            compile_for_training(model, spec.train, device)
            keeper = Keeper(trained, start, spec, ranks)
            engine = TrainEngine(
                trained,
                Optimiser(trained, spec.optim, spec.train.steps),
                ranks,
                micro_tokens=spec.train.micro_tokens,
                flops_per_token=start.shape.flops_per_token(spec.data.context),
                ema=None if spec.train.ema is None else Ema(trained, spec.train.ema),
            )
            sampler = Samples(spec, engine, start, session)
            train(spec, session, engine, objective, keeper, sampler, show=launch.show)
    finally:
        torch.set_num_threads(threads)


def next_token(spec: LmSpec, start: Start, found: Data[Example], seed: int, model: Transformer) -> NextToken:
    """The objective of the kinds that predict tokens: all of a text, or those of the assistant's turns."""
    return NextToken(
        mixture_of(found, spec.data, spec.train, seed),
        found.evals,
        bytes_of_tokens(start.tokenizer, model.shape.vocab or 0),
        batch=spec.train.batch,
        eval_examples=spec.eval.examples,
    )


def device_of(spec: LmSpec) -> torch.device:
    """The GPU where there is one, unless the spec says otherwise."""
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda, but torch sees no GPU here: use `device: cpu`, or a torch built for your GPU")
    cuda = torch.cuda.is_available() and spec.device != "cpu"
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if cuda else "cpu")


def with_model(spec: LmSpec, launch: Launch) -> Launch:
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


def starting_from(spec: LmSpec, init: str | None) -> LmSpec:
    """The spec with another `model.init`."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"init": init})})


def settled(spec: LmSpec, session: Session, init: str | None) -> LmSpec:
    """The spec with the model that the session began with, which is written down at its first start."""
    path = session.path / INIT
    if init is not None and not path.exists():
        write_json(path, {"model": init})
    return starting_from(spec, None if init is None else read_json(path)["model"])


def check_data(session: Session, data: Data, start: Start) -> None:
    """Refuse to go on with other data than the session began with, which are written down at its first start."""
    now = {"model.tokenizer": start.tokenizer.fingerprint, **data.contents}
    path = session.path / CONTENTS
    if not path.exists():
        write_json(path, now)
    before = read_json(path)
    changed = [place for place, content in now.items() if before.get(place) != content]
    if changed:
        raise UsageError(
            f"{' and '.join(changed)}: not what {session.path} was started with: resuming would train on other tokens. "
            "Restore the files as they were, or start a new run"
        )


def start_of(spec: LmSpec, root: Path) -> Start:
    """The shape, the tokenizer and the first weights that a spec names."""
    wanted, config, eos, folder = spec.model, {}, (), None
    if wanted.init is not None:
        found = find_model(wanted.init, root)
        folder = found.folder
        config, shape = read_folder(found.weights)
        tokenizer_folder, eos = found.tokenizer, read_eos(found.generation, config)
        if is_classifier(config) and spec.kind != "reward_model":
            raise UsageError(f"model.init: {wanted.init} is a reward model, which scores texts and writes none")
        if spec.data.context > shape.context:
            raise UsageError(
                f"data.context: {spec.data.context} tokens are more than the {shape.context} that {wanted.init} reads"
            )
    else:
        assert wanted.shape is not None  # ModelSpec.problems
        assert wanted.tokenizer is not None
        pairs, shape = spec.kind == "reward_model", wanted.shape
        tokenizer_folder = made_tokenizer(wanted.tokenizer, spec.data, wanted.chat_template, pairs=pairs)
    tokenizer = Tokenizer.load(tokenizer_folder)
    if wanted.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(wanted.chat_template)
        tokenizer_folder = kept_tokenizer(tokenizer)
    vocab = shape.vocab or -(-tokenizer.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if vocab < tokenizer.vocab_size:
        whose = "model.shape.vocab:" if wanted.init is None else f"model.init: {wanted.init} has embeddings for"
        raise UsageError(
            f"{whose} {vocab} tokens, fewer than the {tokenizer.vocab_size} of the tokenizer in {tokenizer_folder}"
        )
    turn = end_of_turn(tokenizer) if writes_chat(spec) and tokenizer.chat_template is not None else None
    ends = sorted({token for token in (*eos, tokenizer.eos, turn) if token is not None})
    return Start(shape.model_copy(update={"vocab": vocab}), tokenizer, tokenizer_folder, tuple(ends), folder, config)


def writes_chat(spec: LmSpec) -> bool:
    """Whether texts are conversations, written with the tokenizer's chat template."""
    return isinstance(spec.data, ChatData) and spec.data.format == "chat"


def build_model(spec: LmSpec, start: Start, seed: int, device: torch.device) -> Transformer:
    """The model as it is before the first step."""
    dtype = DTYPES[spec.train.precision]
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


def scored_model(model: Transformer, start: Start) -> ScalarModel:
    """The model with a scalar head: that of the reward model it comes from, else one of zeros."""
    scored = ScalarModel(model)
    if is_classifier(start.config):
        assert start.folder is not None
        with Shards(start.folder) as shards, torch.no_grad():
            scored.value.weight.copy_(shards.tensor("score.weight"))
    return scored


class Keeper:
    """The model in checkpoints: a Hugging Face folder with FP32 weights, or adapters alone where only they change."""

    def __init__(self, model: Transformer | ScalarModel, start: Start, spec: LmSpec, ranks: Ranks):
        self.model, self.start, self.spec, self.ranks = model, start, spec, ranks
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


def load_lm(run: Run, which: str = "best") -> LanguageModel:
    """The model of a run's checkpoint, ready to write."""
    loaded, tokenizer = open_model(run.checkpoint(which), run.trial.path.parent.parent)
    return LanguageModel(loaded.model, tokenizer, frozenset(loaded.eos))


def _summary(trial: Run) -> dict[str, Any]:
    """The last value of every evaluation metric: its mean over the seeds, and by seed."""
    found: dict[str, Any] = {}
    last = {seed: _last_evaluation(trial.metrics(seed)) for seed in trial.seeds}
    for metric in sorted({metric for row in last.values() for metric in row}):
        by_seed = {str(seed): row[metric] for seed, row in last.items() if metric in row}
        found |= {metric: fmean(by_seed.values()), f"{metric}_by_seed": by_seed}
    return found


def _last_evaluation(rows: list[dict[str, Any]]) -> dict[str, float]:
    evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
    return {key: value for key, value in evaluated[-1].items() if key.startswith("eval/")} if evaluated else {}
