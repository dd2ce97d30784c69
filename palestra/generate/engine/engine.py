"""The generation engine: requests in, tokens out, in bursts that the owner of the device calls for."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.data.tokenizers import Tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.batch import Burst, BurstOutput, Scheduler
from palestra.generate.engine.cpu import Runner, prefill_tokens_for
from palestra.generate.engine.guide import CompiledGuide, GuideFailed, Guides
from palestra.generate.engine.kv_cache import Looked, Segment
from palestra.generate.engine.pages import PAGE, PagePool
from palestra.generate.engine.request import (
    Alternatives,
    Collect,
    Ending,
    EngineFailed,
    EngineJob,
    GrowingText,
    PromptTooLong,
    QueueFull,
    Sample,
    StopWatch,
    TokenSink,
    check_tokens,
    checked,
)
from palestra.generate.engine.sampler import Needs
from palestra.generate.engine.score_edits import ScoreEdits
from palestra.generate.engine.turns import Turns, Uncollected
from palestra.generate.types import Generation, Guide, Request, Result, StopReason
from palestra.lm.batch import Batch, forward
from palestra.lm.head import logits
from palestra.lm.hf import load_pretrained
from palestra.lm.layers import TRITON
from palestra.lm.model import Transformer
from palestra.lm.moe import multiplies_groups

SCORED = 256
"""Tokens whose distributions `score` has in memory at a time."""


class Engine:
    """Generates with a copy of a model. Any thread may call any method; one runs at a time.

    A sequence lives in a row of the batch and in pages of the cache, the first of which others may share. Its tokens
    and log-probabilities depend on its prompt, sampling and seed alone; on the CPU bit for bit, whatever else is
    running.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        eos: frozenset[int],
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        context: int | None = None,
        max_running: int = 256,
        max_waiting: int = 4096,
        kv_bytes: int | None = None,
        burst: int | None = None,
        prefill_tokens: int | None = None,
        exact: bool | None = None,
    ):
        """`dtype` and `context` are the model's unless given, `kv_bytes` a share of the memory that is free.

        A burst computes about `prefill_tokens` tokens of prompts, then samples up to `burst` tokens in every row.

        `exact`, the default on the CPU: a request waits until there are pages for all it may generate, and only what
        was computed as a prompt is shared. Otherwise a request starts with the pages it has tokens for, gives them back
        when they run out and is computed again later, which rounds otherwise; and what was generated is shared too.
        """
        shape, device, dtype = model.shape, torch.device(device), dtype or model.dtype
        self.context = min(context or shape.context, shape.context)
        self.eos, self.tokenizer = eos, tokenizer
        self.steps = burst or (16 if device.type == "cuda" else 8)
        self.prefill_tokens = prefill_tokens or prefill_tokens_for(shape, device)
        self.max_waiting = max_waiting
        self.version = 0
        self.failure: BaseException | None = None
        """The error that ended the engine."""
        runner, moe = Runner, shape.moe
        waits = moe is not None and not multiplies_groups(dtype, shape.width, moe.mlp)  # for the host, in every layer
        # Its kernels have no sinks, and know no positions other than lengths.
        if device.type == "cuda" and TRITON and not shape.sinks and not waits and shape.vision is None:
            from palestra.generate.engine.cuda import CudaRunner as runner
        self._runner = runner(model, dtype, device, self.context, kv_bytes, max_running, self.steps)
        self.slots = self._runner.slots
        self.exact = device.type == "cpu" if exact is None else exact
        self._scheduler = self._new_scheduler()
        self._jobs: dict[str, EngineJob] = {}
        self._new: list[EngineJob] = []
        self._aborted: list[EngineJob] = []
        self._inbox = threading.Lock()
        self._turns = Turns()
        self._paused = False
        self._stops = None if tokenizer is None else StopWatch(tokenizer)
        self._guides = None if tokenizer is None else Guides(tokenizer, shape.vocab or 0)
        self._in_flight: Burst | None = None
        """Started, and not yet delivered."""
        self._generated = self._prefilled = self._shared = self._preemptions = 0

    def _new_scheduler(self) -> Scheduler:
        # On the CPU memory is taken when it is first written: what is only remembered does not take all there is.
        pages = self._runner.cache.pages
        pool = PagePool(pages, pages // 4 if self._runner.device.type == "cpu" else None)
        return Scheduler(self.slots, pool, self.steps, self.exact)

    @classmethod
    def from_folder(cls, path: Path, *, dtype: torch.dtype = torch.float32, **settings: Any) -> "Engine":
        """An engine for a model folder, with its tokenizer if it has one."""
        loaded = load_pretrained(path, dtype, dtype)
        tokenizer = None if loaded.tokenizer is None else Tokenizer.load(loaded.tokenizer)
        return cls(loaded.model, eos=frozenset(loaded.eos), tokenizer=tokenizer, **settings)

    @property
    def model(self) -> Transformer:
        """The copy that generates; `publish` changes it."""
        return self._runner.model

    @property
    def captures(self) -> int:
        """CUDA graphs captured so far; none on the CPU. In a steady state it stays the same."""
        return self._runner.captures

    def submit(self, request: Request, sink: TokenSink) -> str:
        """Queue a request and return its id. An invalid request is refused here."""
        vocab, has_text = self.model.shape.vocab or 0, self.tokenizer is not None
        vision = None if self.model.shape.vision is None else self.model.shape.vision.tokens
        job = checked(request, sink, vocab=vocab, context=self.context, eos=self.eos, has_text=has_text, vision=vision)
        if job.sampling.guide is not None:
            job.guide = self.compile(job.sampling.guide)
            job.guide.start(job.ends)  # refused where it cannot begin
        with self._inbox:
            if self.failure is not None:
                raise EngineFailed(self.failure)
            if job.id in self._jobs:
                raise UsageError(f"a request with the id {job.id!r} is already in flight")
            waiting = len(self._new) + len(self._scheduler.waiting)
            if waiting >= self.max_waiting:
                raise QueueFull(f"the queue is full with {waiting} waiting requests: try again later")
            self._jobs[job.id] = job
            self._new.append(job)
        return job.id

    def compile(self, guide: Guide) -> CompiledGuide:
        """Compile a guide, which may take a second; `submit` then finds it. An invalid one is refused."""
        if self._guides is None:
            raise UsageError("a guide needs a tokenizer, and this engine has none")
        return self._guides.compiled(guide)

    def abort(self, id: str) -> None:
        """End a request at the next burst, with what it has; no effect on one that has ended."""
        with self._inbox:
            # The job, not the id, which another request may have by then.
            if (job := self._jobs.get(id)) is not None:
                self._aborted.append(job)

    def burst(self, *, prompts_only: bool = False) -> bool:
        """One round: admit requests, compute prompts, sample tokens, deliver. False where there was nothing to do.

        With `prompts_only` nothing is sampled nor delivered. An error ends the engine: every request fails with it, and
        so does every later one. Ctrl-C ends only requests in flight.
        """
        if self.failure is not None:
            raise EngineFailed(self.failure)
        with self._turns.taken():
            try:
                self._take_in()
                if self._paused:
                    return False
                prefilled = self._begin()
                return (not prompts_only and self._decode()) or prefilled
            except Exception as error:
                self.fail(error)
                raise
            except BaseException:
                self._drop()
                raise

    def fail(self, error: BaseException) -> None:
        """End the engine: every request, now and later, fails with `error` as the cause."""
        with self._inbox:
            self.failure = error
            jobs = list(self._jobs.values())
            self._jobs.clear()
        for job in jobs:
            job.sink.put(EngineFailed(error))

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Generate for all requests here and now; results in their order."""
        done: dict[int, Result] = {}
        errors: list[BaseException] = []
        ids: list[str] = []
        portion = self._runner.portion // 4  # the device has nothing else to do yet
        try:
            while len(done) < len(requests):
                fresh = 0
                while len(ids) < len(requests) and len(ids) - len(done) < self.max_waiting:
                    fresh += len(requests[len(ids)].prompt)
                    ids.append(self.submit(requests[len(ids)], Collect(done, errors, len(ids))))
                    if fresh >= portion:  # the device begins, the host goes on
                        self.burst(prompts_only=True)
                        fresh, portion = 0, self._runner.portion
                if not self.burst() and self._paused:
                    raise PalestraError("the engine is paused: resume it before a run")
                if errors:  # of one request alone: others end the burst
                    raise errors[0]
        except BaseException:
            # The caller no longer waits for the others.
            for id in (id for place, id in enumerate(ids) if place not in done):
                self.abort(id)
            with self._turns.taken():
                self._take_in()
            raise
        return [done[place] for place in range(len(requests))]

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], alternatives: int = 0) -> tuple[list[float], list[Alternatives]]:
        """Log-probabilities of all tokens but the first, given those before; and the likeliest in place of each."""
        if len(tokens) > self.context:
            raise PromptTooLong(f"{len(tokens)} tokens are more than the context of {self.context}")
        check_tokens(tokens, (), self.model.shape.vocab or 0)
        logprobs: list[float] = []
        top: list[Alternatives] = []
        with self._turns.taken():
            batch = Batch.pack([tokens]).to(self._runner.device)
            hidden, targets = forward(self.model, batch).hidden[:-1], batch.tokens[1:]
            for rows, wanted in zip(hidden.split(SCORED), targets.split(SCORED), strict=True):
                scores = logits(rows, self.model.unembed).log_softmax(-1)
                logprobs += scores.gather(1, wanted[:, None])[:, 0].tolist()
                values, ids = scores.topk(min(alternatives, scores.shape[1]), dim=-1)
                top += [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
        return logprobs, top

    def pause(self) -> None:
        """Sample nothing until `resume`. Returns once the current burst has ended."""
        with self._turns.taken():
            self._settle()
            self._paused = True

    def resume(self) -> None:
        self._paused = False

    def publish(
        self,
        weights: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]],
        version: int,
        *,
        keep_cache: bool = True,
    ) -> None:
        """Take over weights between two bursts; tokens from now on are of `version`.

        A function that gives them is called there too, when nothing else uses the device.
        With `keep_cache` running sequences continue from what they have cached. Without it their caches are recomputed
        by the new weights.
        """
        with self._turns.taken():
            self._settle()
            self._runner.load(weights() if callable(weights) else weights)
            self.version = version
            self._scheduler.pool.forget()  # what other weights have computed matches no more
            running = list(self._scheduler.rows)
            for sample in running:
                sample.shareable = False
            if not keep_cache:
                self._free(running)
                for sample in running:
                    self._scheduler.put_back(sample)

    def metrics(self) -> dict[str, float]:
        """Gauges and counters."""
        running, waiting = len(self._scheduler.rows), [*self._new, *self._scheduler.waiting]
        return {
            "running": running,
            "waiting": sum(job.request.n - job.started for job in waiting) + len(self._scheduler.preempted),
            "requests": len(self._jobs),
            "slots": self.slots,
            "free_slots": self.slots - running,
            "generated_tokens": self._generated,
            "prefill_tokens": self._prefilled,
            "shared_tokens": self._shared,
            "preemptions": self._preemptions,
            "pages": self._scheduler.pool.size,
            "free_pages": self._scheduler.pool.available,
            "cache_bytes": self._runner.cache.nbytes,
            "version": self.version,
            "paused": self._paused,
        }

    def _drop(self) -> None:
        """Drop all requests: an interrupted burst leaves their rows in no usable state."""
        with self._inbox:
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._new, self._aborted = [], []
            self._in_flight, self._scheduler = None, self._new_scheduler()
        self._runner.host.stop_all()
        for job in jobs:
            job.sink.put(PalestraError("interrupted before the request was complete: send it again"))

    def _take_in(self) -> None:
        """Requests and aborts since the last burst."""
        with self._inbox:
            new, self._new = self._new, []
            aborted, self._aborted = self._aborted, []
            self._scheduler.waiting.extend(new)
        for job in aborted:
            if self._jobs.get(job.id) is job:
                self._abort(job)

    def _refuse(self, job: EngineJob, error: UsageError) -> None:
        """End a request with an error of its own."""
        self._free([sample for sample in self._scheduler.withdraw(job) if sample.row >= 0])
        with self._inbox:
            del self._jobs[job.id]
        job.sink.put(error)

    def _abort(self, job: EngineJob) -> None:
        samples = self._scheduler.withdraw(job)
        samples += [Sample(job, index, -1) for index in range(job.started, job.request.n)]
        self._end([Ending(sample, len(sample.tokens), "", StopReason.ABORT) for sample in samples])

    def _begin(self) -> bool:
        """Admit requests and compute about `prefill_tokens` tokens of prompts; whether there were any.

        A device that works ahead of the host computes a portion of them while others are admitted.
        """
        before, left = self._prefilled, self.prefill_tokens
        patient = self._runner.ahead and self._scheduler.patient()
        while left > self.prefill_tokens // 64:  # less is not worth a launch
            for sample in [] if patient else self._scheduler.admit(min(left, self._runner.portion)):
                self._shared += sample.cached
                if self.tokenizer is not None and sample.job.sink.streams and not sample.tokens:
                    sample.text = GrowingText(self.tokenizer, sample.job.sampling.stop)
                if sample.edits is None:
                    sample.edits = sample.job.edits()
            left -= self._prefill(left) or left
        return self._prefilled > before

    def _prefill(self, most: int) -> int:
        """Compute `most` tokens of prompts, copy pages of those that others have, and start what is complete."""
        scheduler, tokens = self._scheduler, []
        if pieces := list(scheduler.pieces(most)):
            segments = [Segment(sample.pages, sample.cached, end, self._look(sample.job)) for sample, end in pieces]
            tokens = [*chain.from_iterable(sample.sequence[sample.cached : end] for sample, end in pieces)]
            self._runner.prefill(segments, tokens)
            self._prefilled += len(tokens)
            for sample, end in pieces:
                scheduler.computed(sample, end)
        self._copy_last_pages()
        if ready := scheduler.ready():
            self._runner.host.start(ready)
            for sample in ready:
                sample.active = True
        return len(tokens)

    def _look(self, job: EngineJob) -> Looked | None:
        """A prompt's images by the weights of now, computed once for all of its samples and pieces."""
        if not job.request.media:
            return None
        if job.looked is None or job.looked[0] != self.version:
            job.looked = self.version, self._runner.look(job.request.media, len(job.request.prompt))
        return job.looked[1]

    def _copy_last_pages(self) -> None:
        """Complete the prompts of samples of which others have the same."""
        scheduler = self._scheduler
        complete = [(s, s.source) for s in scheduler.sharing if s.source is not None and s.source.cached >= s.due]
        if not complete:
            return
        pages = [(source.pages[s.due // PAGE], s.pages[s.due // PAGE]) for s, source in complete]
        self._runner.cache.copy(*zip(*pages, strict=True))
        for sample, _ in complete:
            self._shared += sample.due - sample.cached
            sample.cached, sample.source = sample.due, None
        scheduler.sharing = [sample for sample in scheduler.sharing if sample.source is not None]

    def _give_pages(self) -> None:
        """Give all active samples pages for a burst, the oldest first; the youngest ones give theirs back for it."""
        scheduler, pool = self._scheduler, self._scheduler.pool
        lacking = [sample for sample in scheduler.rows if sample.active and scheduler.lacking(sample)]
        for sample in sorted(lacking, key=lambda sample: sample.age):
            while sample.active and scheduler.lacking(sample) > pool.available:
                if self._in_flight is not None:  # samples may end with it
                    self._settle()
                    continue
                youngest = max(scheduler.rows, key=lambda sample: sample.age)
                self._free([youngest])
                scheduler.put_back(youngest)
                self._preemptions += 1
            if sample.active and (count := scheduler.lacking(sample)):
                self._runner.host.add_pages(sample.row, len(sample.pages), new := pool.take(count))
                sample.pages += new

    def _decode(self) -> bool:
        """Start sampling in all active rows, and deliver the tokens of the burst before; these too without `ahead`."""
        busy = self._in_flight is not None
        if any(sample.edits is not None for sample in self._scheduler.rows):
            self._settle()  # what they change depends on their last tokens
        self._give_pages()
        before, self._in_flight = self._in_flight, None
        running = [sample for sample in self._scheduler.rows if sample.active]
        if any(sample.remaining > sample.ahead for sample in running):
            self._in_flight = self._started(running)
        if before is not None:
            self._deliver(before)
        if not self._runner.ahead:
            self._settle()
        return busy or bool(running)

    def _started(self, running: list[Sample]) -> Burst:
        """A burst that samples tokens in the rows of `running`."""
        steps = self.steps if self._runner.ahead else min(self.steps, max(sample.remaining for sample in running))
        edited = [(sample.row, sample.edits) for sample in running if sample.edits is not None]
        if edited or (not self._runner.ahead and any(sample.job.sink.streams for sample in running)):
            steps = 1  # edits depend on the last token, or somebody reads along
        edits = ScoreEdits.of(edited, self.model.shape.vocab or 0, self._runner.device)
        longest = max(sample.cached + sample.ahead for sample in running)
        needs = Needs.of([job.sampling for job in {id(sample.job): sample.job for sample in running}.values()])
        output = self._runner.start(len(self._scheduler.rows), steps, longest, needs, edits)
        for sample in running:
            sample.ahead += steps
        return Burst([(sample, sample.row) for sample in running], steps, self.version, output)

    def _settle(self) -> None:
        """Wait for the burst in flight, and deliver what it sampled."""
        burst, self._in_flight = self._in_flight, None
        try:
            if burst is not None:
                self._deliver(burst)
        except Exception as error:
            self.fail(error)
            raise

    def _deliver(self, burst: Burst) -> None:
        sampled = BurstOutput(burst.output())
        ended: list[Ending] = []
        for sample, row in burst.running:
            sample.ahead -= burst.steps
            if not sample.active:  # it ended meanwhile
                continue
            tokens, logprobs, top = sampled.in_row(row, sample.job.sampling.logprobs)
            if not sampled.finite and not all(map(math.isfinite, logprobs)):
                raise PalestraError(f"non-finite log-probabilities with weights version {burst.version}")
            each, full = 1 if sample.job.sink.streams else max(1, len(tokens)), sample.cached // PAGE
            for place in range(0, len(tokens), each):  # a stream gets token by token
                part = slice(place, place + each)
                sample.cached += len(tokens[part])
                try:
                    ending = self._extend(sample, burst.version, tokens[part], logprobs[part], top[part])
                except GuideFailed as error:
                    self._refuse(sample.job, error)
                    break
                if ending is not None:
                    ended.append(ending)
                    break
            else:
                if sample.cached // PAGE > full:  # while the device works, not all at once when it has ended
                    self._scheduler.remember(sample)
        with Uncollected():
            self._end([ending for ending in ended if ending.sample.active])  # not those of requests that were refused

    def _extend(
        self, sample: Sample, version: int, tokens: list[int], logprobs: list[float], top: list[Alternatives]
    ) -> Ending | None:
        """Add sampled tokens to a sample; how it has ended, if it has."""
        since, job, text, count = len(sample.tokens), sample.job, "", len(tokens)
        if sample.text is None and self._stops is not None:
            sample.text = self._stops.text(job.sampling.stop, sample.tokens, tokens)
        if sample.text is not None:
            for count, token in enumerate(tokens, start=1):
                text += sample.text.push(token, ignore_stops=since + count < job.sampling.min_new_tokens)
                if sample.text.stopped_by is not None:
                    break
        sample.tokens += tokens[:count]
        sample.logprobs += logprobs[:count]
        sample.versions += [version] * count
        sample.top += top[:count]
        self._generated += count
        if (ending := sample.ending(since, text)) is None and job.sink.streams:
            job.sink.put(sample.chunk(since, text))
        return ending

    def _end(self, ended: Sequence[Ending]) -> None:
        """Free the rows of samples, all at once, and deliver what they have."""
        self._free([sample for sample, *_ in ended if sample.row >= 0])
        done: list[EngineJob] = []
        for sample, since, text, reason, match in ended:
            job, whole = sample.job, None
            if sample.text is not None:
                text += sample.text.finish()
                whole = sample.text.text
            elif self.tokenizer is not None:
                whole = self.tokenizer.decode(sample.tokens, continues=True)
            if job.sink.streams:
                job.sink.put(sample.chunk(since, text, reason))
            new = tuple(sample.tokens), tuple(sample.logprobs), tuple(sample.versions)
            job.generations[sample.index] = Generation(*new, reason, whole, tuple(sample.top), match)
            if len(job.generations) == job.request.n:
                done.append(job)
        with self._inbox:
            for job in done:
                del self._jobs[job.id]
        for job in done:
            generations = tuple(job.generations[index] for index in range(job.request.n))
            job.sink.put(Result(job.id, job.request.prompt, generations))

    def _free(self, samples: Sequence[Sample]) -> None:
        """Take samples out of the batch and give back their pages."""
        if samples:
            end = len(self._scheduler.rows)
            moves = self._scheduler.release(samples)
            self._runner.host.stop(len(self._scheduler.rows), end, moves)
