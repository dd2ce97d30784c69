"""Makes environments: by Gymnasium id, import path or object, one or many, here or in workers, whichever is faster."""

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv

from palestra.control.envs import classic, mujoco
from palestra.control.envs.agents import WholeGame, games, make_game
from palestra.control.envs.atari import AtariGame, atari_games
from palestra.control.envs.components import Components
from palestra.control.envs.one import OneOf
from palestra.control.envs.pool import Pool
from palestra.control.envs.snapshot import Snapshot
from palestra.control.envs.vector import copies
from palestra.control.envs.workers import Make
from palestra.control.seeding import load_random_state, random_state
from palestra.control.spaces import FlatAction, PackedBox, PackedObservation, flat_actions
from palestra.errors import MissingExtra, UsageError
from palestra.spec.imports import import_named
from palestra.spec.kinds.control import JAX, PETTINGZOO, EnvSpec

log = logging.getLogger("palestra.control")

MEASURED_SECONDS = 0.1
WORTH = 0.8  # processes must take less than this share of the time, as they cost memory and time to start
_chosen: dict[str, int] = {}  # measured once in this process: training and evaluation then run alike


def processes_for(spec: EnvSpec, num_envs: int, make: Make) -> int:
    """The number of worker processes for `num_envs` copies; 0: all in this one. Results are the same either way.

    `auto` times throw-away copies in this process, and shared with others so that each core has one; it takes the
    faster, logged, and overridden by `sync` and `async`. An environment given as an object is not timed: its steps may
    have side effects.
    """
    count = min(cores(), num_envs)
    if spec.vectorize == "async":
        # Also on one core: a worker process keeps a crash of the environment out of this one.
        return max(count, min(2, num_envs))
    if spec.vectorize == "sync" or count < 2 or spec.id.startswith("object:"):
        return 0
    key = f"{spec.id} {spec.kwargs} {spec.frame_stack} {num_envs}"
    if key not in _chosen:
        before = random_state()
        try:
            here, there = (_step_seconds(spec, [make] * num_envs, processes) for processes in (0, count - 1))
        except (Exception, SystemExit):  # training will fail the same way and report it
            return 0
        finally:
            load_random_state(before)
        _chosen[key] = count - 1 if there < WORTH * here else 0
        log.info(
            "%s: a step of %d takes %.0f µs in this process, %.0f µs in %d: using %d (env.vectorize overrides)",
            *(spec.id, num_envs, 1e6 * here, 1e6 * there, count, 1 + _chosen[key]),
        )
    return _chosen[key]


def cores() -> int:
    """The cores of this process: OMP_NUM_THREADS, which is set where several runs share the machine, else all."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) > 0 else len(os.sched_getaffinity(0))


def _step_seconds(spec: EnvSpec, makers: Sequence[Make], processes: int) -> float:
    """Seconds of a vector step with random actions, resets included."""
    with closing(copies(spec.id, makers, processes, spec.reset_timeout, here=True)) as env:
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(8)]
        env.reset(seed=0)
        env.step(actions[0])
        began, steps = time.perf_counter(), 0
        while steps < 1000 and (steps < 2 or time.perf_counter() - began < MEASURED_SECONDS):
            env.step(actions[steps % len(actions)])
            steps += 1
        return (time.perf_counter() - began) / steps


Factory = Callable[[], gym.Env]


def _threads(id: str) -> Callable[[int], VectorEnv]:
    return lambda num_envs: mujoco.VECTORS[id](id, num_envs, cores())


# Environments stepped as NumPy arrays: bit-equal to Gymnasium's, many times as fast.
NUMPY: dict[str, Callable[[int], VectorEnv]] = {
    "CartPole-v0": partial(classic.CartPoleVector, max_episode_steps=200),
    "CartPole-v1": classic.CartPoleVector,
    "Acrobot-v1": classic.AcrobotVector,
    "Pendulum-v1": classic.PendulumVector,
    "MountainCar-v0": classic.MountainCarVector,
    "MountainCarContinuous-v0": classic.MountainCarContinuousVector,
    **{id: _threads(id) for id in mujoco.VECTORS},
}


# Words in Gymnasium's error about a missing package, and the extra that has it.
EXTRAS = {
    **{name: name for name in ("envpool", "brax", "playground", "gymnax")},  # first: their errors may have other words
    **{"ale": "atari", "box2d": "box2d", "mujoco": "mujoco"},
}


def make_vector(spec: EnvSpec, num_envs: int, factory: Factory | None = None) -> VectorEnv:
    """`num_envs` copies of the environment that step together and reset themselves."""
    if spec.module is not None:
        import_named(spec.module, "env.module")
    if _has_agents(spec):
        return games(spec, num_envs)
    if factory is None and _only_vectors(spec):
        return _only_vector(spec, num_envs)
    if factory is None and spec.vectorize in ("auto", "vector"):
        arrays = spec.id in NUMPY and (spec.id not in mujoco.VECTORS or mujoco.has_batches())
        if arrays and not spec.kwargs and spec.frame_stack is None and not spec.components:
            with _explained(spec):
                return NUMPY[spec.id](num_envs)
        if _is_atari(spec):
            if spec.components:
                raise UsageError("env.components: Atari games step in C++ and give none: use `vectorize: sync`")
            with _explained(spec):
                return atari_games(spec.id, num_envs, spec.kwargs, spec.frame_stack)
        if spec.vectorize == "vector":
            return _own_vector(spec, num_envs)

    def make() -> Snapshot:
        return Snapshot(make_single(spec, factory))

    processes, shared = processes_for(spec, num_envs, make), spec.vectorize != "async"
    return copies(spec.id, [make] * num_envs, processes, spec.reset_timeout, here=shared)


MakeVector = Callable[[EnvSpec, int, Factory | None], VectorEnv]


def evaluation_vector(
    spec: EnvSpec, at_most: int, factory: Factory | None = None, make: MakeVector = make_vector
) -> VectorEnv:
    """Environments for evaluation: episodes of Atari games are whole games."""
    if factory is None and _is_atari(spec):
        spec = spec.model_copy(update={"kwargs": _of_whole_games(spec)})
    if _has_agents(spec):
        return games(spec, at_most, at_most=True)
    return make(spec, at_most, factory)


def make_single(spec: EnvSpec, factory: Factory | None = None, **kwargs: Any) -> gym.Env:
    """One environment as in the vector of them: observations and actions as one array each, frames stacked."""
    if spec.module is not None:
        import_named(spec.module, "env.module")
    if factory is not None:
        if spec.kwargs:
            raise UsageError("env.kwargs are for environments made by id: pass a function that makes yours with them")
        env = _checked(spec, factory())
    elif _is_atari(spec) and spec.vectorize in ("auto", "vector"):
        with _explained(spec):
            games = atari_games(spec.id, 1, _of_whole_games(spec), spec.frame_stack)
            return AtariGame(games, kwargs.get("render_mode"))
    elif _only_vectors(spec) and not (kwargs.get("render_mode") and spec.id in gym.registry):
        if kwargs.get("render_mode"):
            raise UsageError(f"{spec.id} draws no pictures: EnvPool and JAX only step it")
        return OneOf(_only_vector(spec, 1))
    elif _has_agents(spec):
        return WholeGame(spec.id, make_game(spec, **kwargs), marked=spec.policies > 1)
    elif ":" in spec.id:
        env = _imported(spec, kwargs)
    else:
        with _explained(spec):
            arguments: dict[str, Any] = {**spec.kwargs, **kwargs}
            env = gym.make(spec.id, **arguments)
    if spec.components or spec.reward_weights is not None:
        env = Components(env, spec.components, spec.reward_weights)
    if flat_actions(env.action_space) is not env.action_space:
        env = FlatAction(env)
    if not isinstance(env.observation_space, gym.spaces.Box):
        env = PackedObservation(env)
    if spec.frame_stack is not None:
        single = env.observation_space
        env = gym.wrappers.FrameStackObservation(env, spec.frame_stack, padding_type="zero")
        if isinstance(single, PackedBox):
            env.observation_space = PackedBox(single.parts, spec.frame_stack)
    return env


def factory_of(env: object) -> Factory:
    """A factory from what a caller passed as an environment: a class, a function, or an instance with a spec."""
    if isinstance(env, gym.Env):
        try:
            spec = env.spec
        except ValueError:  # inside a wrapper that does not record its arguments
            spec = None
        if spec is None:
            raise UsageError(
                f"{type(env).__name__} is a single environment, and training needs several: "
                "pass its class, or a function that makes one."
            )
        return partial(gym.make, spec)
    if callable(env):
        return env
    raise UsageError(
        f"an environment is a Gymnasium id, a class or a function that makes one; got {type(env).__name__}"
    )


def _of_whole_games(spec: EnvSpec) -> dict[str, Any]:
    """An Atari game's keywords, with episodes that go on after a lost life."""
    return {name: value for name, value in spec.kwargs.items() if name != "life_loss_info"}


def _has_agents(spec: EnvSpec) -> bool:
    return spec.id.startswith(PETTINGZOO)


def _only_vectors(spec: EnvSpec) -> bool:
    """Whether the environment is stepped by EnvPool or JAX."""
    return spec.vectorize == "envpool" or spec.id.startswith(JAX)


def _only_vector(spec: EnvSpec, num_envs: int) -> VectorEnv:
    with _explained(spec):
        if spec.vectorize == "envpool":
            return Pool(spec.id, num_envs, cores(), spec.kwargs)
        jax = importlib.import_module("palestra.control.envs.jax")  # imports JAX
        return jax.JaxEnvs(spec.id, num_envs, spec.kwargs)


def _is_atari(spec: EnvSpec) -> bool:
    return spec.id.startswith("ALE/")


def _checked(spec: EnvSpec, env: object) -> gym.Env:
    if not isinstance(env, gym.Env):
        raise UsageError(f"the environment {spec.id} must make a gymnasium.Env, it made a {type(env).__name__}")
    return env


def _imported(spec: EnvSpec, kwargs: dict[str, Any]) -> gym.Env:
    """An environment of `module:Class`; also of Gymnasium's `module:Id-v0`, whose module registers it."""
    module, _, name = spec.id.partition(":")
    made = getattr(import_named(module, "env.id"), name, None)
    with _explained(spec):
        if made is None and name in gym.registry:
            arguments: dict[str, Any] = {**spec.kwargs, **kwargs}
            return gym.make(name, **arguments)
        if not callable(made):
            raise UsageError(
                f"env.id: {module} has no environment {name!r}: expected a class or a function of that name, "
                "or an id that the module registers"
            )
        # A user's class need not accept render_mode. Of a class that wraps another one `metadata` is a property.
        metadata = getattr(made, "metadata", {})
        modes = metadata.get("render_modes", ()) if isinstance(metadata, dict) else ()
        wanted = kwargs if kwargs.get("render_mode") in modes else {}
        return _checked(spec, made(**{**spec.kwargs, **wanted}))


def _own_vector(spec: EnvSpec, num_envs: int) -> VectorEnv:
    with _explained(spec):
        if ":" in spec.id or gym.spec(spec.id).vector_entry_point is None:
            raise UsageError(f"{spec.id} has no vectorized form of its own: use `vectorize: sync` or `async`")
        if spec.frame_stack is not None:
            raise UsageError("env.frame_stack does not work with `vectorize: vector`: use `sync` or `async`")
        arguments: dict[str, Any] = dict(spec.kwargs)
        return gym.make_vec(spec.id, num_envs, vectorization_mode="vector_entry_point", **arguments)


@contextmanager
def _explained(spec: EnvSpec) -> Iterator[None]:
    """Gymnasium's errors about ids and missing packages, as errors of the spec."""
    try:
        if _is_atari(spec) and not _only_vectors(spec):
            gym.register_envs(importlib.import_module("ale_py"))
        yield
    except gym.error.UnregisteredEnv as error:
        raise UsageError(f"env.id: there is no environment {spec.id!r}. {error}") from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        message = f"{spec.id} {spec.vectorize} {error}".lower()
        extra = next((extra for word, extra in EXTRAS.items() if word in message), "train")
        raise MissingExtra(f"{spec.id} ({error})", extra) from error
    except (TypeError, gym.error.Error) as error:
        raise UsageError(f"env: {spec.id} could not be made with {spec.kwargs}: {error}") from error
