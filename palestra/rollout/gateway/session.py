"""A session: one key, one tree of turns. Each turn's prompt begins with the turn before it, token for token."""

import asyncio
import hashlib
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from palestra.data.chat import encode_after, encode_chat
from palestra.data.media import Image
from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.serve.openai import ApiError
from palestra.generate.types import EDITS, Generation, Request, Sampling
from palestra.rollout.episode import Transcript
from palestra.rollout.gateway.calls import Format, format_of
from palestra.rollout.gateway.dialect import Conversation, Exchange, Message, Reply, SessionEnded, Source, spoken
from palestra.rollout.types import Trajectory
from palestra.rollout.workflows import following
from palestra.tasks.task import Verdict

AT_ONCE = 64
"""Requests of one session in flight."""
REMEMBERED = 64
"""Exchanges that a client may ask for again."""
LONG = 50_000
"""Characters from which on a conversation is encoded beside the event loop."""


@dataclass(eq=False)
class Turn:
    """A node of the tree: what the model sampled after a prompt."""

    parent: "Turn | None"
    prompt: tuple[int, ...]
    generation: Generation
    messages: tuple[Message, ...]
    """The conversation up to and with this turn."""
    response: str
    """The id of the response it was sent with."""
    media: tuple[Image, ...] = ()
    """The images of its prompt."""
    delivered: bool = False
    """Whether the client has got it: what a program never saw is not trained on."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that the next prompt must begin with."""
        return self.prompt + self.generation.tokens


class Session:
    """What one program says to the model. Its methods are called in the gateway's loop."""

    def __init__(
        self,
        key: str,
        source: Source,
        tokenizer: Tokenizer,
        *,
        context: int,
        model: str,
        sampling: Sampling | None = None,
        seed: int | None = None,
        most_turns: int | None = None,
        most_tokens: int | None = None,
        format: Format | None = None,
    ):
        """With `sampling` its temperature and length are those of every request, as training must know them; without,
        the client's own. With `seed` all samples depend on it and on the prompts alone. `most_tokens` are sampled ones
        of all turns."""
        self.key, self.tokenizer, self.context, self.model = key, tokenizer, context, model
        self._most_turns, self._most_tokens = most_turns, most_tokens
        self.turns: list[Turn] = []
        self.reward: float | None = None
        self.answer: str | None = None
        self.ended: Literal["call", "idle", "closed"] | None = None
        self.limited = False
        """Whether a request was refused because a limit was reached."""
        self.retokenized = 0
        """Tokens of earlier turns that a later prompt of theirs does not begin with."""
        self.used = time.monotonic()
        self.over = asyncio.Event()
        """Set when it has ended."""
        self._source, self._sampling, self._seed = source, sampling, seed
        self._format: Format = format or format_of(tokenizer)
        self._known: dict[bytes, Turn] = {}
        self._asked: Counter[str] = Counter()
        self._running: set[asyncio.Task[list[Reply]]] = set()
        self._exchanges: OrderedDict[str, Exchange] = OrderedDict()

    @property
    def busy(self) -> bool:
        """Whether a request is at the engine."""
        return bool(self._running)

    @property
    def sampled(self) -> int:
        """Tokens that were sampled."""
        return sum(len(turn.generation.tokens) for turn in self.turns)

    @property
    def last(self) -> Turn | None:
        """The last turn that the program has got."""
        return next((turn for turn in reversed(self.turns) if turn.delivered), None)

    @property
    def forks(self) -> int:
        """Branches beyond the first."""
        return max(0, len(self.branches()) - 1)

    async def exchange(self, conversation: Conversation, body: str, retry: bool) -> Exchange:
        """Send a request to the engine. One that an SDK sends again, with the same body, is not sampled again."""
        if self.ended is not None:
            raise SessionEnded
        self.used = time.monotonic()
        if retry and (before := self._exchanges.get(body)) is not None and not before.failed:
            return before
        if len(self._running) >= AT_ONCE:
            raise ApiError(429, f"This session already has {AT_ONCE} requests in flight", kind="rate_limit_error")
        conversation, parent, prompt, media = await self._prompt(conversation)
        exchange = self._started(conversation, parent, prompt, media)
        self._exchanges[body] = exchange
        while len(self._exchanges) > REMEMBERED:
            self._exchanges.popitem(last=False)
        return exchange

    def deliver(self, exchange: Exchange) -> None:
        """The client has got the response."""
        self.used = time.monotonic()
        for turn in self.turns:
            if turn.response == exchange.id:
                turn.delivered = True

    def end(self, why: Literal["call", "idle", "closed"]) -> None:
        """Nothing comes after this; what runs is aborted."""
        if self.ended is None:
            self.ended = why
            self.over.set()
            for task in self._running:
                task.cancel()

    async def _prompt(
        self, conversation: Conversation
    ) -> tuple[Conversation, Turn | None, tuple[int, ...], tuple[Image, ...]]:
        """The whole conversation, the turn that it continues, its prompt, and the images in it."""
        messages = list(conversation.messages)
        if conversation.previous is not None:
            earlier = next((turn for turn in self.turns if turn.response == conversation.previous), None)
            if earlier is None:
                raise ApiError(404, f"There is no response {conversation.previous!r} in this session")
            before = earlier.messages
            if messages and messages[0]["role"] == before[0]["role"] == "system":  # instructions are said each time
                before, messages = (messages[0], *before[1:]), messages[1:]
            messages = [*before, *messages]
            conversation = replace(conversation, messages=tuple(messages), previous=None)
        parent, place = None, 0
        for index, digest in enumerate(_digests(conversation, messages), 1):
            if digest in self._known and index < len(messages):
                parent, place = self._known[digest], index
        if conversation.characters > LONG:
            parent, prompt, media = await asyncio.to_thread(_encoded, self.tokenizer, conversation, parent, place)
        else:
            parent, prompt, media = _encoded(self.tokenizer, conversation, parent, place)
        if parent is not None:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(parent.tokens, prompt, strict=False))
            self.retokenized += len(parent.tokens) - sum(1 for _ in alike)
        return conversation, parent, prompt, media

    def _started(
        self, conversation: Conversation, parent: Turn | None, prompt: tuple[int, ...], media: tuple[Image, ...]
    ) -> Exchange:
        asked, fixed = conversation.sampling, self._sampling
        room = self.context - len(prompt)
        if room < 1:
            self.limited = True
            message = f"the prompt has {len(prompt)} tokens, and the context is {self.context}"
            raise ApiError(400, message, code="context_length_exceeded")
        left = min(room, asked.max_new_tokens, room if fixed is None else fixed.max_new_tokens)
        if self._most_tokens is not None:
            left = min(left, self._most_tokens - self.sampled)
        turns = len(self.turns) + len(self._running) + conversation.n
        if left < 1 or (self._most_turns is not None and turns > self._most_turns):
            self.limited = True
            raise ApiError(400, "This session has used all its turns or tokens", code="session_limit")
        said = repr(prompt).encode() + b"".join(image.digest for image in media)
        mark = hashlib.blake2b(said, digest_size=16).hexdigest()
        number, self._asked[mark] = self._asked[mark], self._asked[mark] + 1
        sampling = replace(asked, max_new_tokens=left)
        if fixed is not None:
            if changed := asked.given(EDITS):
                raise ApiError(400, f"{changed[0]}: completions that are trained on are sampled without it")
            sampling = replace(fixed, max_new_tokens=left, stop=asked.stop, logprobs=asked.logprobs)
        if self._seed is not None:
            sampling = replace(sampling, seed=stream_key(self._seed, mark, number) >> 1)
        exchange = Exchange(
            conversation,
            Request(prompt, sampling, conversation.n, media=media),
            self._source,
            partial(self._record, parent),
            mark=f"{mark} {number}",
            model=self.model,
            tokenizer=self.tokenizer,
            format=self._format if conversation.tools else None,
        )
        self._running.add(exchange.task)
        exchange.task.add_done_callback(self._settle)
        return exchange

    def _record(self, parent: Turn | None, exchange: Exchange, replies: list[Reply]) -> None:
        conversation, asked = exchange.conversation, exchange.request
        for reply in replies:
            messages = (*conversation.messages, spoken(reply.text, reply.calls))
            turn = Turn(parent, asked.prompt, reply.generation, messages, exchange.id, asked.media)
            self.turns.append(turn)
            *_, digest = _digests(conversation, messages)
            self._known.setdefault(digest, turn)

    def _settle(self, task: "asyncio.Task[list[Reply]]") -> None:
        self._running.discard(task)
        self.used = time.monotonic()
        if not task.cancelled():
            task.exception()  # whoever waits for it has it; nobody may

    def branches(self) -> list[list[Turn]]:
        """The tree's paths from a first prompt to a last turn that was delivered; first the one with the last turn."""
        inner = {id(turn.parent) for turn in self.turns if turn.delivered}
        leaves = [turn for turn in self.turns if turn.delivered and id(turn) not in inner]
        return [list(_path(leaf)) for leaf in sorted(leaves, key=lambda leaf: leaf is not self.last)]

    def trajectories(
        self, verdict: Verdict, reward: float, rows: Literal["branches", "turns"], stop_reason: str | None = None
    ) -> list[Trajectory]:
        """The tree as rows that share a reward; every turn is trained in one of them, the first that has it."""
        paths = self.branches()
        if rows == "turns":
            delivered = {id(turn): turn for path in paths for turn in reversed(path)}
            paths = [[turn] for turn in delivered.values()]
        trained: set[int] = set()
        made = []
        for row, path in enumerate(paths):
            transcript = Transcript.of(path[0].prompt)
            for turn in path:
                transcript = transcript.with_context(turn.prompt[len(transcript.tokens) :])
                if id(turn) in trained:
                    transcript = transcript.with_context(turn.generation.tokens)
                else:
                    transcript = transcript.with_sampled(turn.generation)
                trained.add(id(turn))
            why = stop_reason or str(path[-1].generation.stop_reason)
            done = transcript.trajectory(len(path[0].prompt), verdict, reward, why, self.tokenizer)
            made.append(replace(done, row=row, media=path[-1].media))
        return made


def _path(leaf: Turn) -> Iterator[Turn]:
    if leaf.parent is not None:
        yield from _path(leaf.parent)
    yield leaf


def _digests(conversation: Conversation, messages: Iterable[Message]) -> Iterator[bytes]:
    """A digest of each beginning of a conversation. Ids of calls do not matter, nor what a client leaves out."""
    given = json.dumps([conversation.tools, conversation.variables], sort_keys=True, default=str)
    digest = hashlib.blake2b(given.encode()).digest()
    for message in messages:
        calls = [[one["function"]["name"], one["function"]["arguments"]] for one in message.get("tool_calls", ())]
        text = json.dumps([message["role"], message["content"], calls], sort_keys=True)
        digest = hashlib.blake2b(digest + text.encode()).digest()
        yield digest


def _encoded(
    tokenizer: Tokenizer, conversation: Conversation, turn: Turn | None, place: int
) -> tuple[Turn | None, tuple[int, ...], tuple[Image, ...]]:
    """The turn that is continued, the prompt and its images: its stored tokens, then what the template writes after it.

    Without a turn, or where the template renders its beginning differently once more follows, all is rendered.
    """
    messages, tools = conversation.messages, list(conversation.tools) or None
    if turn is not None:
        with suppress(UsageError):
            new = messages[place:]
            after = encode_after(tokenizer, messages[: place - 1], new, tools=tools, **conversation.variables)
            rest = following(turn.generation.tokens, tuple(after.tokens), tokenizer)
            shift = len(turn.tokens) + len(rest) - len(after.tokens)
            media = (*turn.media, *(image.at(image.start + shift) for image in after.images))
            return turn, turn.tokens + rest, media
    settings: dict[str, Any] = {"add_generation_prompt": True, "tools": tools, **conversation.variables}
    encoded = encode_chat(tokenizer, messages, **settings)
    return None, tuple(encoded.tokens), encoded.images
