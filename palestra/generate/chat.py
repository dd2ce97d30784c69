"""A conversation in the terminal."""

import asyncio
import sys
from contextlib import aclosing
from typing import TextIO

from palestra.data.chat import Message, encode_chat
from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError
from palestra.generate.engine.request import PromptTooLong
from palestra.generate.types import Generator, Request, Sampling

HELP = "/reset forgets the conversation, /quit leaves, Ctrl-C stops a reply"

FULL = "The conversation no longer fits the model's context with this: ask something shorter, or /reset forgets it."


def chat_loop(
    generator: Generator,
    tokenizer: Tokenizer,
    *,
    system: str | None = None,
    sampling: Sampling | None = None,
    source: TextIO | None = None,
    target: TextIO | None = None,
) -> list[Message]:
    """Talk until the input ends or says /quit; replies appear as they are generated. Returns the conversation."""
    source, target = source or sys.stdin, target or sys.stdout
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    print(HELP, file=target)
    with asyncio.Runner() as runner:
        while (line := _ask(source, target)) is not None:
            match line.strip():
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    messages = list(beginning)
                case text:
                    question = [*messages, {"role": "user", "content": text}]
                    reply: list[str] = []
                    try:
                        prompt = encode_chat(tokenizer, question, add_generation_prompt=True).tokens
                        request = Request(tuple(prompt), sampling or Sampling())
                        runner.run(_reply(generator, request, reply, target))
                    except KeyboardInterrupt:  # the runner has cancelled the request; its text so far stays
                        print(" ⏹", file=target)
                    except PalestraError as error:
                        # A first question that is too long by itself is not helped by forgetting.
                        full = isinstance(error, PromptTooLong) and messages != beginning
                        print(FULL if full else error, file=target)
                        continue
                    messages = [*question, {"role": "assistant", "content": "".join(reply)}]
    return messages


def _ask(source: TextIO, target: TextIO) -> str | None:
    """The next line, or None at the end. Ctrl-C while typing forgets the line."""
    while True:
        try:
            if source is sys.stdin and source.isatty():
                import readline  # noqa: F401  (arrows and history in `input`)

                return input("> ")
            print("> ", end="", file=target, flush=True)
            return source.readline() or None
        except KeyboardInterrupt:
            print(file=target)
        except EOFError:
            print(file=target)
            return None


async def _reply(generator: Generator, request: Request, reply: list[str], target: TextIO) -> None:
    """Print a reply as it is generated, and collect its text in `reply`, also where it is interrupted."""
    async with aclosing(generator.stream(request)) as chunks:
        async for chunk in chunks:
            reply.append(chunk.text)
            print(chunk.text, end="", file=target, flush=True)
    print(file=target)
