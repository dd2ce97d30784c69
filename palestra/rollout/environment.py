"""The workflow in which a model acts in an environment: alone, against itself, or against a fixed opponent.

Every player that the model plays has a transcript and a trajectory of its own, with the rewards of its turns.
"""

import asyncio
import inspect
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.data.mixture import stream_key
from palestra.data.tokenizers import Tokenizer
from palestra.errors import UsageError
from palestra.generate.types import StopReason
from palestra.rollout.episode import Episode, Transcript, Workflow, encode_problem, together
from palestra.rollout.tools import shortened
from palestra.rollout.types import Trajectory
from palestra.rollout.workflows import feedback_tokens, following, single_turn
from palestra.spec.imports import load_named
from palestra.spec.kinds.posttrain import EnvironmentSpec
from palestra.tasks.environments.environment import RANDOM, ROW, SELF, Turn
from palestra.tasks.environments.host import EnvironmentFailed, Game, Host
from palestra.tasks.rewards.rewards import open_generator
from palestra.tasks.task import Status, Verdict

OPPONENT_TEMPERATURE = 1.0  # also in a greedy evaluation: otherwise every game would be the same


def environment(spec: EnvironmentSpec, root: Path) -> Workflow:
    """The workflow of a spec; `root` is the folder of runs, where opponents are looked for."""
    host, models = Host(spec.workers, spec.seconds), Opponents(root)
    summarize = None if spec.summarize is None else load_named(spec.summarize, "rollout.workflow.summarize")

    async def workflow(episode: Episode) -> list[Trajectory]:
        row = episode.problem.row.get(ROW)
        if row is None:
            return await single_turn(episode)
        table = Table(episode, row, spec, host, models, summarize)
        first = await table.begin()
        seats = first[1].players if row["opponent"] == SELF and isinstance(first[1], Turn) else 1
        # A game is played as soon as it has begun: others may wait for its session.
        others = range(1, -(-episode.samples // seats))
        played = await together([table.play(0, *first, seats), *(table.begin_and_play(n, seats) for n in others)])
        return [trajectory for trajectories in played for trajectory in trajectories][: episode.samples]

    weakref.finalize(workflow, _close, host, models)
    return workflow


def _close(host: Host, models: "Opponents") -> None:
    host.close()
    models.close()


class Opponents:
    """Frozen models by name, opened when they are first needed."""

    def __init__(self, root: Path):
        self._root, self._lock = root, threading.Lock()
        self._open: dict[str, Any] = {}

    def episode(self, name: str, episode: Episode) -> Episode:
        """The episode as that model plays it."""
        with self._lock:  # many games begin at once
            if name not in self._open:
                self._open[name] = open_generator(name, self._root)
            generator = self._open[name]
        sampling = replace(episode.sampling, temperature=OPPONENT_TEMPERATURE)
        seed, engine = stream_key(episode.seed, "opponent") >> 1, generator.engine
        of_model = {"generator": generator, "tokenizer": engine.tokenizer, "context": engine.context}
        return replace(episode, **of_model, sampling=sampling, seed=seed)

    def close(self) -> None:
        """End their threads."""
        for generator in self._open.values():
            generator.close()


@dataclass
class Seat:
    """A player: what it has read and written, and its rewards."""

    episode: Episode
    sample: int
    """Selects its seeds."""
    transcript: Transcript = field(default_factory=Transcript)
    prompt: int = 0
    rewards: list[float] = field(default_factory=list)
    stop_reason: str = "eos"

    def read(self, text: str) -> bool:
        """Take in an observation; False where no room is left for an action."""
        problem, tokenizer, turn = self.episode.problem, self.episode.tokenizer, len(self.rewards)
        plain = isinstance(problem.prompt, str)
        text = known_text(tokenizer, text)
        if not self.transcript.tokens:
            told = "\n".join(part for part in (problem.row[ROW]["instruction"], text) if part)
            prompt = f"{told}\n" if plain else ({"role": "user", "content": told},)
            longer = Transcript.of(encode_problem(replace(problem, prompt=prompt), tokenizer))
        elif plain:
            ended = tokenizer.decode(self.transcript.tokens[-1:]).endswith("\n")
            longer = self.transcript.with_context(tokenizer.encode(f"{text}\n" if ended else f"\n{text}\n"))
        else:
            tokens = feedback_tokens(problem, tokenizer, text, turn)
            longer = self.transcript.with_context(following(self.transcript.tokens, tokens, tokenizer))
        if len(longer.tokens) >= self.episode.context:
            return False
        self.prompt = self.prompt or len(longer.tokens)
        self.transcript = longer
        return True

    async def act(self) -> str | None:
        """The next action; None where the generator was stopped or wrote nothing."""
        turn = len(self.rewards)
        (generation,) = await self.episode.generate(self.transcript.tokens, turn=turn, sample=self.sample)
        self.stop_reason = str(generation.stop_reason)
        self.transcript = self.transcript.with_sampled(generation)
        if generation.stop_reason == StopReason.ABORT or not generation.tokens:
            return None
        self.rewards.append(0.0)
        return generation.text or ""

    def trajectory(self, verdict: Verdict, reward: float) -> Trajectory:
        """The finished trajectory; one that has read nothing has the problem's own prompt."""
        tokens = self.transcript if self.transcript.tokens else Transcript.of(self.episode.prompt)
        prompt = self.prompt or len(self.episode.prompt)
        made = tokens.trajectory(prompt, verdict, reward, self.stop_reason, self.episode.tokenizer)
        return replace(made, turn_rewards=tuple(self.rewards))


@dataclass(frozen=True)
class Table:
    """Where the games of one episode are played."""

    episode: Episode
    row: Mapping[str, Any]
    spec: EnvironmentSpec
    host: Host
    models: Opponents
    summarize: Callable[[str, int], str] | None

    async def begin(self) -> tuple[Game, Turn | EnvironmentFailed]:
        """A game and its first turn."""
        row = self.row
        game = self.host.open(row["name"], row["config"], row["seed"], self.episode.problem)
        try:
            return game, await game.reset()
        except EnvironmentFailed as error:
            return game, error

    async def begin_and_play(self, number: int, count: int) -> list[Trajectory]:
        return await self.play(number, *await self.begin(), count)

    async def play(self, number: int, game: Game, turn: Turn | EnvironmentFailed, count: int) -> list[Trajectory]:
        """Play a game to its end; the trajectories of the `count` players that the model plays."""
        if isinstance(turn, EnvironmentFailed):
            return [self._failed(Seat(self._mine(), number), str(turn)) for _ in range(count)]
        mine = range(turn.players) if self.row["opponent"] == SELF else [self.row["number"] % turn.players]
        seats = {player: Seat(self._mine(), number * len(mine) + place) for place, player in enumerate(mine)}
        others: dict[int, Seat] = {}
        chance = stream_key(self.episode.seed, "opponent", number)
        unfinished, moves = "", 0
        try:
            while not turn.done and not unfinished:
                if turn.player in seats:
                    action = await self._act(seats[turn.player], turn.observation)
                else:
                    action = await self._answer(others, turn, chance + moves, number)
                moves += 1
                if action is None:
                    unfinished = f"player {turn.player} has reached a limit"
                    break
                turn = await game.step(action)
                for player, reward in turn.rewards.items():
                    if player in seats and seats[player].rewards:
                        seats[player].rewards[-1] += reward
        except EnvironmentFailed as error:
            return [self._failed(seat, str(error)) for seat in seats.values()]
        finally:
            await game.close()
        return [self._ended(player, seat, turn, unfinished) for player, seat in seats.items()]

    def _mine(self) -> Episode:
        limit = self.episode.context if self.spec.tokens is None else min(self.episode.context, self.spec.tokens)
        return replace(self.episode, context=limit)

    async def _act(self, seat: Seat, observation: str) -> str | None:
        if self.summarize is not None:
            observation = self.summarize(observation, self.spec.observation)
        if len(seat.rewards) >= self.spec.turns or not seat.read(shortened(observation, self.spec.observation)):
            seat.stop_reason = str(StopReason.LENGTH)
            return None
        return await seat.act()

    async def _answer(self, others: dict[int, Seat], turn: Turn, chance: int, number: int) -> str | int | None:
        """The action of an opponent."""
        opponent = self.row["opponent"]
        if opponent == RANDOM:
            return chance % 2**63
        if ":" in opponent:
            play = load_named(opponent, "opponent")
            answer = play(turn.observation, random.Random(chance))
            return await answer if inspect.isawaitable(answer) else answer
        if turn.player not in others:
            episode = await asyncio.to_thread(self.models.episode, opponent, self.episode)
            others[turn.player] = Seat(episode, number * turn.players + turn.player)
        action = await self._act(others[turn.player], turn.observation)
        if action is None:
            raise EnvironmentFailed(f"the opponent {opponent} has reached a limit, such as its context")
        return action

    def _ended(self, player: int, seat: Seat, turn: Turn, unfinished: str) -> Trajectory:
        if seat.stop_reason == StopReason.ABORT:
            return self._failed(seat, "the generator aborted its turn")
        if unfinished and not seat.rewards:
            return self._failed(seat, f"{unfinished} before its first action")
        if unfinished:
            seat.rewards[-1] += self.row["unfinished"]
        reward = sum(seat.rewards) if seat.rewards else turn.rewards.get(player, 0.0)
        status = Status.CORRECT if reward >= self.row["success"] and not unfinished else Status.WRONG
        if self.row["sparse"]:
            reward = float(status == Status.CORRECT)
            seat.rewards[:] = [0.0] * (len(seat.rewards) - 1) + [reward] * bool(seat.rewards)
        parts = {"turns": float(len(seat.rewards)), "finished": float(not unfinished)}
        for name, value in turn.parts.items():
            of, _, part = name.rpartition("/")
            if of in ("", str(player)):
                parts[part] = value
        if turn.players > 1 and not unfinished:
            parts |= {"won": float(reward > 0), "lost": float(reward < 0)}
        return seat.trajectory(Verdict(reward, status, parts, note=unfinished), reward)

    def _failed(self, seat: Seat, why: str) -> Trajectory:
        return seat.trajectory(Verdict(0.0, Status.ERROR, note=why), 0.0)


def known_text(tokenizer: Tokenizer, text: str) -> str:
    """The text without what the tokenizer does not know: no observation may end a run."""
    try:
        tokenizer.encode(text)
        return text
    except UsageError:
        return "".join(sign for sign in text if _known(tokenizer, sign))


def _known(tokenizer: Tokenizer, sign: str) -> bool:
    try:
        return bool(tokenizer.encode(sign))
    except UsageError:
        return False
