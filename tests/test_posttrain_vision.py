"""Post-training on images: killed and resumed, or replayed from its own rollouts, it ends with the same numbers."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from posttrain_lab import Lab, assert_equal_runs, assert_equal_trees, rollouts_of, weights_of
from safetensors.torch import load_file
from test_generate_vision_server import TOKENIZER, engine
from test_posttrain_kill import kill_at_random

import palestra
from palestra.lm.hf import save_pretrained


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def counting(lab: Lab, **changes: Any) -> dict[str, Any]:
    """A random model with eyes that is asked for the shapes of pictures."""
    folder = lab.path / "eyes"
    if not folder.exists():
        assert TOKENIZER.eos is not None
        save_pretrained(folder, engine().model, tokenizer=TOKENIZER, eos=[TOKENIZER.eos])
    use = {"task": "posttrain_tasks:Pictures", "args": {"most": 3, "question": "How many?"}}
    settings = {"model__init": str(folder), "tasks": {"train": [use], "eval": [use]}, "train__steps": 12}
    return {**settings, "every__checkpoint": "3 steps", "every__eval": "6 steps", **changes}


def test_run_with_images_killed_at_random_moments_equals_one_that_was_not(lab: Lab) -> None:
    reference = lab.run(**counting(lab, name="reference"))
    (start,) = (lab.path / "eyes").glob("*.safetensors")
    before, after = load_file(start), weights_of(reference)
    tower = [name for name in before if name.startswith("vision")]
    assert tower
    assert all((before[name] != after[name]).any() for name in tower)  # the tower learns too
    run = kill_at_random(lab, counting(lab, name="killed"), random.Random(3), kills=2)
    assert_equal_runs(run, reference)


def test_run_with_images_replayed_from_its_rollouts_has_the_same_weights(lab: Lab) -> None:
    first = lab.run(**counting(lab, name="first", train__steps=4))
    assert all(row.media for record in rollouts_of(first) for row in record.group.trajectories)
    again = lab.run(**counting(lab, name="again", train__steps=4, rollout__replay=str(first.path)))
    assert_equal_trees(weights_of(again), weights_of(first))


@pytest.mark.slow
def test_model_with_eyes_learns_to_count_from_rewards(tmp_path: Path) -> None:
    lessons, examples = tmp_path / "lessons.jsonl", Path(__file__).parent.parent / "examples" / "vision"
    subprocess.run([sys.executable, str(examples / "lessons.py"), str(lessons)], check=True)
    shared: dict[str, Any] = {"root": tmp_path / "runs", "quiet": True}
    changes = [f"data.train.lessons.path={lessons}", "train.steps=34", "seed=1000"]
    start = palestra.run(str(examples / "sft.yaml"), overrides=changes, **shared)
    changes = [f"model.init={start.path}", "train.steps=100", "every.eval=100 steps", "seed=1000"]
    run = palestra.run(str(examples / "grpo.yaml"), overrides=changes, **shared)
    first, last = [row["eval/accuracy"] for row in run.metrics(1000) if "eval/accuracy" in row]
    assert last >= 0.55 > 0.4 > first
