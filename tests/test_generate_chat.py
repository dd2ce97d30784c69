"""The conversation in the terminal: history, commands, Ctrl-C."""

import io
import signal
from collections.abc import Iterator

import pytest
from tiny_server import CONTEXT, TOKENIZER, tiny_engine

from palestra.data.chat import encode_chat
from palestra.generate.chat import chat_loop
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Sampling

SAMPLING = Sampling(max_new_tokens=10, temperature=0.0)


@pytest.fixture
def generator() -> Iterator[LocalGenerator]:
    with LocalGenerator(tiny_engine(burst=1), drive="thread") as found:
        yield found


def expected(*turns: tuple[str, str]) -> str:
    """The answer of the engine to a conversation."""
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = encode_chat(TOKENIZER, messages, add_generation_prompt=True).tokens
    return tiny_engine().run([Request(tuple(prompt), SAMPLING)])[0].generations[0].text or ""


def test_chat_answers_with_the_conversation_so_far(generator: LocalGenerator) -> None:
    target = io.StringIO()
    source = io.StringIO("Hello\n\nAgain\n/reset\nHello\n/quit\nnever read\n")
    messages = chat_loop(generator, TOKENIZER, system="Be brief.", sampling=SAMPLING, source=source, target=target)
    system = ("system", "Be brief.")
    first = expected(system, ("user", "Hello"))
    second = expected(system, ("user", "Hello"), ("assistant", first), ("user", "Again"))
    shown = target.getvalue().split("> ")
    assert shown[1] == f"{first}\n"
    assert shown[3] == f"{second}\n"
    assert shown[5] == f"{first}\n"
    assert [message["content"] for message in messages] == ["Be brief.", "Hello", first]


def test_chat_ends_with_its_input(generator: LocalGenerator) -> None:
    assert chat_loop(generator, TOKENIZER, sampling=SAMPLING, source=io.StringIO(""), target=io.StringIO()) == []


def test_chat_tells_an_error_and_goes_on(generator: LocalGenerator) -> None:
    target = io.StringIO()
    source = io.StringIO(f"{'a' * CONTEXT}\nunknown: 漢\nHello\n")
    messages = chat_loop(generator, TOKENIZER, sampling=SAMPLING, source=source, target=target)
    assert f"context of {CONTEXT}" in target.getvalue()
    assert "漢" in target.getvalue()
    assert [message["content"] for message in messages] == ["Hello", expected(("user", "Hello"))]


def test_chat_that_no_longer_fits_names_reset_and_goes_on(generator: LocalGenerator) -> None:
    target = io.StringIO()
    source = io.StringIO(f"Hello\n{'a' * (CONTEXT - 20)}\nAgain\n/reset\nHello\n")
    messages = chat_loop(generator, TOKENIZER, sampling=SAMPLING, source=source, target=target)
    shown = target.getvalue().split("> ")
    first = expected(("user", "Hello"))
    assert "no longer fits" in shown[2]
    assert "/reset" in shown[2]
    assert shown[3] == expected(("user", "Hello"), ("assistant", first), ("user", "Again")) + "\n"
    assert [message["content"] for message in messages] == ["Hello", first]


class Interrupting(io.StringIO):
    """A terminal at which someone presses Ctrl-C as soon as an answer begins."""

    def write(self, text: str) -> int:
        if self.getvalue().endswith("> ") and text.strip() and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().write(text)

    pressed = False


def test_chat_interrupted_stops_the_answer_and_not_the_program(generator: LocalGenerator) -> None:
    target = Interrupting()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts programs beside it ignores the key
    long = Sampling(max_new_tokens=150, temperature=0.0, ignore_eos=True)
    messages = chat_loop(generator, TOKENIZER, sampling=long, source=io.StringIO("Hello\nAgain\n"), target=target)
    said = [message["content"] for message in messages]
    assert target.pressed
    assert 0 < len(said[1]) <= 150  # all of it may have come before the key was seen
    assert said[2] == "Again"
    assert generator.metrics()["requests"] == 0
