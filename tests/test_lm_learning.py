"""The specs of examples/lm learn what they are for, with every seed."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_specs import ROOT
from tiny_lm import rows_of

import palestra
from palestra.data.chat import encode_chat
from palestra.generate.local import LanguageModel
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import open_model
from palestra.lm.batch import Batch, forward
from palestra.lm.datasets import held_out as held_out_rows
from palestra.lm.moe import expert_load, selection_bias
from palestra.runs.run import Run

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples" / "lm"
SEEDS = (0, 1)
HOLDOUT = 0.05  # of the 4,000 rows of each dataset, in all examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the examples' data are, and their runs."""
    path = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("PALESTRA_CACHE", str(path / "cache"))
        runpy.run_path(str(EXAMPLES / "make_data.py"))["main"](Path("data"))
        yield path


@pytest.fixture(scope="module")
def answering(folder: Path) -> dict[int, Run]:
    """sft.yaml, by seed."""
    return {seed: train("sft", seed, every__checkpoint="30 steps") for seed in SEEDS}


def train(name: str, seed: int, **fields: Any) -> Run:
    return palestra.run(EXAMPLES / f"{name}.yaml", seed=seed, name=f"{name}_{seed}", threads=1, quiet=True, **fields)


def held_out(name: str) -> list[dict[str, str]]:
    rows = [json.loads(line) for line in Path(f"data/{name}.jsonl").read_text().splitlines()]
    return [rows[index] for index in held_out_rows(np.arange(len(rows)), HOLDOUT)]


def exact_match(model: LanguageModel, rows: list[dict[str, str]]) -> float:
    """The share of greedy answers that are right to the letter."""
    prompts = [
        encode_chat(model.tokenizer, [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True).tokens
        for row in rows
    ]
    sampling = Sampling(temperature=0.0, max_new_tokens=16)
    results = model.engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    return sum(
        result.generations[0].text == row["completion"] for result, row in zip(results, rows, strict=True)
    ) / len(rows)


def model_at(run: Run, step: int) -> LanguageModel:
    loaded, tokenizer = open_model(run.path / "sessions" / str(run.seeds[0]) / "checkpoints" / f"step_{step:09d}")
    return LanguageModel(loaded.model, tokenizer, frozenset(loaded.eos))


def test_sft_learns_to_answer_questions_it_has_not_seen(answering):
    rows = held_out("questions")
    for seed, run in answering.items():
        losses = [row["eval/loss"] for row in rows_of(run) if "eval/loss" in row]
        early, late = exact_match(model_at(run, 30), rows), exact_match(palestra.load(run), rows)
        print(f"sft seed {seed}: held-out loss {losses[0]:.3f} → {losses[-1]:.3f}, exact {early:.2f} → {late:.2f}")
        assert losses[-1] < 0.15 * losses[0]
        assert early < 0.6
        assert late > 0.9


def test_dpo_tells_right_answers_from_wrong_ones_it_has_not_seen(answering):
    for seed, run in answering.items():
        rows = rows_of(train("dpo", seed, model__init=str(run.path), every__log="1 steps"))
        assert rows[0]["accuracy"] == 0.5  # of two models that are the same
        accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        print(f"dpo seed {seed}: held-out accuracy 0.50 → {accuracy[0]:.2f} → {accuracy[-1]:.2f}")
        assert accuracy[-1] > 0.9


def test_reward_model_scores_polite_answers_higher(answering):
    for seed, run in answering.items():
        trained = train("reward_model", seed, model__init=str(run.path))
        accuracy = rows_of(trained)[-1]["eval/accuracy"]
        print(f"reward model seed {seed}: held-out accuracy {accuracy:.2f}")
        assert accuracy > 0.9
        scorer, (row, *_) = palestra.load(trained), held_out("manners")
        asked = {"role": "user", "content": row["prompt"]}
        scores = [scorer.score([asked, {"role": "assistant", "content": row[side]}]) for side in ("chosen", "rejected")]
        assert scores[0] > scores[1]


def test_adapters_learn_to_answer_politely(answering):
    rows = held_out("polite")
    for seed, run in answering.items():
        trained = train("sft_lora", seed, model__init=str(run.path))
        before, after = (exact_match(palestra.load(one), rows) for one in (run, trained))
        print(f"adapters seed {seed}: exact polite answers {before:.2f} → {after:.2f}")
        assert before == 0
        assert after > 0.8


def test_experts_learn_and_share_the_work(folder):
    for seed in SEEDS:
        run = train("moe", seed)
        losses = [row["eval/loss"] for row in rows_of(run) if "eval/loss" in row]
        free = train("moe", seed, model__shape__moe__bias_rate=0.0, train__steps=100)
        with_biases, without = expert_shares(run), expert_shares(free)
        print(f"moe seed {seed}: held-out loss {losses[0]:.3f} → {losses[-1]:.3f}, loads {spread(with_biases)}")
        print(f"moe seed {seed}: loads without biases {spread(without)}")
        assert losses[-1] < 0.65  # the letters of words cannot be foreseen: at best 0.376 is left
        assert with_biases.min() > 0.3
        assert with_biases.max() < 2.0
        assert with_biases.std() < 0.5 * without.std()


def spread(shares: torch.Tensor) -> str:
    return f"{shares.min():.2f} to {shares.max():.2f}"


def expert_shares(run: Run) -> torch.Tensor:
    """(L, E) the load of each expert on held-out text, 1 where all have as much."""
    loaded, tokenizer = open_model(run.checkpoint("last"))
    texts = [tokenizer.encode(row["text"]) for row in held_out("text")]
    with torch.no_grad():
        router = forward(loaded.model, Batch.pack(texts)).router
    assert router is not None
    assert loaded.model.shape.moe is not None
    load = expert_load(router, loaded.model.shape.moe.active, selection_bias(loaded.model))
    return load / load.mean(-1, keepdim=True)


@pytest.mark.timeout(900)
def test_shakespeare_spec_is_below_1_80_a_character_after_two_thirds_of_its_steps(folder):
    text = Path(os.environ.get("PALESTRA_DATA", ROOT / "../shared/data")) / "tinyshakespeare" / "input.txt"
    if not text.exists():
        pytest.skip(f"needs {text}: set PALESTRA_DATA")
    run = palestra.run(
        EXAMPLES / "shakespeare.yaml",
        variables={"text": str(text.resolve())},
        overrides=["train.steps=100", "name=short_shakespeare"],
        quiet=True,
    )
    assert run.summary()["eval/loss"] <= 1.80
