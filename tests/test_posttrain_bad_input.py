"""Post-training that cannot be: one paragraph that says what, where and what to do, before there is a run folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from posttrain_lab import TASK, Lab, letters

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def use(task: str = TASK, **more: Any) -> dict[str, Any]:
    return {"train": [{"task": task, **more}]}


def lessons(path: str, **more: Any) -> dict[str, Any]:
    data = {"train": {"lessons": {"path": path}}, "context": 24, "format": "plain", **more}
    return {"data": data, "weight": 1.0}


CHAT = letters(chat=True)

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown_task": ({"tasks": use("arithmetics")}, r"unknown task 'arithmetics'. Did you mean 'arithmetic'\?"),
    "unknown_arg": (
        {"tasks": use("arithmetic", args={"digit": 2})},
        r"tasks.train\[?\.?0\]?.args.digit.*\(it has .*digits",
    ),
    "wrong_arg": ({"tasks": use("arithmetic", args={"digits": "two"})}, "args.digits.*valid integer"),
    "unknown_split": ({"tasks": use("arithmetic", split="dev")}, "split.*expected one of train, test"),
    "unknown_game": ({"tasks": use("textarena:Chss-v0")}, r"textarena has no 'Chss-v0'. Did you mean 'Chess-v0'\?"),
    "game_without_its_workflow": (
        {"tasks": use("textarena:Nim-v0")},
        "rollout.workflow.*expected name: environment, because textarena:Nim-v0 is played and not answered",
    ),
    "credit_of_turns_in_a_sequence": (
        {"algorithm": {"preset": "gspo", "turns": {"credit": "turn"}}},
        "algorithm.turns.credit.*expected trajectory, because `ratio: sequence`",
    ),
    "lambda_of_turns_nobody_uses": (
        {"algorithm": {"preset": "grpo", "turns": {"lam": 0.5}}},
        "algorithm.turns.lam.*expected 1, or `credit: turn` with `baseline: critic`",
    ),
    "no_tools": ({"rollout__workflow": {"name": "tools", "tools": []}}, "tools.*expected at least one, or servers"),
    "no_class": ({"tasks": use("posttrain_tasks:Numbers")}, "posttrain_tasks has no class 'Numbers'"),
    "no_task": ({"tasks": {"train": []}}, "tasks.train"),
    "same_name_twice": ({"tasks": {"train": [{"task": TASK}] * 2}}, "two tasks are called 'Letters'"),
    "no_order_file": ({"tasks": use(order="nowhere.txt")}, "nowhere.txt"),
    "no_model": ({"model": {}}, "expected a trained model to start from"),
    "no_such_model": ({"model__init": "runs/nowhere"}, "nowhere"),
    "group_of_one": (
        {"rollout__group": 1, "algorithm": {"preset": "grpo"}},
        "rollout.group.*expected at least 2, because grpo compares completions of one prompt",
    ),
    "filter_of_one": (
        {"rollout__group": 1, "algorithm": {"preset": "reinforce_pp", "filters": {"zero_variance": True}}},
        "rollout.group.*expected at least 2",
    ),
    "unknown_preset": ({"algorithm": {"preset": "grppo"}}, "grppo|grpo"),
    "kl_of_nothing": (
        {"algorithm": {"preset": "dr_grpo", "kl": {"where": "loss"}}},
        "coefficient.*expected more than 0",
    ),
    "kl_nobody_uses": (
        {"algorithm": {"preset": "dr_grpo", "kl": {"coefficient": 0.1}}},
        "coefficient.*expected 0, or `where: loss` or `where: reward`",
    ),
    "critic_nobody_asks": ({"algorithm": {"preset": "dr_grpo", "critic": {}}}, "critic.*expected null"),
    "too_many_new_tokens": (
        {"rollout__max_new_tokens": 96},
        "96 leave no room for a prompt",
    ),
    "pass_of_too_many": ({"eval": {"samples": 2, "k": [1, 4]}}, r"eval.k.*expected at most samples = 2"),
    "nothing_to_evaluate": ({"eval": {"greedy": False}}, "eval.samples.*expected at least 1"),
    "too_many_minibatches": ({"train__minibatches": 5}, "minibatches.*expected at most train.prompts_per_step = 4"),
    "unknown_key": ({"rollout__stalenes": 1}, "stalenes.*staleness"),
    "unknown_workflow": ({"rollout__workflow": {"name": "many_turns"}}, "many_turns"),
    "lost_workflow": (
        {"rollout__workflow": {"name": "custom", "function": "posttrain_tasks:nothing"}},
        "rollout.workflow.function.*nothing",
    ),
    "lost_filter": (
        {"algorithm__filters": {"function": "posttrain_tasks:nothing"}},
        "algorithm.filters.function.*nothing",
    ),
    "lost_hook": ({"hooks": ["posttrain_tasks:nothing"]}, "nothing"),
    "reward_twice": (
        {"tasks": use(reward={"function": "a:b", "model": "c"})},
        "expected exactly one of function, judge and model",
    ),
    "lost_lessons": ({"sft": lessons("nowhere.jsonl")}, "nowhere.jsonl"),
    "long_lessons": (
        {"sft": lessons("x.jsonl", context=97)},
        "sft.data.context: 97 tokens exceed",
    ),
    "lessons_held_out": ({"sft": lessons("x.jsonl", holdout=0.1)}, "sft.data: expected neither `eval` nor `holdout`"),
    "replay_of_nothing": ({"rollout__replay": "runs/nowhere"}, "nowhere"),
}


@pytest.mark.parametrize("case", CASES)
def test_spec_that_cannot_be_trained_is_refused_with_the_field_and_the_reason(lab, case):
    changes, expected = CASES[case]
    with pytest.raises(UsageError, match=f"(?s){expected}") as raised:
        lab.run(**changes)
    assert raised.value.exit_code == 2
    assert not list(lab.root.glob("letters/*"))


def test_conversation_for_a_model_without_a_template_is_refused(lab):
    path = lab.model / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    (lab.model / "chat_template.jinja").unlink(missing_ok=True)
    assert Tokenizer.load(lab.model).chat_template is None
    for tasks in (CHAT, {**CHAT, "train": letters()["train"]}):
        with pytest.raises(UsageError, match="is a conversation, and the model has no chat template"):
            lab.run(tasks=tasks)
    assert not list(lab.root.glob("letters/*"))
    lab.run(tasks=letters(), train__steps=1)


def test_order_file_with_ids_that_are_not_there_is_refused_with_some_of_them(lab):
    order = lab.path / "order.txt"
    order.write_text("Letters/train/3\nLetters/train/4000\n")
    with pytest.raises(UsageError, match=r"lists 1 of 2 ids .*4000"):
        lab.run(tasks=use(order=str(order)))
    assert not list(lab.root.glob("letters/*"))


def test_prompts_that_are_all_too_long_end_the_run_with_the_reason(lab):
    with pytest.raises(PalestraError, match=r"prompts .*: raise rollout\.max_prompt_tokens"):
        lab.run(rollout__max_prompt_tokens=3)


def test_judge_that_fails_at_every_answer_ends_the_run_with_its_error(lab):
    (lab.path / "rewards.py").write_text("def reward(completion):\n    raise KeyError('the field answer')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(lab.path))
        patch.setenv("PYTHONPATH", str(lab.path))
        with pytest.raises(
            PalestraError, match=r"(?s)no completion of Letters/train/.* could be verified: .*the field answer"
        ):
            lab.run(tasks=use(reward={"function": "rewards:reward"}))


def test_command_with_several_mistakes_names_all_of_them_and_exits_with_two(lab, scratch):
    changes: dict[str, Any] = {"rollout__group": 1, "algorithm": {"preset": "grpo"}, "tasks": use("arithmetics")}
    result = scratch("train", scratch.spec("wrong", lab.spec(**changes)))
    assert result.returncode == 2
    for part in ("wrong.yaml", "rollout.group", "unknown task 'arithmetics'"):
        assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert not (scratch.path / "runs" / "wrong").exists()
