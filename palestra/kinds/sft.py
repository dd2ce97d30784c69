"""The kind `sft`: a language model trained on conversations."""

from pathlib import Path

from palestra.data.example import Example
from palestra.kinds.lm import load_lm, next_token, run_lm, run_lm_session
from palestra.kinds.start import Start
from palestra.kinds.trial import Launch
from palestra.lm.datasets import Data, chat_data
from palestra.runs.run import Run
from palestra.spec.kinds.sft import SftSpec

load = load_lm


def run(spec: SftSpec, launch: Launch) -> Run:
    """Train every seed of the spec."""
    return run_lm(spec, launch, run_session, data)


def run_session(folder: Path, launch: Launch) -> None:
    """Train the one seed whose session folder this is."""
    run_lm_session(folder, launch, data, next_token)


def data(spec: SftSpec, start: Start) -> Data[Example]:
    """The conversations."""
    return chat_data(spec.data, start.tokenizer_folder)
