"""Makes environments: by Gymnasium id or from an object, one or many, always with a state that can be saved."""

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from palestra.control.envs.classic import CartPoleVector
from palestra.control.envs.snapshot import Snapshot
from palestra.errors import MissingExtra, UsageError
from palestra.spec.imports import import_named
from palestra.spec.kinds.control import EnvSpec

Factory = Callable[[], gym.Env]

# Environments stepped as NumPy arrays: the same numbers as Gymnasium's, many times as fast.
NUMPY: dict[str, Callable[[int], VectorEnv]] = {
    "CartPole-v0": partial(CartPoleVector, max_episode_steps=200),
    "CartPole-v1": CartPoleVector,
}


# Words in Gymnasium's complaint about a missing package, and the extra that has it.
EXTRAS = {"ale": "atari", "box2d": "box2d", "mujoco": "mujoco"}


def make_vector(spec: EnvSpec, num_envs: int, factory: Factory | None = None) -> VectorEnv:
    """`num_envs` copies of the environment that step together and reset themselves."""
    if spec.module is not None:
        import_named(spec.module, "env.module")
    if factory is None and spec.vectorize in ("auto", "vector"):
        if spec.id in NUMPY and not spec.kwargs:
            return NUMPY[spec.id](num_envs)
        if spec.vectorize == "vector":
            return _own_vector(spec, num_envs)
    maker = partial(_checked, spec, factory, os.getpid())
    vector = AsyncVectorEnv if spec.vectorize == "async" else SyncVectorEnv
    return vector([maker] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def evaluation_vector(spec: EnvSpec, at_most: int, factory: Factory | None = None) -> VectorEnv:
    """Environments to evaluate in; no more than train where each is a process of its own."""
    return make_vector(spec, min(at_most, spec.num_envs) if spec.vectorize == "async" else at_most, factory)


def make_single(spec: EnvSpec, factory: Factory | None = None, **kwargs: object) -> gym.Env:
    """One environment, flattened to a Box of observations where it is not one."""
    if spec.module is not None:
        import_named(spec.module, "env.module")
    if factory is not None:
        if spec.kwargs:
            raise UsageError("env.kwargs are for environments made by id: pass a function that makes yours with them")
        env = factory()
        if not isinstance(env, gym.Env):
            raise UsageError(f"the environment {spec.id} must make a gymnasium.Env, it made a {type(env).__name__}")
    else:
        with _explained(spec):
            arguments: dict[str, Any] = {**spec.kwargs, **kwargs}
            env = gym.make(spec.id, **arguments)
    if not isinstance(env.observation_space, gym.spaces.Box):
        env = gym.wrappers.FlattenObservation(env)
    return env


def factory_of(env: object) -> Factory:
    """What makes more of the environment that a caller passed as an object: a class, a function, or a made one."""
    if isinstance(env, gym.Env):
        try:
            spec = env.spec
        except ValueError:  # inside a wrapper that does not record its arguments
            spec = None
        if spec is None:
            raise UsageError(
                f"{type(env).__name__} is one environment and training needs several, and others to evaluate in: "
                "pass its class, or a function that makes one."
            )
        return partial(gym.make, spec)
    if callable(env):
        return env
    raise UsageError(
        f"an environment is a Gymnasium id, a class or a function that makes one; got {type(env).__name__}"
    )


def _checked(spec: EnvSpec, factory: Factory | None, trainer: int) -> gym.Env:
    if os.getpid() != trainer:
        # A process of AsyncVectorEnv, forked with the run's own handlers: with them SIGTERM would not end it, and a
        # Ctrl-C at the terminal, which is for the run to answer, would reach it too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return Snapshot(make_single(spec, factory))


def _own_vector(spec: EnvSpec, num_envs: int) -> VectorEnv:
    with _explained(spec):
        if gym.spec(spec.id).vector_entry_point is None:
            raise UsageError(f"{spec.id} has no vectorised form of its own: use `vectorize: sync` or `async`")
        arguments: dict[str, Any] = dict(spec.kwargs)
        return gym.make_vec(spec.id, num_envs, vectorization_mode="vector_entry_point", **arguments)


@contextmanager
def _explained(spec: EnvSpec) -> Iterator[None]:
    """Gymnasium's errors about ids and missing packages, as errors of the spec."""
    try:
        if spec.id.startswith("ALE/"):
            gym.register_envs(importlib.import_module("ale_py"))
        yield
    except gym.error.UnregisteredEnv as error:
        raise UsageError(f"env.id: there is no environment {spec.id!r}. {error}") from error
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        said = f"{spec.id} {error}".lower()
        extra = next((extra for word, extra in EXTRAS.items() if word in said), "train")
        raise MissingExtra(f"{spec.id} ({error})", extra) from error
    except (TypeError, gym.error.Error) as error:
        raise UsageError(f"env: {spec.id} could not be made with {spec.kwargs}: {error}") from error
