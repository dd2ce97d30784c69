"""The kind `reward_model`: a language model with a scalar head, trained on preferences."""

from pathlib import Path

from palestra.kinds.lm import run_lm, run_lm_session
from palestra.kinds.models import find_model
from palestra.kinds.start import Start
from palestra.kinds.trial import Launch
from palestra.lm.datasets import Data, mixture_of, pair_data
from palestra.lm.model import Transformer
from palestra.lm.preferences import Pair, Preferences, reward_loss
from palestra.lm.scorer import Scorer
from palestra.runs.run import Run
from palestra.spec.kinds.reward_model import RewardModelSpec


def run(spec: RewardModelSpec, launch: Launch) -> Run:
    """Train every seed of the spec."""
    return run_lm(spec, launch, run_session, data)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    run_lm_session(folder, launch, data, objective, scalar=True)


def load(run: Run, which: str = "best") -> Scorer:
    """The reward model of a run's checkpoint: `load(run).score(messages)`."""
    folder = find_model(run.checkpoint(which)).folder
    return Scorer.load(folder)


def data(spec: RewardModelSpec, start: Start) -> Data[Pair]:
    """The pairs."""
    return pair_data(spec.data, start.tokenizer_folder)


def objective(spec: RewardModelSpec, start: Start, found: Data[Pair], seed: int, model: Transformer) -> Preferences:
    """A higher score for the chosen conversation."""
    return Preferences(
        mixture_of(found, spec.data, batch=spec.train.batch, steps=spec.train.steps, seed=seed),
        found.evals,
        reward_loss(spec.loss),
        batch=spec.train.batch,
        eval_examples=spec.eval.examples,
    )
