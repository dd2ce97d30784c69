"""Rollouts collected by other processes while the learner learns, with a policy some improvements old.

Each process has its share of the environments and a copy of the policy, so no step waits for the slowest environment
of all. Rollout j is collected with the policy after j - staleness improvements (the first one's before that): the
numbers of a run depend on no clock, and a resumed run repeats them. `palestra.rl.returns.vtrace` corrects for the age.
"""

import asyncio
import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from palestra.cluster.actor import Actor, ActorLost
from palestra.control.collector import Collector, Rollout
from palestra.control.envs.make import Factory, evaluation_vector, make_vector
from palestra.control.envs.snapshot import vector_exactness
from palestra.control.envs.stepping import EnvironmentFailed, Stepper
from palestra.control.envs.vector import shares
from palestra.control.envs.watchdog import Patience, hung
from palestra.control.envs.workers import portable
from palestra.control.episodes import Episodes
from palestra.control.nets.heads import ActionHead
from palestra.control.spaces import observation_shape
from palestra.errors import UsageError
from palestra.spec.kinds.control import ControlSpec

CLOSE_SECONDS = 5.0


class Segment(NamedTuple):
    """What one process has collected for one rollout."""

    columns: dict[str, Any]  # of a Rollout, as NumPy arrays; None: no action masks
    frames: int
    finished: int
    recent: list[tuple[float, int]]  # (return, length) of the last of those episodes
    components: Sequence[dict[str, float]] = ()  # and the sums of `env.components` of these


class HostedCollector:
    """In its own process: a share of the environments and a copy of the policy, used by one thread."""

    def __init__(self, spec: ControlSpec, actor: Callable[..., Any], factory: bytes, copies: int, seed: int):
        """`actor(spec, obs_shape, head)` makes the network."""
        os.environ["OMP_NUM_THREADS"] = "1"  # `env.vectorize: auto` starts no processes of its own on one core
        torch.set_num_threads(1)
        self.env = make_vector(spec.env, copies, pickle.loads(factory))
        self.episodes = Episodes(Stepper(self.env, spec.env.id))
        head = ActionHead.of(self.env.single_action_space)
        self.net = actor(spec, observation_shape(self.env.single_observation_space), head)
        self.collector = Collector(self.episodes, spec.algorithm.horizon, self.net.head.shape, self.net.head.dtype)
        self.generator = torch.Generator().manual_seed(seed)
        self._thread = ThreadPoolExecutor(1)
        self._ident = self._thread.submit(threading.get_ident).result()

    async def run(self, command: str, *arguments: Any) -> Any:
        """The result of a command; commands are executed one after the other, as they came."""

        def work() -> Any:
            try:
                return getattr(self, f"_{command}")(*arguments)
            except (Exception, SystemExit) as error:
                raised = portable(error)
                raised.add_note(f"in a collecting process:\n{traceback.format_exc()}")
                raise raised from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def look(self) -> tuple[int, str]:
        """Vector steps so far, and where the thread is."""
        stack = "".join(traceback.format_stack(sys._current_frames().get(self._ident)))
        return self.episodes.stepper.steps, stack

    def close(self) -> None:
        """Close the environments."""
        self._thread.submit(self.env.close).result(CLOSE_SECONDS)

    def _reset(self, seed: int | None) -> np.ndarray:
        self.episodes.stepper.reset(seed) if seed is None else self.episodes.reset(seed)
        return self.episodes.now

    def _exactness(self) -> str | None:
        return vector_exactness(self.env)

    @torch.no_grad()
    def _collect(self, weights: dict[str, np.ndarray]) -> Segment:
        """One rollout with these weights, and the log-probabilities that its actions were sampled with."""
        episodes, net = self.episodes, self.net
        net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
        frame, finished = episodes.frame, episodes.finished
        noise = net.head.noise(self.generator, self.collector.horizon, episodes.num_envs)

        def act(obs: Tensor, noise: Tensor) -> Tensor:
            mask = None if episodes.mask is None else torch.from_numpy(episodes.mask)
            return net.policy(obs, mask).sample(noise)

        rollout = self.collector.collect(act, noise, net.head.to_env)
        masks = None if rollout.masks is None else rollout.masks.flatten(0, 1)
        policy = net.policy(rollout.obs.flatten(0, 1), masks)
        rollout.logprobs = policy.log_prob(rollout.actions.flatten(0, 1)).view(rollout.rewards.shape)
        columns = {name: None if column is None else column.numpy().copy() for name, column in vars(rollout).items()}
        ended = episodes.finished - finished
        recent = list(episodes.recent)[-ended:] if ended else []
        components = list(episodes.recent_components)[-ended:] if ended else []
        return Segment(columns, episodes.frame - frame, ended, recent, components)

    def _state(self) -> dict[str, Any]:
        return {"episodes": self.episodes.state(), "generator": self.generator.get_state()}

    def _load_state(self, state: dict[str, Any]) -> np.ndarray | None:
        self.generator.set_state(state["generator"])
        return self.episodes.load_state(state["episodes"])


class Elsewhere(VectorEnv):
    """Environments that processes of `HostedCollector` step by themselves: it gives whole rollouts, not steps."""

    def __init__(self, spec: ControlSpec, actors: Sequence[Actor], factory: Factory | None):
        """`actors` have `shares(num_envs, len(actors))` of the environments."""
        with closing(evaluation_vector(spec.env, 1, factory)) as probe:  # of several agents a whole game
            self.metadata = probe.metadata
            self.single_observation_space, self.single_action_space = (
                probe.single_observation_space,
                probe.single_action_space,
            )
            agents = probe.num_envs
        self.name, self.num_envs, self.seconds = spec.env.id, spec.env.num_envs, spec.env.reset_timeout
        self.staleness = getattr(spec.algorithm, "staleness", 0)
        self._actors, self._rows = actors, shares(spec.env.num_envs, len(actors))
        if sizes := [rows.stop - rows.start for rows in self._rows if (rows.stop - rows.start) % agents]:
            raise UsageError(
                f"cluster.environments: each process collects in whole games of the {agents} agents of {self.name}, "
                f"and {sizes[0]} of env.num_envs = {self.num_envs} would be in one"
            )
        self._started: deque[list[Future[Segment]]] = deque()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in each; the environment of row i gets `seed + i`."""
        self._started.clear()
        seeds = [(None if seed is None else seed + rows.start,) for rows in self._rows]
        return np.concatenate(self._all("reset", seeds)), {}

    def segments(self, weights: dict[str, Tensor]) -> list[Segment]:
        """What all have collected for the next rollout; later ones are begun with these weights first."""
        arrays = {name: value.numpy(force=True).copy() for name, value in weights.items()}
        while len(self._started) <= self.staleness:
            self._started.append([actor.call("run", "collect", arrays) for actor in self._actors])
        return [self._result(number, call) for number, call in enumerate(self._started.popleft())]

    def rollout(self, segments: Sequence[Segment]) -> Rollout:
        """The segments of all processes as one rollout, with their environments side by side."""
        parts = [segment.columns for segment in segments]
        columns: dict[str, Any] = {"masks": None}
        for name in parts[0]:
            if name in ("last_obs", "final_obs"):
                columns[name] = torch.from_numpy(np.concatenate([part[name] for part in parts]))
            elif name == "ends":  # t·N + n, with N and n of the process
                at = zip((divmod(part[name], part["rewards"].shape[1]) for part in parts), self._rows, strict=True)
                ends = np.concatenate([t * self.num_envs + n + rows.start for (t, n), rows in at])
                columns[name] = torch.from_numpy(ends)
            elif parts[0][name] is not None:
                columns[name] = torch.from_numpy(np.concatenate([part[name] for part in parts], axis=1))
        return Rollout(**columns)

    def get_state(self) -> dict[str, Any]:
        """The collected rollouts that were not learned from, and the state of each process after them."""
        waiting = [[self._result(number, call) for number, call in enumerate(calls)] for calls in self._started]
        return {"waiting": [[list(segment) for segment in each] for each in waiting], "collectors": self._all("state")}

    def set_state(self, state: dict[str, Any]) -> np.ndarray | None:
        """Continue from `get_state`; which environments restarted, bool (N,), or None."""
        if len(state["collectors"]) != len(self._actors):
            raise UsageError(
                f"this run was collected by {len(state['collectors'])} processes, not {len(self._actors)}: "
                "resume it with that number of cluster.environments"
            )
        restarted = self._all("load_state", [(each,) for each in state["collectors"]])
        self._started = deque([_done(Segment(*segment)) for segment in each] for each in state["waiting"])
        if all(rows is None for rows in restarted):
            return None
        sizes = [rows.stop - rows.start for rows in self._rows]
        return np.concatenate([np.zeros(n, bool) if r is None else r for r, n in zip(restarted, sizes, strict=True)])

    @property
    def observations(self) -> np.ndarray:
        """Nothing: the processes keep what they act on."""
        assert self.single_observation_space.shape is not None
        return np.zeros((self.num_envs, *self.single_observation_space.shape), self.single_observation_space.dtype)

    def exactness(self) -> str | None:
        """One sentence when episodes cannot continue after a resume, None when they can."""
        return next((sentence for sentence in self._all("exactness") if sentence is not None), None)

    def _all(self, command: str, arguments: Sequence[tuple] | None = None) -> list[Any]:
        given = arguments or [()] * len(self._actors)
        calls = [actor.call("run", command, *each) for actor, each in zip(self._actors, given, strict=True)]
        return [self._result(number, call) for number, call in enumerate(calls)]

    def _result(self, number: int, call: Future[Any]) -> Any:
        """The answer of a process; one that hangs or dies is named."""
        actor, rows, patience, looked = self._actors[number], self._rows[number], Patience(self.seconds), (0, "")
        try:
            actor.ready.result()
            while not wait([call], patience.interval).done:
                with suppress(TimeoutError):  # a process that answers nothing is noticed by its hub
                    looked = actor.call("look").result(patience.interval)
                if patience.over(looked[0]):
                    raise hung(self.name, rows.start, "a rollout", self.seconds, looked[1])
            return call.result()
        except ActorLost as error:
            problem = f"{error}: it collected in environments {rows.start} to {rows.stop - 1} of {self.name}"
            raise EnvironmentFailed(problem) from error


def _done(segment: Segment) -> Future[Segment]:
    future: Future[Segment] = Future()
    future.set_result(segment)
    return future
