"""The kind `pretrain`: a language model trained on plain text."""

from pathlib import Path

from palestra.data.example import Example
from palestra.kinds.lm import load_lm, next_token, run_lm, run_lm_session
from palestra.kinds.start import Start
from palestra.kinds.trial import Launch
from palestra.lm.datasets import Data, text_data
from palestra.runs.run import Run
from palestra.spec.kinds.pretrain import PretrainSpec

load = load_lm


def run(spec: PretrainSpec, launch: Launch) -> Run:
    """Train every seed of the spec."""
    return run_lm(spec, launch, run_session, data)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    run_lm_session(folder, launch, data, next_token)


def data(spec: PretrainSpec, start: Start) -> Data[Example]:
    """Windows of the texts."""
    return text_data(spec.data, start.tokenizer_folder)
