"""Calls of tools in the middle of an answer: what is read, what is trained, what is judged; over real engines too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import torch
from scripted_generator import Script, Scripted
from tiny_server import running

from palestra.data.tokenizers import Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError
from palestra.generate.client import HttpGenerator
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.server import create_app
from palestra.generate.types import Generator, Sampling
from palestra.lm.batch import Batch, score
from palestra.lm.model import Transformer
from palestra.rollout.episode import Episode, encode_problem
from palestra.rollout.tools import tools
from palestra.rollout.types import Trajectory
from palestra.spec.kinds.posttrain import ToolsSpec
from palestra.spec.shape import Shape
from palestra.tasks.task import Completion, Problem, Status, Verdict

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
CONTEXT = 160
SUM = Problem("sums/train/1", "12+34=")
CALL, RESULT = "<calculator>12+34</calculator>", "<result>46</result>"


def judged(right: str = "46") -> Callable[[Problem, Completion], Any]:
    async def judge(problem: Problem, answer: Completion) -> Verdict:
        status = Status.CORRECT if answer.text == right else Status.WRONG
        return Verdict(float(status == Status.CORRECT), status, note=answer.text)

    return judge


def episode(generator: Generator, problem: Problem = SUM, **changes: Any) -> Episode:
    sampling = Sampling(**{"max_new_tokens": 100, "stop": ("\n",), **changes.pop("sampling", {})})
    tokenizer: Tokenizer = changes.pop("tokenizer", TOKENIZER)
    given = {"samples": 1, "seed": 5, "context": CONTEXT, "verify": judged(), **changes}
    prompt = encode_problem(problem, tokenizer)
    return Episode(problem, prompt, sampling=sampling, generator=generator, tokenizer=tokenizer, **given)


async def awaited(episode: Episode, **changes: Any) -> list[Trajectory]:
    return await tools(ToolsSpec(**{"name": "tools", **changes}))(episode)


def roll(script: Script, **changes: Any) -> tuple[Trajectory, Scripted]:
    """Of one sample that a script writes."""
    spec = {name: changes.pop(name) for name in ("tools", "calls") if name in changes}
    tokenizer: Tokenizer = changes.get("tokenizer", TOKENIZER)
    assert tokenizer.eos is not None
    generator = Scripted(tokenizer, script, frozenset({tokenizer.eos}))
    (one,) = asyncio.run(awaited(episode(generator, **changes), **spec))
    inside = [place for place, drawn in enumerate(one.loss_mask) if drawn]
    assert len(one.tokens) == len(one.loss_mask) == len(one.logprobs) == len(one.versions)
    for place, drawn in enumerate(one.loss_mask):
        assert (one.logprobs[place] < 0.0, one.versions[place]) == ((True, 7) if drawn else (False, -1))
    assert one.turns == ((len(encode_problem(SUM, tokenizer)), len(one.tokens)),)
    assert not inside or inside[0] == one.turns[0][0]
    return one, generator


def drawn_text(one: Trajectory) -> str:
    return TOKENIZER.decode([token for token, drawn in zip(one.tokens, one.loss_mask, strict=True) if drawn])


def told_text(one: Trajectory) -> str:
    """What was put in after the prompt."""
    begin = one.turns[0][0]
    pairs = zip(one.tokens[begin:], one.loss_mask[begin:], strict=True)
    return TOKENIZER.decode([token for token, drawn in pairs if not drawn])


def by_results(*parts: str) -> Script:
    """Writes part n after n results."""
    return lambda prompt, _: parts[min(prompt.count("</result>"), len(parts) - 1)]


def test_call_is_answered_masked_and_the_answer_behind_it_is_judged() -> None:
    one, generator = roll(by_results(CALL, "46\n"))
    assert one.completion == f"{CALL}{RESULT}46\n"
    assert (drawn_text(one), told_text(one)) == (f"{CALL}46\n", RESULT)
    assert (one.reward, one.verdict.note, one.stop_reason) == (1.0, "46", "stop")
    first, second = generator.requests
    assert one.tokens[: len(second.prompt)] == second.prompt
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert first.sampling.seed != second.sampling.seed


def test_answer_without_a_call_is_judged_whole() -> None:
    one, generator = roll(lambda prompt, _: "46\nand more")
    assert (one.completion, one.reward, one.stop_reason) == ("46\n", 1.0, "stop")
    assert len(generator.requests) == 1


def test_calls_beyond_the_limit_are_text() -> None:
    one, generator = roll(lambda prompt, _: f"{CALL}46\n", calls=2)
    assert one.completion == f"{CALL}{RESULT}{CALL}{RESULT}{CALL}46\n"
    assert [request.sampling.stop for request in generator.requests] == [
        ("\n", "</calculator>"),
        ("\n", "</calculator>"),
        ("\n",),
    ]
    assert one.verdict.note == f"{CALL}46"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("<calculator>1/0</calculator>", "error: division by zero"),
        ("<calculator>9**9**9</calculator>", "error: a number is too large or too small"),
        ("<calculator></calculator>", "error: only numbers, parentheses and + - * / // % ** are supported"),
        ("12+34</calculator>", "error: there is no <calculator> before </calculator>"),
        ("<calculator>5<calculator>1+1</calculator>", "2"),
    ],
)
def test_call_that_is_wrong_is_told_what_was_wrong(call: str, said: str) -> None:
    one, _ = roll(by_results(call, "46\n"))
    assert told_text(one) == f"<result>{said}</result>"
    assert one.reward == 1.0


def test_stop_string_of_the_task_inside_a_call_ends_neither_the_call_nor_the_answer() -> None:
    """The tokens are as if nothing had been interrupted; the text behind is cut as without a call."""

    def script(prompt: str, _: int) -> str:
        if RESULT in prompt:
            return "46\nmore"
        return "12+34 </calculator>" if prompt.endswith("<calculator>\n") else "<calculator>\n never read"

    one, generator = roll(script)
    assert one.completion == f"<calculator>\n12+34 </calculator>{RESULT}46\n"
    assert told_text(one) == RESULT
    assert [request.sampling.stop for request in generator.requests] == [
        ("\n", "</calculator>"),
        ("</calculator>",),
        ("\n", "</calculator>"),
    ]
    assert one.reward == 1.0


def test_stop_string_of_the_task_inside_a_call_is_part_of_the_input() -> None:
    def script(prompt: str, _: int) -> str:
        if "</result>" in prompt:
            return "46;"
        return "34</calculator>" if prompt.endswith("12+") else "<calculator>12+"

    one, _ = roll(script, sampling={"stop": ("+", ";")})
    assert one.completion == f"{CALL}{RESULT}46;"


def test_judge_sees_all_that_was_read_before_the_answer() -> None:
    seen: list[Completion] = []

    async def judge(problem: Problem, answer: Completion) -> Verdict:
        seen.append(answer)
        return Verdict(1.0, Status.CORRECT)

    one, _ = roll(by_results(CALL, "46\n"), verify=judge)
    (answer,) = seen
    assert answer.prompt_text == f"12+34={CALL}{RESULT}"
    assert answer.prompt_ids + answer.completion_ids == one.tokens
    assert not answer.truncated


def test_stop_string_of_the_task_that_a_token_reaches_beyond_keeps_all_of_the_call() -> None:
    """A token may hold more than the stop string: what is behind it belongs to the input."""
    tokenizer = train_bpe(["\n\n12+34\n\n12+34 <calculator> </calculator> result"] * 20, 330)
    (double,) = tokenizer.encode("\n\n")

    def script(prompt: str, _: int) -> str:
        if "</result>" in prompt:
            return "46\n"
        return "1+1</calculator>" if prompt.endswith("\n\n") else "<calculator>\n\n"

    one, generator = roll(script, tokenizer=tokenizer)
    assert double in generator.requests[1].prompt
    assert one.completion == "<calculator>\n\n1+1</calculator><result>2</result>46\n"


def test_end_of_the_turn_inside_a_call_ends_the_answer() -> None:
    one, generator = roll(lambda prompt, _: "<calculator>1+<|endoftext|>")
    assert (one.stop_reason, one.reward, len(generator.requests)) == ("eos", 0.0, 1)
    assert told_text(one) == ""


@pytest.mark.parametrize("after", range(4))
def test_limit_on_new_tokens_is_of_the_whole_turn_without_results(after: int) -> None:
    """With no token left after a call the tool is not run: nothing would read it."""
    one, _ = roll(by_results(CALL, "4 6 8\n"), sampling={"max_new_tokens": len(CALL) + after})
    assert one.sampled == len(CALL) + after
    assert told_text(one) == (RESULT if after else "")
    assert one.stop_reason == "length"
    assert one.verdict.note == "4 6 8"[:after]
    assert one.loss_mask[-1], "no trajectory of this workflow ends in a result that nobody has read"


def test_limit_on_new_tokens_reached_in_a_call_at_a_stop_string_cuts_the_answer_off() -> None:
    one, generator = roll(lambda prompt, _: "<calculator>\n", sampling={"max_new_tokens": len("<calculator>\n")})
    assert (one.stop_reason, len(generator.requests)) == ("length", 1)


@pytest.mark.parametrize(("room", "reads"), [(0, False), (1, True)])
def test_result_that_does_not_fit_the_context_with_a_token_is_left_out(room: int, reads: bool) -> None:
    context = len(encode_problem(SUM, TOKENIZER)) + len(CALL) + len(RESULT) + room
    one, _ = roll(by_results(CALL, "46\n"), context=context)
    assert told_text(one) == (RESULT if reads else "")
    assert (one.stop_reason, one.verdict.note) == ("length", "4" if reads else "")
    assert len(one.tokens) <= context


def test_result_that_the_tokenizer_cannot_write_is_empty_and_ends_nothing() -> None:
    tokenizer = character_tokenizer("0123456789+-=/\n<>calutorse")
    one, _ = roll(by_results("<calculator>1/0</calculator>", "46\n"), tokenizer=tokenizer)
    assert one.completion == "<calculator>1/0</calculator><result></result>46\n"


def test_tags_that_the_tokenizer_cannot_write_are_refused_before_anything_is_generated() -> None:
    tokenizer = character_tokenizer("0123456789+-=\n")
    with pytest.raises(UsageError, match=r"cannot write the tags of tools \(<calculator></calculator><result>.*'/'"):
        roll(by_results(CALL), tokenizer=tokenizer)


def test_samples_of_a_group_call_on_their_own() -> None:
    def script(prompt: str, index: int) -> str:
        return "46\n" if "</result>" in prompt else f"<calculator>{index}+46</calculator>"

    generator = Scripted(TOKENIZER, script)
    found = asyncio.run(awaited(episode(generator, samples=4)))
    assert [told_text(one) for one in found] == [f"<result>{46 + index}</result>" for index in range(4)]
    assert [request.n for request in generator.requests] == [4, 1, 1, 1, 1]
    assert len({request.sampling.seed for request in generator.requests}) == 5


# ---- over real engines: a model that was taught to call

SUMS = [(7, 5), (3, 4), (9, 8), (2, 6)]


def taught(tokenizer: Tokenizer) -> Transformer:
    """A tiny model that has learned by heart how to call the calculator, and to say what it reads."""
    torch.manual_seed(0)
    texts = [f"{a}+{b}=<calculator>{a}+{b}</calculator><result>{a + b}</result>{a + b}\n" for a, b in SUMS]
    shape = Shape(layers=2, width=48, heads=4, mlp=96, context=CONTEXT, vocab=tokenizer.vocab_size)
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    batch = Batch.pack([tokenizer.encode(text) for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(250):
        loss = -(score(model, batch).logprobs * batch.loss_mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.1
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return taught(TOKENIZER)


@asynccontextmanager
async def local(engine: Engine) -> AsyncIterator[Generator]:
    with LocalGenerator(engine) as generator:
        yield generator


@asynccontextmanager
async def over_http(engine: Engine) -> AsyncIterator[Generator]:
    with (
        LocalGenerator(engine) as served,
        running(create_app(served, TOKENIZER, model_name="taught", api_key=None)) as address,
    ):
        async with HttpGenerator(address) as generator:
            yield generator


@pytest.mark.parametrize("opened", [local, over_http], ids=["local", "http"])
def test_taught_model_of_a_real_engine_calls_and_reads_the_result(
    opened: Callable[[Engine], AbstractAsyncContextManager[Generator]], model: Transformer
) -> None:
    assert TOKENIZER.eos is not None

    async def run() -> list[list[Trajectory]]:
        engine = Engine(model, eos=frozenset({TOKENIZER.eos or 0}), tokenizer=TOKENIZER)
        async with opened(engine) as generator:
            asked = [
                episode(
                    generator,
                    Problem(f"sums/train/{a}{b}", f"{a}+{b}="),
                    samples=2,
                    verify=judged(str(a + b)),
                    sampling={"temperature": 0.0},
                )
                for a, b in SUMS
            ]
            return await asyncio.gather(*(awaited(one) for one in asked))

    for (a, b), group in zip(SUMS, asyncio.run(run()), strict=True):
        for one in group:
            assert one.completion == f"<calculator>{a}+{b}</calculator><result>{a + b}</result>{a + b}\n"
            assert told_text(one) == f"<result>{a + b}</result>"
            assert one.reward == 1.0


def test_draws_after_results_have_the_log_probabilities_of_the_whole_trajectory(model: Transformer) -> None:
    """At a high temperature calls come out in all shapes; what is drawn is drawn after exactly the tokens before it."""

    async def run() -> list[Trajectory]:
        engine = Engine(model, eos=frozenset({TOKENIZER.eos or 0}), tokenizer=TOKENIZER)
        async with local(engine) as generator:
            asked = episode(generator, Problem("s/train/0", "7+5="), samples=16, sampling={"temperature": 1.3})
            return await awaited(asked)

    found = asyncio.run(run())
    assert sum(told_text(one) != "" for one in found) >= 4
    batch = Batch.pack([one.tokens for one in found], [one.loss_mask for one in found])
    given = torch.tensor([x for one in found for x in one.logprobs])
    torch.testing.assert_close(score(model, batch, temperature=1.3).logprobs, given, atol=2e-4, rtol=0)
