"""A language model as a judge: what it is asked, what is made of its words, models in this process and behind URLs."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from hypothesis import given
from hypothesis import strategies as st
from small_lm import CONTEXT, small_model, small_tokenizer
from tiny_lm import Lab, write_rows
from tiny_server import KEY, TOKENIZER, running, serving, tiny_engine

from palestra.data.chat import encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate import types as generate
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.lm.hf import save_pretrained
from palestra.spec.tasks import JudgeSpec, RewardSpec, TaskUse
from palestra.tasks.rewards.llm_judge import PROMPT, LlmJudge, OpenAiChat, asks, filled, make_judge, score_in
from palestra.tasks.rewards.rewards import open_generator, whole_model
from palestra.tasks.task import Completion, Problem, Status, Verdict
from palestra.tasks.verify.workers import Verifiers

PROBLEM = Problem("sums/train/0", "2+2=", {"answer": "4", "level": 2, "steps": ["a", {"b": 1}]})


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("0.8", 0.8),
        (" 1", 1.0),
        ("0", 0.0),
        ("Score: .5.", 0.5),
        ("**0.75**", 0.75),
        ("1.0", 1.0),
        ("1.", 1.0),
        ("I give it 0.25, not 0.9", 0.25),
        ("2 points of 3, so 0.6", 0.6),
        ("8/10", 0.8),
        ("8 out of 10", 0.8),
        ("1/10", 0.1),
        ("0/1", 0.0),
        ("80%", 0.8),
        ("1e-1", 0.1),
        ("<think>maybe 0.3</think>0.9", 0.9),
        ("10", None),
        ("1.5", None),
        ("-0.5", None),
        ("−1", None),
        ("42 or 7", None),
        ("v0.5 of a1", None),
        ("0.85x", None),
        ("1/0", None),
        ("150%", None),
        ("1.0.0", 1.0),
        ("", None),
        ("good", None),
    ],
)
def test_score_in_what_a_judge_said(said: str, score: float | None):
    assert score_in(said) == (None if score is None else pytest.approx(score))


@given(st.floats(0, 1), st.text(alphabet="abc :\n", max_size=10))
def test_score_in_a_number_from_0_to_1_is_that_number(score: float, before: str):
    assert score_in(f"{before} {score!r}") == score
    assert score_in(f"{before} {score + 1.001!r} {score!r}") == score


def test_filled_puts_in_prompt_completion_and_fields():
    template = "{prompt}|{completion}|{answer}|{level}|{steps}"
    assert filled(template, PROBLEM, Completion("four")) == '2+2=|four|4|2|["a", {"b": 1}]'


def test_filled_leaves_braces_alone_in_template_and_answers():
    template = 'Reply {"score": x} or {unknown} or {} or {0!r} or \\frac{1}{2}: {completion}'
    answer = Completion("{prompt} {answer} {0} {{level}} %s \\1")
    assert filled(template, PROBLEM, answer) == template.replace("{completion}", answer.text)


def test_filled_by_default_shows_prompt_and_answer():
    text = filled(PROMPT, PROBLEM, Completion("four"))
    assert "Question:\n2+2=\n" in text
    assert "Answer:\nfour\n" in text


def test_judge_that_would_not_see_the_answer_is_refused():
    with pytest.raises(UsageError, match=r"expected \{completion\}"):
        LlmJudge(_never, "Is {prompt} good?")


async def _never(text: str) -> str:
    raise AssertionError(text)


def verdicts(judge: LlmJudge, *texts: str, problem: Problem = PROBLEM) -> list[Verdict]:
    async def all_at_once() -> list[Verdict]:
        return await asyncio.gather(*(judge.verify(problem, Completion(text)) for text in texts))

    return asyncio.run(all_at_once())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """With a run `grader` that says 1 after `yes …?` and 0.2 after `no …?`."""
    made = Lab(tmp_path_factory.mktemp("judge"))
    words = ["red", "green", "blue", "old", "new", "cat", "dog", "hen"]
    rows = [
        {"prompt": f"{first} {word}?", "completion": grade}
        for word in words
        for first, grade in (("yes", "1"), ("no", "0.2"))
    ]
    path = write_rows(made.path / "grades.jsonl", rows)
    made.run(
        "sft",
        name="grader",
        data__train={"grades": {"path": path}},
        train__steps=120,
        every={"log": "20 steps", "eval": "120 steps", "checkpoint": "120 steps"},
    )
    return made


def test_judge_by_a_run_a_checkpoint_and_a_folder_gives_what_it_has_learned(lab: Lab):
    folder = whole_model("grader", lab.root)
    for ref in ("grader", str(folder.parent), str(folder)):
        spec = JudgeSpec(model=ref, prompt="{completion}?", max_new_tokens=5)
        judge = make_judge(spec, lab.root, open_generator)
        try:
            good, bad = verdicts(judge, "yes cat", "no hen")
        finally:
            judge.close()
        assert (good.score, good.status, good.parts) == (1.0, Status.CORRECT, {"judge": 1.0})
        assert (bad.score, bad.status, bad.parts) == (0.2, Status.WRONG, {"judge": 0.2})
        assert good.note == "the judge said '1'"


def test_judges_ask_the_model_for_many_answers_at_once(lab: Lab):
    judge = JudgeSpec(model="grader", prompt="{completion}?", max_new_tokens=5)
    use = TaskUse(task="arithmetic", name="sums", reward=RewardSpec(judge=judge))
    texts = ["yes cat", "no dog"] * 20

    async def all_at_once(judges: Verifiers) -> list[Verdict]:
        return await asyncio.gather(*(judges.verify(PROBLEM, Completion(text)) for text in texts))

    with Verifiers([use], root=lab.root) as judges:
        found = asyncio.run(all_at_once(judges))
    assert [one.score for one in found] == [1.0, 0.2] * 20
    assert all(one.seconds > 0 for one in found)


def test_judge_whose_model_the_caller_opens(lab: Lab):
    asked = []

    def opened(ref: str, root: Path) -> LocalGenerator:
        asked.append((ref, root))
        return open_generator("grader", root)

    judge = make_judge(JudgeSpec(model="adapters", prompt="{completion}?", max_new_tokens=5), lab.root, opened)
    assert verdicts(judge, "yes red")[0].score == 1.0
    assert asked == [("adapters", lab.root)]
    judge.close()


def plain_tokenizer() -> Tokenizer:
    """Letters alone, without a chat template."""
    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def test_judge_that_says_no_number_is_unparsable_and_one_that_cannot_read_an_error():
    engine = Engine(small_model(), eos=frozenset(), tokenizer=plain_tokenizer())
    with LocalGenerator(engine) as generator:
        judge = LlmJudge(asks(generator, plain_tokenizer(), max_new_tokens=4), "{completion}")
        words, long = verdicts(judge, "hello", "a" * (CONTEXT + 1))
    assert (words.score, words.status) == (0.0, Status.UNPARSABLE)
    assert "the judge gave no score: '" in words.note
    assert long.status == Status.ERROR
    assert "the judge cannot read it" in long.note


def test_asks_without_a_chat_template_goes_on_from_the_text():
    tokenizer = plain_tokenizer()
    engine = Engine(small_model(), eos=frozenset(), tokenizer=tokenizer)
    with LocalGenerator(engine) as generator:
        said = asyncio.run(asks(generator, tokenizer, max_new_tokens=6)("Once"))
    sampling = generate.Sampling(temperature=0.0, max_new_tokens=6)
    twin = Engine(small_model(), eos=frozenset(), tokenizer=tokenizer)
    (expected,) = twin.run([generate.Request(tuple(tokenizer.encode_prompt("Once")), sampling)])
    assert said == expected.generations[0].text


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"adapter_config.json": "{}"}, "has adapters without their base model"),
        ({"notes.txt": ""}, "judge"),
        ({"meta.json": "{}"}, "has no language model"),
    ],
)
def test_model_folder_of_something_else_is_refused(tmp_path: Path, files: dict[str, str], reason: str):
    folder = tmp_path / "judge"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(UsageError, match=reason):
        whole_model(str(folder), tmp_path / "runs")


def test_judge_without_a_tokenizer_is_refused(tmp_path: Path):
    save_pretrained(tmp_path / "model", small_model(), tokenizer=None, eos=())
    with pytest.raises(UsageError, match="it has no tokenizer"):
        make_judge(JudgeSpec(model=str(tmp_path / "model")), tmp_path, open_generator)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as (address, _):
        yield address


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/v1#tiny"])
def test_judge_behind_a_url_says_what_the_engine_says(server: str, path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    template = "Is {completion} good?"
    judge = make_judge(JudgeSpec(model=server + path, prompt=template, max_new_tokens=24), Path("runs"), _unused)
    texts = ["the sea", "a 7", "Rome"]
    found = verdicts(judge, *texts)
    for text, verdict in zip(texts, found, strict=True):
        messages = [{"role": "user", "content": template.replace("{completion}", text)}]
        prompt = encode_chat(TOKENIZER, messages, add_generation_prompt=True).tokens
        sampling = generate.Sampling(temperature=0.0, max_new_tokens=24)
        (said,) = tiny_engine().run([generate.Request(tuple(prompt), sampling)])[0].generations
        assert repr(said.text)[:50] in verdict.note
        assert verdict.score == (score_in(said.text or "") or 0.0)
    judge.close()


def _unused(ref: str, root: Path) -> LocalGenerator:
    raise AssertionError(ref)


def test_judge_behind_a_url_without_its_key_is_a_usage_error(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UsageError, match="refuses: status 401"):
        asyncio.run(OpenAiChat(server, max_new_tokens=4).ask("hi"))


def test_judge_behind_a_url_with_a_model_it_has_not_is_a_usage_error(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(UsageError, match="refuses: status 404"):
        asyncio.run(OpenAiChat(f"{server}/v1#huge", max_new_tokens=4).ask("hi"))


def test_judge_behind_a_url_that_refuses_one_answer_fails_for_that_one(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    use = TaskUse(
        task="arithmetic", name="sums", reward=RewardSpec(judge=JudgeSpec(model=server, prompt="{completion}"))
    )
    with Verifiers([use]) as judges:
        verdict = asyncio.run(judges.verify(PROBLEM, Completion("a" * 500)))
    assert verdict.status == Status.ERROR
    assert "does not answer: status 400" in verdict.note


class Other:
    """A server of somebody else's that fails now and then."""

    def __init__(self) -> None:
        self.app, self.asked = FastAPI(), []
        self.failures, self.models, self.answer = 0, ["a"], {"choices": [{"message": {"content": "0.5"}}]}
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"])
        self.app.add_api_route("/text/chat/completions", self._text, methods=["POST"])

    async def _models(self) -> dict[str, Any]:
        return {"data": [{"id": name} for name in self.models]}

    async def _chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        if self.failures:
            self.failures -= 1
            return JSONResponse({"error": "busy"}, status_code=503)
        return JSONResponse(self.answer)

    async def _text(self) -> Response:
        return PlainTextResponse("hello")


@pytest.fixture
def other() -> Iterator[tuple[str, Other]]:
    found = Other()
    with running(found.app) as address:
        yield address, found


def test_openai_chat_asks_greedily_and_again_after_a_busy_server(other: tuple[str, Other]):
    address, server = other
    server.failures = 2
    assert asyncio.run(OpenAiChat(address, max_new_tokens=4, waits=(0.0, 0.0)).ask("hi")) == "0.5"
    (first, *_) = server.asked
    assert first == {"model": "a", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 4}
    assert len(server.asked) == 3
    server.failures = 2
    with pytest.raises(PalestraError, match="does not answer: status 503"):
        asyncio.run(OpenAiChat(address, max_new_tokens=4, waits=(0.0,)).ask("hi"))


@pytest.mark.parametrize("models", [[], ["a", "b"]])
def test_openai_chat_with_several_models_wants_a_name(other: tuple[str, Other], models: list[str]):
    address, server = other
    server.models = models
    with pytest.raises(UsageError, match="expected one model at"):
        asyncio.run(OpenAiChat(address, max_new_tokens=4).ask("hi"))
    assert asyncio.run(OpenAiChat(f"{address}/v1#b", max_new_tokens=4).ask("hi")) == "0.5"
    assert server.asked[-1]["model"] == "b"


def test_openai_chat_answers_that_make_no_sense_are_told(other: tuple[str, Other]):
    address, server = other
    server.answer = {"choices": []}
    with pytest.raises(PalestraError, match="without a message"):
        asyncio.run(OpenAiChat(address, max_new_tokens=4).ask("hi"))
    with pytest.raises(PalestraError, match="not valid JSON"):
        asyncio.run(OpenAiChat(f"{address}/text#a", max_new_tokens=4).ask("hi"))


def test_openai_chat_where_nobody_listens_says_so():
    with pytest.raises(PalestraError, match="does not answer"):
        asyncio.run(OpenAiChat("http://127.0.0.1:9/v1#a", max_new_tokens=4, waits=(0.0,)).ask("hi"))


@pytest.mark.parametrize("url", ["http://", "https:///v1", "ftp://host/v1"])
def test_openai_chat_at_no_address_is_refused(url: str):
    with pytest.raises(UsageError, match="not the address of a server"):
        OpenAiChat(url, max_new_tokens=4)


def test_judges_and_rewards_are_imported_without_torch():
    modules = ("rewards.rewards", "rewards.llm_judge", "sets.ifeval")
    code = (
        f"import sys; {'; '.join(f'import palestra.tasks.{name}' for name in modules)}; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
