"""The kind `dpo`: a language model trained on preferences."""

from copy import deepcopy
from pathlib import Path

from palestra.kinds.lm import load_lm, run_lm, run_lm_session
from palestra.kinds.start import Start
from palestra.kinds.trial import Launch
from palestra.lm.datasets import Data, mixture_of, pair_data
from palestra.lm.model import Transformer
from palestra.lm.preferences import Pair, Preferences, dpo_loss
from palestra.runs.run import Run
from palestra.spec.kinds.dpo import DpoSpec

load = load_lm


def run(spec: DpoSpec, launch: Launch) -> Run:
    """Train every seed of the spec."""
    return run_lm(spec, launch, run_session, data)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    run_lm_session(folder, launch, data, objective)


def data(spec: DpoSpec, start: Start) -> Data[Pair]:
    """The pairs."""
    return pair_data(spec.data, start.tokenizer_folder)


def objective(spec: DpoSpec, start: Start, found: Data[Pair], seed: int, model: Transformer) -> Preferences:
    """The chosen answer more likely than the rejected one, relative to the model as it starts."""
    reference = deepcopy(model).requires_grad_(False).to(model.dtype)
    return Preferences(
        mixture_of(found, spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=seed),
        found.evals,
        dpo_loss(spec.loss, reference),
        batch=spec.train.batch,
        eval_examples=spec.eval.examples,
    )
