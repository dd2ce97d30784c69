"""A `Generator` over another program's server: tokens in, tokens out; new weights through a folder that it reads."""

import asyncio
import math
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate.client import UNANSWERED, UNSENT, HttpGenerator
from palestra.generate.engine.request import Alternatives, EngineJob, GrowingText, checked
from palestra.generate.types import Chunk, Generation, Request, Result, StopReason
from palestra.lm.hf import DamagedModel, described, exported, save_weights
from palestra.spec.shape import Shape

WAITS = (0.1, 0.3, 1.0, 3.0)
"""Seconds between attempts to reach a server: one that is gone has failed its requests after five."""


@dataclass(frozen=True)
class Choice:
    """New tokens of one of a request's generations, as a server sent them."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int] | None
    """Of all tokens of this call so far; None where the server tells them later."""
    finish: str | None = None
    """`stop`, `length` or `abort` at the end."""
    top: list[Alternatives] | None = None
    text: str | None = None
    """From a server of text, whose tokens are not ours."""


class Dialect(ABC):
    """What differs between servers."""

    expected: str
    """What the address should be of, and how it is started."""
    groups = True
    """Whether one call samples all n of a request; else there are n calls, whose samples go on after an update."""
    streams = False

    fixed: tuple[str, ...] = ()
    """Sampling parameters that must have their defaults, and why."""
    fixed_because = ""
    again: tuple[type[Exception], ...] = UNSENT
    """Errors after which a call is made again; statuses after which it is; and the seconds between attempts."""
    retried: tuple[int, ...] = ()
    waits: tuple[float, ...] = WAITS

    @abstractmethod
    def call(self, job: EngineJob, index: int, before: list[int], version: int, *, stream: bool) -> tuple[str, Any]:
        """Path and body of a call; `before` are tokens that this sample has already."""

    @abstractmethod
    def choices(self, data: Any) -> list[Choice]:
        """The choices of a response or of an event of a stream."""

    async def abort(self, server: "RemoteGenerator", job: EngineJob) -> None:
        """End the calls of a request."""
        raise self._cannot("abort a request")

    async def pause(self, server: "RemoteGenerator") -> None:
        """Stop sampling."""
        raise self._cannot("pause")

    async def resume(self, server: "RemoteGenerator") -> None:
        """Continue sampling."""
        raise self._cannot("resume")

    async def load(self, server: "RemoteGenerator", folder: Path, version: int, *, keep_cache: bool) -> None:
        """Load the weights of a folder between two tokens; sampling is stopped before, and stays so."""
        raise self._cannot("take new weights")

    def _cannot(self, what: str) -> UsageError:
        return UsageError(f"{self.expected} cannot {what}: use vllm, sglang or palestra")


class WeightFolder:
    """Weights as Hugging Face folders below `path`, each version once; the newest two are kept."""

    def __init__(
        self,
        path: Path,
        shape: Shape,
        tokenizer: Tokenizer,
        eos: Sequence[int],
        config: Mapping[str, Any],
        *,
        untied: bool = False,
    ):
        """`untied` writes the output matrix of a model with tied embeddings too."""
        self.path, self._untied = path.absolute(), untied and shape.tied
        self._shape = shape.model_copy(update={"tied": False}) if untied else shape
        self._about = {"tokenizer": tokenizer, "eos": eos, "base_config": config}
        self._lock = threading.Lock()
        shutil.rmtree(self.path, ignore_errors=True)

    def initial(self, weights: Mapping[str, Tensor]) -> Path:
        """The folder from which a server starts; it stays."""
        return self._written("initial", weights)

    def put(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """The folder of a version, written unless it is there."""
        with self._lock:
            folder = self._written(str(version), weights)
            for old in sorted(int(each.name) for each in self.path.iterdir() if each.name.isdigit())[:-2]:
                shutil.rmtree(self.path / str(old))
        return folder

    def _written(self, name: str, weights: Mapping[str, Tensor]) -> Path:
        folder = self.path / name
        if not folder.exists():
            with _refused():
                save_weights(folder, self._shape, self._whole(weights), **self._about)
        return folder

    def _whole(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {**weights, "head": weights["embed"].clone()} if self._untied else weights

    def remove(self) -> None:
        """Delete all of them."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def _refused() -> Iterator[None]:
    """Weights that are not the model's are the caller's mistake."""
    try:
        yield
    except DamagedModel as error:
        raise UsageError(str(error)) from error


class WeightMemory(WeightFolder):
    """New weights under Hugging Face's names through a channel of this machine's memory; its folder starts servers."""

    def __init__(self, path: Path, shape: Shape, *about: Any, channel: Any, **settings: Any):
        """`channel` is a `palestra.cluster.memory.SharedMemory`."""
        super().__init__(path, shape, *about, **settings)
        self._channel = channel

    def put(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """The folder of the channel, in which the version is."""
        with self._lock:
            if self._channel.newest() < version:
                shape, family, _ = described(self._shape, self._about["base_config"], scores=False)
                with _refused():
                    tensors = dict(exported(shape, family, self._whole(weights)))
                self._channel.publish(version, tensors)
        return Path(self._channel.address.removeprefix("shm:"))

    def remove(self) -> None:
        super().remove()
        self._channel.close()


class RemoteGenerator(HttpGenerator):
    """A `Generator` whose engine speaks a dialect. Use it on one event loop, and close it.

    Text and stops are found here, by the model's own tokenizer and end tokens, as our engine finds them; what the
    server samples after a stop is left out. Without `weights` it cannot publish.
    """

    def __init__(
        self,
        base_url: str,
        dialect: Dialect,
        tokenizer: Tokenizer,
        *,
        eos: frozenset[int],
        context: int,
        vocab: int,
        weights: WeightFolder | None = None,
        api_key: str | None = None,
        waits: tuple[float, ...] | None = None,
    ):
        super().__init__(base_url, api_key, waits=dialect.waits if waits is None else waits)
        self.again, self.retried = dialect.again, dialect.retried
        self.dialect, self.expected = dialect, dialect.expected
        self._tokenizer, self._eos, self._context, self._vocab = tokenizer, eos, context, vocab
        self._weights, self._updating = weights, asyncio.Lock()
        self.version, self.paused = 0, False
        self._jobs: dict[str, EngineJob] = {}
        self._aborted: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._jobs)

    async def generate(self, request: Request) -> Result:
        job = self._begin(request)
        try:
            samples = [_Sample(job, index, self._tokenizer) for index in range(request.n)]
            if self.dialect.groups:
                await self._sample(job, samples)
            else:
                async with asyncio.TaskGroup() as group:
                    for sample in samples:
                        group.create_task(self._sample(job, [sample]))
            return Result(job.id, request.prompt, tuple(sample.generation() for sample in samples))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._end(job)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Chunks as they come, or whole generations where the server tells the versions of tokens at their end."""
        if not self.dialect.streams:
            for index, one in enumerate((await self.generate(request)).generations):
                arrays = (one.tokens, one.logprobs, one.versions)
                yield Chunk(index, *arrays, one.text or "", one.stop_reason, one.top)
            return
        job = self._begin(request)
        samples = [_Sample(job, index, self._tokenizer) for index in range(request.n)]
        try:
            path, body = self.dialect.call(job, 0, [], self.version, stream=True)
            async with self._call("POST", path, json=body) as response:
                async for event in self._events(response):
                    for choice in self._read(event, self.dialect.choices):
                        if (chunk := samples[choice.index].chunk(choice)) is not None:
                            yield chunk
            for sample in samples:
                if (chunk := sample.aborted()) is not None:  # an abort may come without an event of its own
                    yield chunk
        finally:
            self._end(job)

    async def abort(self, id: str) -> None:
        if id in self._jobs:
            self._aborted.add(id)
            await self.dialect.abort(self, self._jobs[id])

    async def pause(self) -> None:
        await self.dialect.pause(self)
        self.paused = True

    async def resume(self) -> None:
        await self.dialect.resume(self)
        self.paused = False

    async def publish(self, weights: Mapping[str, Tensor], version: int, *, keep_cache: bool = True) -> None:
        """New weights through a folder, between two tokens; a server that could not load them stays paused."""
        if self._weights is None:
            raise UsageError(f"{self.base_url} was opened to evaluate what it serves: it takes no weights")
        async with self._updating:
            folder = await asyncio.to_thread(self._weights.put, weights, version)
            await self.dialect.load(self, folder, version, keep_cache=keep_cache)
            self.version = version
            if not self.paused:
                await self.dialect.resume(self)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """The JSON that a call returns which may be made twice."""
        async with self._call(method, path, again=(*UNSENT, *UNANSWERED), **options) as response:
            return self._read(await response.aread(), lambda data: data)

    async def order(self, method: str, path: str, **options: Any) -> None:
        """A call that may be made twice, whatever it returns."""
        await self._command(method, path, **options)

    def _begin(self, request: Request) -> EngineJob:
        if given := request.sampling.given(self.dialect.fixed):
            raise UsageError(f"{', '.join(given)}: {self.dialect.fixed_because}: leave it out")
        if request.media:
            raise UsageError("engines of other programs are sent tokens alone: images need the engine of palestra")
        sizes = {"vocab": self._vocab, "context": self._context, "eos": self._eos}
        job = checked(request, _Nowhere(), has_text=True, **sizes)
        if job.id in self._jobs:
            raise UsageError(f"a request with the id {job.id!r} is in flight: choose another id")
        self._jobs[job.id] = job
        return job

    def _end(self, job: EngineJob) -> None:
        del self._jobs[job.id]
        self._aborted.discard(job.id)

    async def _sample(self, job: EngineJob, samples: "list[_Sample]") -> None:
        """Sample until all have ended; what an update of the weights aborted goes on from its tokens."""
        while open := [sample for sample in samples if not sample.ended]:
            first, done = open[0], open[0].versions
            path, body = self.dialect.call(job, first.index, first.tokens, self.version, stream=False)
            async with self._call("POST", path, json=body) as response:
                choices = self._read(await response.aread(), self.dialect.choices)
            if len(choices) != len(open):
                raise PalestraError(f"{self.base_url} sent {len(choices)} generations of {len(open)}: see its log")
            for choice in choices:
                sample = samples[choice.index] if self.dialect.groups else first
                if not self.dialect.groups and choice.versions is not None:
                    going_on = choice.finish == "abort" and job.id not in self._aborted
                    finish = None if going_on else choice.finish
                    choice = replace(choice, versions=done + choice.versions, finish=finish)
                sample.add(choice)


class _Nowhere:
    """The sink of a request whose tokens come by HTTP."""

    streams = False

    def put(self, item: object) -> None: ...


class _Sample:
    """One generation as it grows, up to the first stop."""

    def __init__(self, job: EngineJob, index: int, tokenizer: Tokenizer):
        self.job, self.index = job, index
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self.versions: list[int] = []
        self._top: list[Alternatives] = []
        self._tokenizer, self._text = tokenizer, GrowingText(tokenizer, job.sampling.stop)
        self._sent: tuple[int, int] | None = (0, 0)
        """Tokens and characters in chunks so far; None after the last."""
        self._reason: StopReason | None = None
        self._match: str | int | None = None
        self._whole: str | None = None

    @property
    def ended(self) -> bool:
        return self._reason is not None

    def add(self, choice: Choice) -> None:
        """New tokens, and the end of the generation if they are its last."""
        if choice.text is not None:
            self._whole = choice.text
            choice = replace(choice, tokens=self._tokenizer.encode(choice.text))
            choice = replace(choice, logprobs=[math.nan] * len(choice.tokens), versions=[0] * len(choice.tokens))
        if len(choice.logprobs) != len(choice.tokens):
            raise PalestraError(f"{len(choice.logprobs)} log-probabilities came for {len(choice.tokens)} tokens")
        sampling, tops = self.job.sampling, choice.top or [()] * len(choice.tokens)
        for token, logprob, top in zip(choice.tokens, choice.logprobs, tops, strict=True):
            if self._reason is not None:
                break
            self.tokens.append(token)
            self._logprobs.append(logprob)
            self._top += [top] if sampling.logprobs else []
            self._text.push(token, ignore_stops=len(self.tokens) < sampling.min_new_tokens)
            if self._text.stopped_by is not None:
                self._reason, self._match = StopReason.STOP, self._text.stopped_by
            elif token in self.job.ends:
                self._reason = StopReason.STOP if token in sampling.stop_ids else StopReason.EOS
                self._match = token
            elif len(self.tokens) >= self.job.limit:
                self._reason = StopReason.LENGTH
        if choice.versions is not None:
            self.versions = choice.versions[: len(self.tokens)]
        if self._reason is None and choice.finish is not None:
            ends = {"abort": StopReason.ABORT, "length": StopReason.LENGTH}
            # A guide that is complete, or an end token that only the server knows.
            self._reason = ends.get(choice.finish, StopReason.EOS if sampling.guide is None else StopReason.STOP)
        if self.ended:
            self._text.finish()

    def chunk(self, choice: Choice) -> Chunk | None:
        """The new tokens whose versions are known; None if there are none."""
        if self._sent is None:
            return None
        self.add(choice)
        known, (tokens, characters) = len(self.versions), self._sent
        ended = self.ended and known == len(self.tokens)
        if known == tokens and not ended:
            return None
        text = self._text.text[characters:]
        self._sent = None if ended else (known, characters + len(text))
        new, logprobs = tuple(self.tokens[tokens:known]), tuple(self._logprobs[tokens:known])
        reason, top = self._reason if ended else None, tuple(self._top[tokens:known])
        return Chunk(self.index, new, logprobs, tuple(self.versions[tokens:]), text, reason, top)

    def aborted(self) -> Chunk | None:
        """The last chunk of a generation that was aborted; None if there was a last one."""
        if self._sent is None:
            return None
        self._text.finish()
        return Chunk(self.index, (), (), (), self._text.text[self._sent[1] :], StopReason.ABORT)

    def generation(self) -> Generation:
        assert self._reason is not None
        if len(self.versions) != len(self.tokens):
            raise PalestraError(f"the versions of {len(self.versions)} of {len(self.tokens)} tokens came")
        text = self._text.text if self._whole is None else self._whole
        tokens, logprobs, versions = tuple(self.tokens), tuple(self._logprobs), tuple(self.versions)
        return Generation(tokens, logprobs, versions, self._reason, text, tuple(self._top), self._match)
