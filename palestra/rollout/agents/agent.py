"""The workflow `agent`: a session per sample, the user's program, its reward, and its conversation as trajectories."""

import asyncio
import shutil
import threading
import weakref
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, Literal

from palestra.data.mixture import stream_key
from palestra.errors import UsageError
from palestra.generate.types import GROUP, Generation, StopReason
from palestra.rollout.agents.programs import ProgramFailed, Programs, make_programs
from palestra.rollout.episode import Episode, Transcript, Workflow
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.server import Gateway, new_key
from palestra.rollout.gateway.session import Session
from palestra.rollout.types import Trajectory
from palestra.spec.imports import load_named
from palestra.spec.kinds.posttrain import AgentSpec
from palestra.tasks.sandbox import confined
from palestra.tasks.task import Problem, Status, Verdict

MODEL = "policy"
"""The model's name for programs."""
LONGEST_PROBLEM = 120_000
"""Bytes of a problem: Linux takes no longer variable."""
END_SECONDS = 2.0
"""For a program to end after it has ended its session."""
Outcome = Literal["exit", "call", "idle", "timeout"]


def agent(spec: AgentSpec) -> Workflow:
    """The workflow of a spec; gateway and workers start with the first episode and end with the workflow."""
    if spec.function is not None:
        load_named(spec.function, "rollout.workflow.function")
    elif spec.command and shutil.which(spec.command[0]) is None:
        raise UsageError(f"rollout.workflow.command: there is no program {spec.command[0]!r}")
    if spec.sandbox:
        confined.possible()
    runner = AgentRunner(spec)

    async def workflow(episode: Episode) -> list[Trajectory]:
        if episode.tokenizer.chat_template is None:
            raise UsageError(
                "the workflow agent needs a model with a chat template: give it one with `model.chat_template`"
            )
        plays = [runner.start(episode, sample) for sample in range(episode.samples)]
        try:
            return [row for rows in await asyncio.gather(*plays) for row in rows]
        finally:
            for play in plays:
                play.cancel()

    weakref.finalize(workflow, runner.close)
    return workflow


def public_problem(problem: Problem) -> dict[str, Any]:
    """What a program may know of a problem: not its answer."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
    about = problem.row.get("metadata")
    return {"id": problem.id, "prompt": prompt, "metadata": dict(about) if isinstance(about, Mapping) else {}}


class AgentRunner:
    """Runs agents in the gateway's thread, at most `running` at once."""

    def __init__(self, spec: AgentSpec):
        self.spec = spec
        self._lock = threading.Lock()
        self._gateway: Gateway | None = None
        self._programs: Programs | None = None
        self._slots: asyncio.Semaphore | None = None

    @property
    def gateway(self) -> Gateway:
        """Started when first needed, in whichever thread."""
        with self._lock:
            if self._gateway is None:
                port = 0 if self.spec.port == "auto" else self.spec.port
                gateway = Gateway(model=MODEL, port=port, idle_seconds=self.spec.idle_seconds)
                self._programs = make_programs(self.spec, gateway)
                self._slots = asyncio.Semaphore(self.spec.running)
                self._gateway = gateway
            return self._gateway

    def start(self, episode: Episode, sample: int) -> "asyncio.Future[list[Trajectory]]":
        """Play one sample of an episode, whose generator and verifier are asked in the loop that calls this."""
        source = Source(episode.generator, asyncio.get_running_loop(), GROUP.get())
        return asyncio.wrap_future(self.gateway.thread.start(self._play(episode, sample, source)))

    def close(self) -> None:
        if self._gateway is not None and self._programs is not None:
            self._programs.close()
            self._gateway.close()

    async def _play(self, episode: Episode, sample: int, source: Source) -> list[Trajectory]:
        spec, gateway = self.spec, self.gateway
        assert self._slots is not None
        assert self._programs is not None
        async with self._slots:
            await self._programs.ready()
            session = Session(
                new_key(),
                source,
                episode.tokenizer,
                context=episode.context,
                model=MODEL,
                sampling=episode.sampling,
                seed=stream_key(episode.seed, "agent", sample),
                most_turns=spec.turns,
                most_tokens=spec.tokens,
                format=None if spec.calls == "auto" else spec.calls,
            )
            gateway.sessions.add(session)
            failure: Verdict | None = None
            try:
                outcome, answer = await self._ended(session, episode.problem)
                if outcome in ("idle", "timeout"):
                    idle = f"made no request for {spec.idle_seconds:g} s"
                    note = f"the agent {idle if outcome == 'idle' else f'ran for {spec.seconds:g} s'}"
                    failure = Verdict(0.0, Status.TIMEOUT, note=note)
            except ProgramFailed as error:
                answer = None
                # One that a limit has ended has done what it could.
                if not session.limited and session.reward is None:
                    failure = Verdict(0.0, Status.ERROR, note=str(error))
            finally:
                gateway.sessions.end(session, "closed")
        return await self._scored(episode, session, session.answer or answer, failure, source)

    async def _ended(self, session: Session, problem: Problem) -> tuple[Outcome, str | None]:
        """How the agent ended, and its answer."""
        assert self._programs is not None
        about = public_problem(problem)
        if len(repr(about).encode()) > LONGEST_PROBLEM:
            raise ProgramFailed(f"{problem.id} is longer than {LONGEST_PROBLEM:,} bytes")
        program = asyncio.ensure_future(self._programs.run(about, self.gateway.url, session.key))
        over = asyncio.ensure_future(session.over.wait())
        try:
            done, _ = await asyncio.wait({program, over}, timeout=self.spec.seconds, return_when="FIRST_COMPLETED")
            if over in done and session.ended == "call":
                await asyncio.wait({program}, timeout=END_SECONDS)
            if program.done():
                return "exit", program.result()
            if not done:
                return "timeout", None
            return "call" if session.ended == "call" else "idle", None
        finally:
            over.cancel()
            program.cancel()
            await asyncio.gather(over, program, return_exceptions=True)

    async def _scored(
        self,
        episode: Episode,
        session: Session,
        answer: str | None,
        failure: Verdict | None,
        source: Source,
    ) -> list[Trajectory]:
        """The rows of an episode, with the verdict and the reward."""
        last, posted = session.last, session.reward
        if failure is None and last is None:
            failure = Verdict(0.0, Status.ERROR, note="the agent ended without a turn of the model")
        if failure is None and posted is None and self.spec.reward == "program":
            failure = Verdict(0.0, Status.ERROR, note="the agent posted no reward")
        if last is None or failure is not None:
            verdict = failure or Verdict(0.0, Status.ERROR)
        elif self.spec.reward == "program":
            score = posted or 0.0
            verdict = Verdict(score, Status.CORRECT if score >= 1 else Status.WRONG, note=answer or "")
        else:
            text = last.messages[-1]["content"] if answer is None else answer
            final: Generation = replace(last.generation, text=text)
            assert source.loop is not None
            judge: Coroutine[Any, Any, Verdict] = episode.verdict(final, last.prompt)
            verdict = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(judge, source.loop))
        counts = {"requests": len(session.turns), "forks": session.forks, "retokenized": session.retokenized}
        parts = {**verdict.parts, **({} if posted is None else {"program": posted}), **counts}
        verdict = replace(verdict, parts={name: float(value) for name, value in parts.items()})
        reward = verdict.score + (posted or 0.0 if self.spec.reward == "sum" else 0.0)
        if last is None:
            nothing = Transcript.of(episode.prompt)
            stop_reason = str(StopReason.EOS)
            return [nothing.trajectory(len(episode.prompt), verdict, 0.0, stop_reason, episode.tokenizer)]
        truncated = str(StopReason.LENGTH) if session.limited else None
        return session.trajectories(verdict, reward, self.spec.rows, truncated)
