"""The asynchronous loop: with staleness 0 it is the plain loop, bit for bit; above, tokens carry their versions."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fast_only
from plain_loop import plain_loop
from posttrain_lab import (
    TOKENIZER,
    Lab,
    assert_equal_runs,
    letters,
    log_of,
    rollouts_of,
    rows_of,
    session_of,
    weights_of,
)

import palestra
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine
from palestra.kinds.posttrain import longest_prompt
from palestra.rollout.episode import encode_problem
from palestra.rollout.records import FILE
from palestra.rollout.types import Group
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.tasks.task import Problem


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def said(group: Group) -> list[tuple[Any, ...]]:
    """All that a group tells the trainer."""
    return [(group.number, group.problem.id, group.version, one.tokens, one.logprobs, one.versions, one.reward)
            for one in group.trajectories]  # fmt: skip


PLAIN: dict[str, dict[str, Any]] = {
    "dr_grpo": {},
    "filtered": {"algorithm__filters": {"zero_variance": True}},
    "minibatches": {"train__minibatches": 3, "train__epochs": 2, "algorithm__preset": "grpo"},
    "recomputed": {
        "algorithm__anchor": "recomputed",
        "algorithm__filters": {"zero_variance": True},
        "train__minibatches": 2,
        "rollout__temperature": 0.7,
        "train__micro_tokens": 64,
    },
}


@pytest.mark.parametrize("case", fast_only(PLAIN, "dr_grpo", "minibatches", "recomputed"))
def test_loop_at_staleness_zero_equals_the_plain_loop_bit_for_bit(lab, case):
    # Judging takes a while, each answer another one, so that what ends first is drawn by lot.
    run = lab.run(tasks=letters(pause=0.01), **PLAIN[case])
    spec = palestra.check(lab.spec(tasks=letters(), **PLAIN[case])).spec
    assert isinstance(spec, PosttrainSpec)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected, weights = plain_loop(spec, lab.model)
    torch.set_num_threads(threads)
    records = rollouts_of(run)
    for step, row in enumerate(expected, 1):
        for fate, groups in (("trained", row["groups"]), ("filtered", row["filtered"])):
            found = [record for record in records if record.step == step and record.fate == fate]
            assert [said(record.group) for record in found] == [said(group) for group in groups]
            if fate == "trained":
                flat = [value for record in found for one in record.advantages for value in one]
                assert flat == row["batch"].per_token["advantages"].tolist()
    assert [row["loss"] for row in rows_of(run)[1:]] == [row["loss"] for row in expected]
    found = Engine.from_folder(run.checkpoint("last") / "model").model.state_dict()
    assert weights.keys() == found.keys()
    assert all(torch.equal(weights[name], found[name]) for name in weights)
    if "filters" in str(PLAIN[case]):
        assert any(row["filtered"] for row in expected)


def test_loop_when_answers_take_long_shows_mixed_versions_within_the_bound(lab):
    # Seven bursts an answer, of which the trainer's micro-batches give some and the wait for groups the rest.
    changes = {"rollout__max_new_tokens": 40, "rollout__staleness": 1, "train__steps": 8, "train__micro_tokens": 128}
    run = lab.run(tasks=letters(), every__eval="3 steps", **changes)
    records = [record for record in rollouts_of(run) if record.fate == "trained"]
    mixed = 0
    for record in records:
        for one in record.group.trajectories:
            drawn = [v for v, used in zip(one.versions, one.loss_mask, strict=True) if used]
            assert drawn == sorted(drawn)  # a later token is never of earlier weights
            assert record.group.version <= drawn[0]
            assert drawn[-1] < record.step
            assert record.step - 1 - drawn[0] <= 1  # the first step trains version 0
            mixed += drawn[0] != drawn[-1]
    assert mixed > 0
    rows = rows_of(run)[1:]
    assert max(row["staleness_max"] for row in rows) == 1
    assert sum(row["staleness"] for row in rows) > 0
    assert rows[-1]["fate/trained"] == 32
    assert rows[-1]["fate/stale"] == 0
    numbers = [record.group.number for record in records]
    assert len(set(numbers)) == len(numbers) == 32


@pytest.mark.parametrize("staleness", fast_only([1, 3], 1))
def test_loop_with_answers_dropped_when_stale_keeps_the_bound(lab, staleness):
    run = lab.run(
        tasks=letters(pause=0.15), train__steps=8, rollout__staleness=staleness, rollout__on_stale="drop"
    )  # fmt: skip
    records = rollouts_of(run)
    for record in records:
        assert all(record.step - 1 - one.oldest <= staleness for one in record.group.trajectories)
    assert all(row["staleness_max"] <= staleness for row in rows_of(run)[1:])
    assert len({record.group.number for record in records}) == 32


def test_evaluation_while_answers_are_under_way_is_of_one_version(lab):
    # It raises where answers of an evaluation are of several versions; here it has others between its own.
    changes: dict[str, Any] = {"tasks": letters(), "rollout__max_new_tokens": 24, "eval__samples": 2}
    run = lab.run(rollout__staleness=2, every__eval="1 steps", train__steps=4, **changes)
    plain = lab.run(name="plain", train__steps=1, **changes)
    first, expected = (
        {key: value for key, value in rows_of(one)[0].items() if key.startswith("eval/")} for one in (run, plain)
    )
    assert first == expected
    assert all("eval/accuracy" in row for row in rows_of(run))


def test_replay_of_a_run_from_the_same_start_gives_the_same_weights_without_generating(lab, monkeypatch):
    changes: dict[str, Any] = {
        "algorithm__preset": "grpo",
        "algorithm__kl": {"where": "loss", "coefficient": 0.01},
        "rollout__staleness": 1,
        "train__minibatches": 2,
        "algorithm__filters": {"zero_variance": True},
    }
    run = lab.run(name="source", **changes)
    generated = []
    monkeypatch.setattr(Engine, "submit", lambda self, request, sink: generated.append(request))
    again = lab.run(name="again", rollout__replay="source", **changes)
    assert not generated
    assert all(torch.equal(weights_of(again)[name], value) for name, value in weights_of(run).items())
    for row, expected in zip(rows_of(again)[1:], rows_of(run)[1:], strict=True):
        assert {key: row[key] for key in ("loss", "grad_norm", "kl_reference")} == {
            key: expected[key] for key in ("loss", "grad_norm", "kl_reference")
        }
    assert f"the rollouts are those of {session_of(run) / FILE}" in log_of(again)
    states = [load_checkpoint(one.checkpoint("last")).state["learner"] for one in (again, run)]
    assert states[0].keys() == states[1].keys()


def test_replay_that_is_resumed_goes_on_where_it_was_though_the_name_means_another_run_now(lab):
    lab.run(name="source", train__steps=4)
    whole = lab.run(name="whole", rollout__replay="source", train__steps=4)
    lab.run(name="half", rollout__replay="source", train__steps=2)
    lab.run(name="source", train__steps=4, seed=1)
    half = lab.resume("half", overrides={"train.steps": 4}, allow=["train.steps"])
    assert_equal_runs(half, whole)


def test_replay_with_an_evaluation_generates_for_that_alone(lab):
    run = lab.run(name="source", tasks=letters())
    again = lab.run(name="again", tasks=letters(), rollout__replay=str(session_of(run) / FILE))
    rows, expected = (
        [{key: value for key, value in row.items() if key.startswith("eval/")} for row in rows_of(one)]
        for one in (again, run)
    )
    assert rows == expected


def test_replay_that_cannot_be_is_refused_before_there_is_a_folder(lab):
    source = lab.run(name="source", train__steps=2)
    for changes, expected in (
        ({"rollout__replay": "source", "train__steps": 3}, "has rollouts of 2 steps, and train.steps is 3"),
        ({"rollout__replay": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(UsageError, match=expected):
            lab.run(name="refused", **changes)
    assert not (lab.root / "refused").exists()
    path = session_of(source) / FILE
    row = json.loads(path.read_text().splitlines()[0])
    row["trajectories"][0]["tokens"][0] = 10**6
    other = lab.path / "other.jsonl"
    other.write_text(json.dumps(row) + "\n")
    with pytest.raises(PalestraError, match="have tokens that this model does not have"):
        lab.run(name="other", rollout__replay=str(other), train__steps=1)


def test_log_shows_the_first_prompt_with_its_tokens_and_the_self_test(lab):
    run = lab.run(train__steps=1)
    text = log_of(run)
    assert "the first prompt is Letters/train/0, 5 tokens:\nnorwd" in text
    assert f"its tokens: {list(Engine.from_folder(lab.model).tokenizer.encode('norwd'))}" in text
    assert "trainer and generator over" in text
    first = rows_of(run)[0]
    assert first["selftest/gap_mean"] < 1e-5
    assert first["step"] == 0


def test_self_test_with_another_model_in_the_generator_ends_the_run(lab, monkeypatch):
    publish = Engine.publish

    def broken(self: Engine, weights: dict[str, torch.Tensor], version: int, **settings: bool) -> None:
        publish(self, {**weights, "norm.weight": weights["norm.weight"] * 1.1}, version, **settings)

    monkeypatch.setattr(Engine, "publish", broken)
    with pytest.raises(PalestraError, match="they are not the same model"):
        lab.run()


@pytest.mark.parametrize(
    ("task", "args", "expected"),
    [
        ("Letters", {"score": 0.0}, "all rewards equal 0, so all advantages are zero: the task is too hard"),
        ("Letters", {"score": 1.0}, "all rewards equal 1, so all advantages are zero: the task is solved"),
        ("Halves", {}, "all rewards within each group are equal"),
    ],
)
def test_log_when_all_rewards_are_equal_says_why_nothing_is_learned(lab, task, args, expected):
    run = lab.run(tasks=letters(task, **args), train__steps=1)
    assert f"step 1: nothing is learned: {expected}" in log_of(run)
    assert rows_of(run)[-1]["groups/no_variance"] == 1.0


@pytest.mark.parametrize("staleness", [0, 2])
def test_run_whose_pool_drops_every_prompt_ends_with_what_it_has_learned(lab, staleness):
    tasks = {**letters(size=12), "pool": {"low": 0.0, "high": 1.0, "drop": 0.0}}
    run = lab.run(tasks=tasks, train__steps=20, rollout__staleness=staleness)
    assert 3 <= rows_of(run)[-1]["step"] < 20
    assert "every prompt of every task has reached the pass rate tasks.pool.drop" in log_of(run)


def test_log_when_every_token_is_masked_says_that_the_gradient_is_zero(lab):
    run = lab.run(algorithm__truncated={"type": "mask"}, rollout__max_new_tokens=1, train__steps=1)
    assert "step 1: nothing is learned: the gradient is 0: every token is masked or clipped" in log_of(run)


def test_log_tells_the_share_of_completions_that_the_verifier_had_no_time_for(lab):
    tasks = {"train": [{"task": "posttrain_tasks:Slow"}]}
    run = lab.run(name="slow", tasks=tasks, rollout__verify_seconds=0.5, rollout__verifiers=2, train__steps=3)
    shares = [row["status/timeout"] for row in rows_of(run) if "status/timeout" in row]
    assert 0 < shares[0] < 1
    told = (session_of(run) / "log.txt").read_text()
    limit = "rollout.verify_seconds = 0.5 (or its task's own limit) for"
    assert f"step 1: the verifier took longer than {limit} {100 * shares[0]:.1f} % of the completions" in told
    largest, times = 0.0, 0
    for share in shares:  # only twice as many are news
        if share > 2 * largest:
            largest, times = share, times + 1
    assert told.count(limit) == times


@pytest.mark.parametrize("chat", [False, True])
def test_longest_prompt_equals_that_of_all_prompts_counted(lab, chat, monkeypatch):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tokenizer = TOKENIZER.with_chat_template(template) if chat else TOKENIZER
    draw = random.Random(0)

    def prompt() -> Any:
        text = "a" * draw.randrange(3, 60)
        return ({"role": "user", "content": text},) if chat else text

    tasks = [[Problem(f"t{n}/train/{i}", prompt()) for i in range(50)] for n in range(2)]
    counted = max(len(encode_problem(problem, tokenizer)) for each in tasks for problem in each)
    assert longest_prompt(tasks, tokenizer) == counted
    monkeypatch.setattr("palestra.kinds.posttrain.COUNTED", 99)
    assert longest_prompt(tasks, tokenizer) is None


@pytest.mark.parametrize(
    ("workflow", "row"),
    [({"name": "single_turn"}, 5 + 6), ({"name": "multi_turn", "turns": 2, "feedback": "no"}, 5 + 2 * 6 + 4)],
)
def test_cache_reserves_the_longest_prompt_and_what_follows_it_and_gives_the_same_rollouts(
    lab, monkeypatch, workflow, row
):
    changes: dict[str, Any] = {"rollout__workflow": workflow, "train__steps": 2, "every__eval": None}
    counted = lab.run(name="counted", **changes)
    assert f"longest prompt: 5 tokens; a sequence has at most {row}" in log_of(counted)
    monkeypatch.setattr("palestra.kinds.posttrain.COUNTED", 0)
    whole = lab.run(name="whole", **changes)
    assert "longest prompt: not counted tokens" in log_of(whole)
    sampled = [
        [(t.tokens, t.logprobs) for r in rollouts_of(run) for t in r.group.trajectories] for run in (counted, whole)
    ]
    assert sampled[0] == sampled[1]


def test_record_of_tokens_has_the_trainers_scores_and_changes_nothing(lab):
    """By the weights that the step began with; synchronous, so the generator agrees, and the metric is their mean."""
    plain = lab.run(name="plain", train__micro_tokens=64)
    scored = lab.run(name="scored", train__micro_tokens=64, rollout__record="tokens")
    assert [row["loss"] for row in rows_of(plain)[1:]] == [row["loss"] for row in rows_of(scored)[1:]]
    lines = [json.loads(line) for line in (session_of(scored) / FILE).read_text().splitlines()]
    assert "entropy" not in (session_of(plain) / FILE).read_text()
    for step, row in enumerate(rows_of(scored)[1:], 1):
        entropies = []
        for one in (one for line in lines if line["step"] == step for one in line["trajectories"]):
            assert len(one["entropy"]) == len(one["trained_logprobs"]) == len(one["tokens"])
            assert one["trained_logprobs"] == pytest.approx(one["logprobs"], abs=2e-5)
            if one["advantages"]:  # the metric is of what is trained on
                entropies += [value for value, sampled in zip(one["entropy"], one["loss_mask"], strict=True) if sampled]
        assert sum(entropies) / len(entropies) == pytest.approx(row["entropy"], abs=1e-5)
        assert min(entropies) > 0
