"""Evaluation on a GPU: the likelihoods of the CPU, and a whole run."""

import pytest
import torch
from eval_lab import TOKENIZER, letters, run, save_model, spec_of
from tiny_lm import write_rows

from palestra.evaluate.likelihood import score_set
from palestra.evaluate.likelihood_data import load_choices
from palestra.lm.hf import load_pretrained
from palestra.spec.kinds.evaluate import LikelihoodUse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CHOICES = [{"query": f"q {i}", "choices": ["yes", "no", "maybe so"], "gold": i % 3} for i in range(40)]
WRITTEN = [{"context": f"{i}+1=", "continuation": str(i + 1)} for i in range(40)]


@pytest.mark.parametrize("rows", [CHOICES, WRITTEN], ids=["choices", "written"])
def test_likelihoods_on_the_gpu_are_those_of_the_cpu(tmp_path, rows):
    model = load_pretrained(save_model(tmp_path / "model")).model
    suite = load_choices(LikelihoodUse(path=write_rows(tmp_path / "rows.jsonl", rows), shots=1), 0)
    expected = score_set(model, TOKENIZER, suite)
    found = score_set(model.to("cuda"), TOKENIZER, suite)
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert (one.tokens, one.written) == (other.tokens, other.written)


def test_run_on_the_gpu_answers_and_scores(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", WRITTEN)
    spec = spec_of(save_model(tmp_path / "model"), letters(), likelihood=[{"path": rows}], device="cuda", dtype="bf16")
    found = run(tmp_path, spec)
    assert found.state == "done"
    assert {"eval/accuracy", "eval/pass@4", "eval/centred"} <= found.summary().keys()
