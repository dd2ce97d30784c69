"""Several tries at a problem: token in, token out, over the engine here and behind HTTP; what ends the tries."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_generator import Scripted
from tiny_server import CONTEXT, KEY, TOKENIZER, serving, tiny_engine

from palestra.data.chat import encode_chat, end_of_turn
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Generator, Request, Result, Sampling
from palestra.lm.batch import Batch
from palestra.lm.engine import logprobs
from palestra.rollout.episode import Episode, Starter, encode_problem
from palestra.rollout.types import Trajectory
from palestra.rollout.workflows import multi_turn
from palestra.spec.kinds.posttrain import MultiTurnSpec
from palestra.tasks.task import Completion, Problem, Status, Verdict, make_task

PLAIN = Problem("sums/train/1", "What is 2 plus 3?")
CHAT = Problem("sums/train/1", ({"role": "user", "content": "What is 2 plus 3?"},))
WRONG = "No. Again."
END = end_of_turn(TOKENIZER)
Judge = Callable[[Problem, Completion], Any]
Open = Callable[[], AbstractAsyncContextManager[Generator]]


class Watched:
    """Another generator, and what it was asked."""

    def __init__(self, inner: Generator):
        self.inner, self.requests = inner, []

    async def generate(self, request: Request) -> Result:
        self.requests.append(request)
        return await self.inner.generate(request)


@asynccontextmanager
async def local() -> AsyncIterator[Generator]:
    with LocalGenerator(tiny_engine()) as generator:
        yield generator


@asynccontextmanager
async def over_http() -> AsyncIterator[Generator]:
    with serving() as (address, _):
        async with HttpGenerator(address, KEY) as generator:
            yield generator


async def never(problem: Problem, answer: Completion) -> Verdict:
    return Verdict(0.0, Status.WRONG)


def when(right: Callable[[Completion], bool], score: float = 1.0) -> Judge:
    async def judge(problem: Problem, answer: Completion) -> Verdict:
        return Verdict(score, Status.CORRECT) if right(answer) else Verdict(0.0, Status.WRONG)

    return judge


def episode(generator: Any, judge: Judge, problem: Problem = PLAIN, **changes: Any) -> Episode:
    tokenizer: Tokenizer = changes.pop("tokenizer", TOKENIZER)
    sampling = Sampling(**{"max_new_tokens": 12, **changes.pop("sampling", {})})
    given = {"samples": 3, "seed": 5, "context": CONTEXT, **changes}
    prompt = encode_problem(problem, tokenizer)
    return Episode(problem, prompt, sampling=sampling, generator=generator, verify=judge, tokenizer=tokenizer, **given)


def spec(**changes: Any) -> MultiTurnSpec:
    return MultiTurnSpec(**{"name": "multi_turn", "turns": 3, "feedback": WRONG, **changes})


def roll(episode: Episode, **changes: Any) -> list[Trajectory]:
    return asyncio.run(_awaited(episode, spec(**changes)))


async def _awaited(episode: Episode, spec: MultiTurnSpec) -> list[Trajectory]:
    return await multi_turn(spec)(episode)


def rolled(opened: Open, judge: Judge, problem: Problem, **changes: Any) -> tuple[list[Trajectory], list[Request]]:
    """Over a real engine; with what it was asked."""

    async def run() -> tuple[list[Trajectory], list[Request]]:
        async with opened() as generator:
            watched = Watched(generator)
            return await _awaited(episode(watched, judge, problem, **changes), spec()), watched.requests

    return asyncio.run(run())


def check_arrays(one: Trajectory, prompt: int) -> None:
    """What was drawn is masked in, by its turns; everything else has no log-probability and no version."""
    inside = {place for begin, end in one.turns for place in range(begin, end)}
    assert len(one.tokens) == len(one.loss_mask) == len(one.logprobs) == len(one.versions)
    assert list(one.loss_mask) == [place in inside for place in range(len(one.tokens))]
    assert not any(one.loss_mask[:prompt])
    for place, drawn in enumerate(one.loss_mask):
        if not drawn:
            assert (one.logprobs[place], one.versions[place]) == (0.0, -1)
        else:
            assert one.logprobs[place] < 0.0
            assert one.versions[place] >= 0


@pytest.mark.parametrize("opened", [local, over_http], ids=["local", "http"])
@pytest.mark.parametrize("problem", [PLAIN, CHAT], ids=["plain", "chat"])
def test_tries_of_a_real_engine_give_exactly_the_tokens_it_read_and_drew(opened: Open, problem: Problem) -> None:
    found, requests = rolled(opened, never, problem)
    prompt = encode_problem(problem, TOKENIZER)
    assert len(found) == 3
    assert len({one.tokens for one in found}) == 3, "samples draw of their own"
    asked = {request.prompt for request in requests[1:]}
    assert len({request.sampling.seed for request in requests}) == 7, "every turn of every sample is drawn of its own"
    assert [request.n for request in requests] == [3, *[1] * 6]
    for one in found:
        check_arrays(one, len(prompt))
        assert one.tokens[: len(prompt)] == prompt
        assert len(one.turns) == 3
        assert one.sampled == sum(end - begin for begin, end in one.turns)
        for begin, _ in one.turns[1:]:
            assert one.tokens[:begin] in asked, "what the generator read is in the trajectory, token by token"
    # The log-probabilities are those of the trajectory as a whole: the same model scores the same tokens.
    batch = Batch.pack([one.tokens for one in found], [one.loss_mask for one in found])
    scored = logprobs(tiny_engine().model, batch, micro_tokens=4096, temperature=1.0)
    drawn = torch.tensor([x for one in found for x in one.logprobs])
    torch.testing.assert_close(scored, drawn, atol=2e-4, rtol=0)


def test_tries_over_http_are_those_of_the_engine_here_bit_for_bit() -> None:
    assert rolled(local, never, CHAT)[0] == rolled(over_http, never, CHAT)[0]


def test_tries_with_another_seed_draw_other_tokens_in_every_turn() -> None:
    first, second = (rolled(local, never, PLAIN, seed=seed)[0] for seed in (5, 6))
    assert rolled(local, never, PLAIN, seed=5)[0] == first
    for ours, theirs in zip(first, second, strict=True):
        begin, end = ours.turns[0]
        assert ours.tokens[begin:end] != theirs.tokens[begin:end]


def test_plain_prompts_after_a_wrong_answer_have_the_feedback_on_a_line_of_its_own() -> None:
    found = roll(episode(Scripted(TOKENIZER, lambda prompt, _: "four"), never, sampling={"max_new_tokens": 4}))
    assert found[0].completion == f"four\n{WRONG}\nfour\n{WRONG}\nfour"
    assert TOKENIZER.decode(found[0].tokens) == PLAIN.prompt + found[0].completion


@pytest.mark.parametrize("ended", [True, False], ids=["eos", "length"])
def test_conversation_after_a_wrong_answer_goes_on_as_the_template_writes_it(ended: bool) -> None:
    """Whether the model closed its turn itself or was cut off: the tokens are those of the whole conversation."""
    assert END is not None
    generator = Scripted(TOKENIZER, lambda prompt, _: "four<|im_end|>", frozenset({END}))
    (one, *_) = roll(episode(generator, never, CHAT, sampling={"max_new_tokens": 12 if ended else 4}))
    messages = list(CHAT.prompt)
    for _ in range(2):
        messages += [{"role": "assistant", "content": "four"}, {"role": "user", "content": WRONG}]
    whole = encode_chat(TOKENIZER, messages, add_generation_prompt=True).tokens
    assert list(one.tokens) == [*whole, *TOKENIZER.encode("four"), *([END] if ended else [])]
    check_arrays(one, len(encode_problem(CHAT, TOKENIZER)))
    closings = [one.loss_mask[place] for place, token in enumerate(one.tokens) if token == END]
    # Of the question, of an answer, of the feedback, …: a closing token is trained where the model drew it.
    assert closings == [False, ended, False, ended, False, *([True] if ended else [])]
    assert one.stop_reason == ("eos" if ended else "length")


def test_stop_string_in_a_conversation_is_followed_by_the_masked_end_of_the_turn() -> None:
    generator = Scripted(TOKENIZER, lambda prompt, _: "four. Or five", frozenset({END or 0}))
    (one, *_) = roll(episode(generator, never, CHAT, sampling={"stop": (".",)}), turns=2)
    begin, end = one.turns[0]
    assert TOKENIZER.decode(one.tokens[begin:end]) == "four."
    assert (one.tokens[end], one.loss_mask[end]) == (END, False)
    assert one.stop_reason == "stop"


@pytest.mark.parametrize(("right_at", "reward", "turns"), [(1, 0.8, 1), (2, 0.4, 2), (3, 0.2, 3), (9, 0.0, 3)])
def test_reward_of_a_later_try_is_discounted_once_for_each_further_turn(
    right_at: int, reward: float, turns: int
) -> None:
    answers = {1: "one", 2: "two", 3: "six"}

    def script(prompt: str, index: int) -> str:
        return answers[1 + prompt.count(WRONG)]

    judge = when(lambda answer: answer.text == answers.get(right_at), score=0.8)
    found = roll(episode(Scripted(TOKENIZER, script), judge, sampling={"max_new_tokens": 3}), discount=0.5)
    assert [one.reward for one in found] == pytest.approx([reward] * 3)
    assert {len(one.turns) for one in found} == {turns}
    assert {one.verdict.status for one in found} == {Status.CORRECT if right_at <= 3 else Status.WRONG}
    assert {one.verdict.score for one in found} == {0.8 if right_at <= 3 else 0.0}, (
        "the verdict is as the judge gave it"
    )


def test_judge_of_a_later_try_sees_that_answer_and_all_that_was_read_before_it() -> None:
    seen: list[Completion] = []

    async def judge(problem: Problem, answer: Completion) -> Verdict:
        seen.append(answer)
        return Verdict(0.0, Status.UNPARSABLE)

    (one,) = roll(episode(Scripted(TOKENIZER, lambda p, _: "hm"), judge, samples=1, sampling={"max_new_tokens": 2}))
    assert [answer.text for answer in seen] == ["hm"] * 3
    assert [answer.prompt_ids for answer in seen] == [one.tokens[:begin] for begin, _ in one.turns]
    assert seen[1].prompt_text == f"{PLAIN.prompt}hm\n{WRONG}\n"
    assert all(answer.truncated for answer in seen)


def test_answer_that_could_not_be_judged_is_not_called_wrong() -> None:
    async def broken(problem: Problem, answer: Completion) -> Verdict:
        return Verdict(0.0, Status.ERROR, note="the judge fell over")

    found = roll(episode(Scripted(TOKENIZER, lambda p, _: "four"), broken, sampling={"max_new_tokens": 4}))
    assert all(len(one.turns) == 1 and WRONG not in one.completion for one in found)


def test_tries_end_where_the_context_has_no_room_for_another() -> None:
    generator = Scripted(TOKENIZER, lambda p, _: "four" * 20)
    prompt, told = len(encode_problem(PLAIN, TOKENIZER)), len(f"\n{WRONG}\n")
    # Room for the feedback and one token; then for the feedback alone.
    for context, turns in ((prompt + 10 + told + 1, 2), (prompt + 10 + told, 1)):
        found = roll(episode(generator, never, context=context, sampling={"max_new_tokens": 10}))
        assert {len(one.turns) for one in found} == {turns}
        assert {len(one.tokens) for one in found} == {context if turns == 2 else prompt + 10}
        assert {one.stop_reason for one in found} == {"length"}


def test_failure_of_one_sample_ends_the_others() -> None:
    ended: list[str] = []

    async def judge(problem: Problem, answer: Completion) -> Verdict:
        if answer.text == "0":
            raise ValueError("no such judge")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(answer.text)
            raise
        return Verdict(0.0, Status.WRONG)

    async def run() -> None:
        async with asyncio.timeout(20):
            with pytest.raises(ValueError, match="no such judge"):
                await _awaited(episode(Scripted(TOKENIZER, lambda p, i: str(i)), judge), spec())
            await asyncio.sleep(0)  # for those that were ended
            assert sorted(ended) == ["1", "2"]

    asyncio.run(run())


def test_request_that_was_aborted_is_not_tried_again() -> None:
    found = roll(replace(episode(Scripted(TOKENIZER, lambda p, _: ""), never), samples=1))
    assert [(one.stop_reason, one.turns, one.sampled) for one in found] == [("abort", (), 0)]


@pytest.mark.parametrize("changed", [{"top_k": 5}, {"logit_bias": {3: 1.0}, "presence_penalty": 0.5}])
def test_sampling_that_the_trainer_cannot_reproduce_is_refused_by_name_where_it_trains(changed: dict[str, Any]) -> None:
    starter = Starter(
        tasks={PLAIN.task: make_task("countdown")},
        workflow=multi_turn(spec()),
        generator=Scripted(TOKENIZER, lambda prompt, index: "a"),
        verify=never,
        tokenizer=TOKENIZER,
        sampling=Sampling(max_new_tokens=12, **changed),
        samples=2,
        seed=0,
        context=CONTEXT,
        max_prompt=CONTEXT,
    )
    with pytest.raises(UsageError, match=f"{', '.join(changed)}: the trainer computes log-probabilities"):
        roll(starter.episode(PLAIN, 0))
    trajectories, _ = rolled(local, never, PLAIN, sampling=changed)  # an evaluation may ask for it
    assert len(trajectories) == 3
