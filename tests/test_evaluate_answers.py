"""Evaluation on tasks against a plain loop over the engine; bounds, one version, failures, what is done already."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from eval_tasks import Letters
from small_lm import CONTEXT, small_model, small_tokenizer

from palestra.data.mixture import stream_key
from palestra.errors import PalestraError, UsageError
from palestra.evaluate.completions import Evaluation, ask, evaluate_tasks, pumped
from palestra.evaluate.records import EvaluationRecord, VerifiedCompletion, line, pass_at_k, read_records, write_records
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Result, Sampling
from palestra.rollout.workflows import single_turn
from palestra.spec.kinds.posttrain import TaskEval
from palestra.spec.tasks import TaskUse
from palestra.tasks.task import Completion, Status, Verdict
from palestra.tasks.verify.workers import Verifiers

TOKENIZER = small_tokenizer()
BOTH = TaskEval(problems=100, greedy=True, samples=4, k=[1, 2, 4], temperature=1.3)
NEW = 12


def engine_of(**settings: Any) -> Engine:
    assert TOKENIZER.eos is not None
    return Engine(small_model(), eos=frozenset({TOKENIZER.eos}), tokenizer=TOKENIZER, burst=2, **settings)


def use(task: str = "Letters", name: str | None = None, split: str = "test", **args: Any) -> TaskUse:
    return TaskUse(task=f"eval_tasks:{task}", name=name, split=split, args=args)


def evaluated(
    *uses: TaskUse,
    settings: TaskEval = BOTH,
    engine: Engine | None = None,
    look: Callable[[], None] = lambda: None,
    generator: LocalGenerator | None = None,
    **changes: Any,
) -> Evaluation:
    generator = generator or LocalGenerator(engine or engine_of(), drive="caller")
    with Verifiers(uses) as judges:
        asked = ask(uses, judges.tasks, TOKENIZER, settings.problems)
        options = {"context": CONTEXT, "max_new_tokens": NEW, "seed": 3} | changes
        return pumped(generator, evaluate_tasks(generator, TOKENIZER, judges.verify, asked, settings, **options), look)


def test_evaluation_equals_a_plain_loop_over_the_engine():
    task, found = Letters(Letters.Args(size=7), "Letters"), evaluated(use(size=7))
    engine, right, passed = engine_of(), 0, []
    by_key = {record.key: record for record in found.records}
    for problem in task.problems("test"):
        assert isinstance(problem.prompt, str)
        prompt = tuple(TOKENIZER.encode_prompt(problem.prompt))
        for mode, temperature, n in (("greedy", 0.0, 1), ("samples", 1.3, 4)):
            seed = stream_key(stream_key(3, "evaluate", mode, problem.id), "turn", 0, 0) >> 1
            sampling = Sampling(temperature=temperature, max_new_tokens=NEW, stop=(".",), seed=seed)
            (result,) = engine.run([Request(prompt, sampling, n)])
            record = by_key[problem.id, mode]
            assert [answer.text for answer in record.answers] == [one.text for one in result.generations]
            assert [answer.tokens for answer in record.answers] == [len(one.tokens) for one in result.generations]
            verdicts = [task.verify(problem, Completion(one.text or "")) for one in result.generations]
            correct = sum(verdict.status == Status.CORRECT for verdict in verdicts)
            assert record.right == correct
            right += correct if mode == "greedy" else 0
            passed += [[pass_at_k(4, correct, k) for k in (1, 2, 4)]] if mode == "samples" else []
            assert record.prompt == problem.prompt
    assert found.metrics["eval/Letters/accuracy"] == pytest.approx(right / 7)
    assert 0 < right < 7  # else the test says little
    for place, k in enumerate((1, 2, 4)):
        assert found.metrics[f"eval/Letters/pass@{k}"] == pytest.approx(sum(row[place] for row in passed) / 7)
        assert found.metrics[f"eval/pass@{k}"] == found.metrics[f"eval/Letters/pass@{k}"]
    assert [record.key for record in found.records] == [
        (problem.id, mode) for problem in task.problems("test") for mode in ("greedy", "samples")
    ]


def test_answers_depend_on_problem_and_seed_alone():
    whole, part = evaluated(use(size=9)), evaluated(use(size=4), running=1, engine=engine_of(max_running=2))
    known = {record.key: [answer.text for answer in record.answers] for record in whole.records}
    for record in part.records:
        assert [answer.text for answer in record.answers] == known[record.key]
    other = {r.key: [a.text for a in r.answers] for r in evaluated(use(size=9), seed=4).records}
    assert all(known[key] == other[key] for key in known if key[1] == "greedy")
    assert sum(known[key] != other[key] for key in known if key[1] == "samples") >= 8
    # One seed for all, as in a system we know, gives the same answers again and again.
    drawn = [tuple(answers) for (_, mode), answers in known.items() if mode == "samples"]
    assert len(set(drawn)) == len(drawn)
    assert all(len(set(answers)) > 1 for answers in drawn)


def test_generator_with_its_own_thread_gives_the_same():
    expected = evaluated(use(size=5))

    async def run(generator: LocalGenerator) -> Evaluation:
        with Verifiers([use(size=5)]) as judges:
            asked = ask([use(size=5)], judges.tasks, TOKENIZER, 100)
            return await evaluate_tasks(
                generator, TOKENIZER, judges.verify, asked, BOTH, context=CONTEXT, max_new_tokens=NEW, seed=3
            )

    with LocalGenerator(engine_of(), drive="thread") as generator:
        assert untimed(asyncio.run(run(generator)).records) == untimed(expected.records)


def untimed(records: tuple[EvaluationRecord, ...]) -> list[Any]:
    return [
        (record.key, [(a.text, a.stop_reason, a.verdict.status, a.verdict.score) for a in record.answers])
        for record in records
    ]


def test_requests_at_work_never_exceed_the_bound():
    class Counting(LocalGenerator):
        now = most = 0

        async def generate(self, request: Request) -> Result:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().generate(request)
            finally:
                self.now -= 1

    generator = Counting(engine_of(), drive="caller")
    evaluated(use(size=40), settings=TaskEval(problems=40), generator=generator, running=5)
    assert generator.most == 5


def test_two_tasks_are_reported_apart_and_their_mean_counts_each_once():
    found = evaluated(use(name="few", size=2), use(name="many", size=8, length=7), use(name="train", split="train"))
    metrics = found.metrics
    assert {record.task for record in found.records} == {"few", "many", "train"}
    accuracies = [metrics[f"eval/{name}/accuracy"] for name in ("few", "many", "train")]
    assert len(set(accuracies)) > 1
    assert metrics["eval/accuracy"] == pytest.approx(sum(accuracies) / 3)
    assert metrics["eval/few/accuracy_se"] >= 0
    assert "eval/accuracy_se" not in metrics


def test_partial_score_is_no_right_answer_and_parts_count_every_answer():
    found = evaluated(use(size=12))
    outcome = found.outcomes["Letters"]["samples"]
    answers = [answer for record in found.records if record.mode == "samples" for answer in record.answers]
    assert outcome.statuses["wrong"] > 0
    assert outcome.accuracy.mean == pytest.approx(outcome.statuses["correct"] / len(answers))
    assert outcome.score == pytest.approx(sum(answer.verdict.score for answer in answers) / len(answers))
    assert outcome.score > outcome.accuracy.mean
    early = sum(answer.verdict.parts.get("early", 0.0) for answer in answers)
    assert outcome.parts["early"] == pytest.approx(early / len(answers))
    assert sum(outcome.statuses.values()) == len(answers) == 48


def test_truncated_answers_and_stop_strings_are_counted_by_why_they_ended():
    settings = TaskEval(problems=30, samples=2, temperature=3.0)
    found = evaluated(use(size=30), settings=settings, max_new_tokens=20)
    answers = [answer for record in found.records if record.mode == "samples" for answer in record.answers]
    cut = [answer for answer in answers if answer.stop_reason == "length"]
    assert 0 < len(cut) < len(answers)
    assert all(answer.tokens == 20 for answer in cut)
    assert found.metrics["eval/Letters/samples/truncated"] == pytest.approx(len(cut) / len(answers))
    assert any(answer.stop_reason == "stop" for answer in answers)
    assert not any("." in answer.text for answer in answers)
    assert found.metrics["eval/Letters/samples/tokens"] == pytest.approx(sum(a.tokens for a in answers) / len(answers))


def test_samples_alone_put_their_details_first():
    found = evaluated(use(), settings=TaskEval(problems=6, greedy=False, samples=3, k=[3]))
    assert "eval/accuracy" not in found.metrics
    assert {"eval/Letters/truncated", "eval/truncated", "eval/pass@3"} <= found.metrics.keys()


def test_prompt_without_room_for_an_answer_counts_as_wrong_and_is_told(caplog):
    with caplog.at_level(logging.WARNING, "palestra.evaluate"):
        found = evaluated(use(name="long", size=3, length=CONTEXT), use(size=3))
    assert "leaves no room" in caplog.text
    assert found.metrics["eval/long/accuracy"] == 0
    assert found.metrics["eval/long/pass@4"] == 0
    assert found.metrics["eval/long/no_room"] == 1
    assert found.metrics["eval/Letters/no_room"] == 0
    assert found.outcomes["long"]["greedy"].statuses == {"no_room": 3}
    # One token of room is room.
    close = evaluated(use(size=2, length=CONTEXT - 1))
    assert {answer.tokens for record in close.records for answer in record.answers} == {1}


def test_judge_that_always_fails_is_an_error_and_one_that_sometimes_fails_is_counted(caplog):
    with pytest.raises(PalestraError, match=r"failed on all 3 completions: ValueError: no verdict on Broken/test/0"):
        evaluated(use("Broken", size=3), settings=TaskEval())
    with caplog.at_level(logging.WARNING, "palestra.evaluate"):
        found = evaluated(use("HalfBroken", size=6), settings=TaskEval())
    assert found.metrics["eval/HalfBroken/error"] == 0.5
    assert found.metrics["eval/HalfBroken/accuracy"] <= 0.5
    assert "failed on 3 of 6 completions" in caplog.text
    assert sum(record.failed for record in found.records) == 3


def test_publish_in_the_middle_of_an_evaluation_is_an_error():
    engine = engine_of(max_running=2)
    other = small_model(seed=1).state_dict()
    looks = iter(range(10**9))

    def look() -> None:
        if next(looks) == 12:
            engine.publish(other, 7)

    with pytest.raises(PalestraError, match=r"versions \[0, 7\]"):
        evaluated(use(size=20), engine=engine, look=look)


def test_all_tokens_of_an_evaluation_are_of_the_version_that_was_published_before():
    engine = engine_of()
    engine.publish(small_model(seed=1).state_dict(), 5)
    assert untimed(evaluated(use(), engine=engine).records) != untimed(evaluated(use()).records)


def test_evaluation_beside_other_requests_of_the_same_engine_leaves_both_alone():
    """As in a trainer: rollouts go on while an evaluation is awaited, and one thread generates for both."""
    engine = engine_of(max_running=4)
    generator = LocalGenerator(engine, drive="caller")
    request = Request(tuple(TOKENIZER.encode("rollout")), Sampling(seed=9, max_new_tokens=60), n=3)
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(generator.generate(request))))
    thread.start()
    found = evaluated(use(size=10), generator=generator)
    while thread.is_alive():
        generator.work(0.01)
    thread.join()
    assert untimed(found.records) == untimed(evaluated(use(size=10)).records)
    assert results[0].generations == engine_of().run([request])[0].generations


def test_what_is_done_already_is_not_asked_again():
    whole = evaluated(use(size=8))
    done, kept = whole.records[:5], []
    rest = evaluated(use(size=8), done=done, keep=kept.append)
    assert untimed(rest.records) == untimed(whole.records)
    assert rest.metrics == whole.metrics
    assert {record.key for record in kept} == {record.key for record in whole.records[5:]}
    # Records of problems that are no longer asked are left out.
    fewer = evaluated(use(size=3), done=whole.records)
    assert untimed(fewer.records) == untimed(whole.records[:6])


def test_look_that_raises_cancels_everything_and_frees_the_engine():
    engine = engine_of()
    generator = LocalGenerator(engine, drive="caller")
    deadline = time.monotonic() + 60

    def look() -> None:
        assert time.monotonic() < deadline
        if engine.metrics()["running"] > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluated(use(size=50), generator=generator, look=look)
    engine.burst()
    metrics = engine.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["requests"]) == (0, 0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("evaluate")]


def test_engine_that_fails_ends_the_evaluation_with_its_error():
    engine = engine_of()
    broken = small_model().state_dict() | {"norm.weight": torch.full((32,), 3e38)}
    engine.publish(broken, 1)
    with pytest.raises(PalestraError, match="non-finite"):
        evaluated(use(), engine=engine)


def test_broken_off_answer_and_missing_answers_are_errors():
    async def broken_off(episode):
        return [replace(one, stop_reason="abort") for one in await single_turn(episode)]

    async def missing(episode):
        return (await single_turn(episode))[1:]

    with pytest.raises(PalestraError, match="aborted a completion"):
        evaluated(use(), workflow=broken_off)
    with pytest.raises(PalestraError, match="returned 0 of 1 completions"):
        evaluated(use(), workflow=missing)


def test_conversation_without_a_template_and_split_without_problems_are_refused():
    plain = small_tokenizer()
    plain.chat_template = None
    task = Letters(Letters.Args(chat=True), "Letters")
    with pytest.raises(UsageError, match="no chat template"):
        ask([use(chat=True)], {"Letters": task}, plain, 5)
    with pytest.raises(UsageError, match="has no problems"):
        ask([use(size=0)], {"Letters": Letters(Letters.Args(size=0), "Letters")}, plain, 5)


def test_same_id_for_two_problems_is_refused():
    class Twice(Letters):
        def problems(self, split):
            return [*super().problems(split), *super().problems(split)]

    with pytest.raises(UsageError, match="shared by several problems, such as Letters/test/0"):
        ask([use()], {"Letters": Twice(Letters.Args(), "Letters")}, TOKENIZER, 100)


def test_identity_tells_other_questions_apart():
    def identity(tokenizer=TOKENIZER, problems=100, **args: Any) -> dict[str, Any]:
        return ask([use(**args)], {"Letters": Letters(Letters.Args(**args), "Letters")}, tokenizer, problems)[
            0
        ].identity(tokenizer)

    base = identity()
    assert (base["problems"], base["of"], base["split"], base["stop"]) == (6, 6, "test", ["."])
    assert base["first_prompt_tokens"] == TOKENIZER.encode_prompt(base["first_prompt"])
    assert identity() == base
    hashes = [base, identity(length=6), identity(size=7), identity(problems=5)]
    assert len({one["prompts_sha256"] for one in hashes}) == 4
    assert identity(problems=5)["of"] == 6


def test_records_round_trip_and_a_torn_line_is_passed_over(tmp_path):
    verdict = Verdict(0.1 + 0.2, Status.UNPARSABLE, {"strict": 1 / 3}, 0.25, "namespaces", "é\n\u2028")
    records = [
        EvaluationRecord(
            "t/test/0",
            "t",
            "samples",
            'a "b"\n',
            3,
            (VerifiedCompletion("x\ny", 2, "stop", verdict), VerifiedCompletion("", 1, "eos", verdict)),
        ),
        EvaluationRecord("t/test/1", "t", "greedy", "", 900, ()),
    ]
    path = tmp_path / "answers.jsonl"
    write_records(path, records)
    assert read_records(path) == records
    path.write_text(path.read_text() + line(records[0])[:-7])
    assert read_records(path) == records
    assert read_records(tmp_path / "none.jsonl") == []
    path.write_text("nonsense\n" + line(records[0]))
    with pytest.raises(PalestraError, match=r"answers\.jsonl:1 is not a line of JSON"):
        read_records(path)
