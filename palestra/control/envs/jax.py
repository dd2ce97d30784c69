"""Environments written in JAX: `brax:ant`, `playground:CartpoleBalance`, `gymnax:CartPole-v1`; stepped on JAX's device.

A step of all copies is one compiled program that also resets those that ended, from keys of their own; their final
observations are kept, so that a truncated episode bootstraps from its own end. Time limits are counted here, apart
from terminations. The whole state is arrays: a resumed run continues exactly.
"""

import importlib
import json
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from palestra.errors import UsageError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU that torch shares
jax: Any = importlib.import_module("jax")
jnp: Any = jax.numpy

Array = Any  # of JAX
State = Any  # a tree of arrays


class Rules(NamedTuple):
    """One environment as pure functions."""

    reset: Callable[[Array], tuple[State, Array]]  # of a key: the state, the observation
    step: Callable[[State, Array, Array], tuple[State, Array, Array, Array]]  # …, reward, terminated
    limit: int  # steps after which an episode is truncated
    actions: spaces.Space


class Running(NamedTuple):
    """The running episode of a copy; of all of them with N rows in each array."""

    state: State
    obs: Array
    key: Array
    elapsed: Array


def _brax(name: str, kwargs: dict[str, Any]) -> Rules:
    limit, envs = kwargs.pop("episode_length", 1000), importlib.import_module("brax.envs")
    if name not in envs._envs:
        raise UsageError(f"env.id: Brax has no environment {name!r}; it has {', '.join(sorted(envs._envs))}")
    return _of_states(envs.get_environment(name, **kwargs), limit)


def _playground(name: str, kwargs: dict[str, Any]) -> Rules:
    registry = importlib.import_module("mujoco_playground").registry
    if name not in registry.ALL_ENVS:
        raise UsageError(f"env.id: MuJoCo Playground has no environment {name!r}: its registry.ALL_ENVS has all names")
    # The other implementation, Warp, needs an NVIDIA GPU.
    config = {"impl": "jax", **kwargs} if "impl" in registry.get_default_config(name) else kwargs
    env = registry.load(name, config_overrides=config)
    return _of_states(env, env._config.episode_length)


def _of_states(env: Any, limit: int) -> Rules:
    """Of Brax and of what follows its interface: actions lie from −1 to 1."""

    def seen(state: State) -> Array:
        return state.obs["state"] if isinstance(state.obs, dict) else state.obs  # the rest is for critics

    def reset(key: Array) -> tuple[State, Array]:
        state = env.reset(key)
        return state, seen(state)

    def step(state: State, action: Array, key: Array) -> tuple[State, Array, Array, Array]:
        state = env.step(state, action)
        return state, seen(state), state.reward, state.done > 0

    return Rules(reset, step, limit, spaces.Box(-1.0, 1.0, (env.action_size,), np.float32))


def _gymnax(name: str, kwargs: dict[str, Any]) -> Rules:
    gymnax = importlib.import_module("gymnax")
    if name not in gymnax.registered_envs:
        raise UsageError(f"env.id: gymnax has no environment {name!r}; it has {', '.join(gymnax.registered_envs)}")
    env, params = gymnax.make(name)
    limit = kwargs.pop("max_steps_in_episode", params.max_steps_in_episode)
    # Its environments report their time limits as terminations: theirs is set out of reach and counted here.
    params = params.replace(**kwargs, max_steps_in_episode=2**30)

    def reset(key: Array) -> tuple[State, Array]:
        obs, state = env.reset_env(key, params)
        return state, obs

    def step(state: State, action: Array, key: Array) -> tuple[State, Array, Array, Array]:
        obs, state, reward, done, _ = env.step_env(key, state, action, params)
        return state, obs, reward, done

    space = env.action_space(params)
    if hasattr(space, "n"):
        return Rules(reset, step, int(limit), spaces.Discrete(int(space.n)))
    low, high = (np.broadcast_to(np.asarray(end, np.float32), space.shape) for end in (space.low, space.high))
    return Rules(reset, step, int(limit), spaces.Box(low, high, dtype=np.float32))


LIBRARIES = {"brax": _brax, "playground": _playground, "gymnax": _gymnax}


@cache
def _compiled(name: str, arguments: str) -> tuple[Rules, Any, Any]:
    """The rules, and compiled: keys to running episodes; those and actions to the next ones and their outcome.

    Once in a process, because compiling takes seconds to minutes; training and evaluation share it.
    """
    library, _, own = name.partition(":")
    try:
        rules = LIBRARIES[library](own, json.loads(arguments))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"env: {name} could not be made with {arguments}: {error}") from error

    def begin(key: Array) -> Running:
        key, used = jax.random.split(key)
        return _strong(Running(*rules.reset(used), key, jnp.zeros((), jnp.int32)))

    def one(running: Running, action: Array) -> tuple[Running, Array, Array, Array]:
        key, used = jax.random.split(running.key)
        state, obs, reward, terminated = rules.step(running.state, action, used)
        elapsed = running.elapsed + 1
        return _strong(Running(state, obs, key, elapsed)), reward, terminated, elapsed >= rules.limit

    def advance(running: Running, actions: Array) -> tuple[Running, Array, Array, Array, Array]:
        stepped, rewards, terminated, truncated = jax.vmap(one)(running, actions)
        ended = terminated | truncated

        def restarted() -> Running:
            return jax.tree.map(
                lambda new, old: jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new, old).astype(old.dtype),
                jax.vmap(begin)(stepped.key),
                stepped,
            )

        following = jax.lax.cond(ended.any(), restarted, lambda: stepped)
        return following, stepped.obs, rewards, terminated, truncated

    return rules, jax.jit(jax.vmap(begin)), jax.jit(advance)


def _strong(tree: Any) -> Any:
    """The tree without JAX's weak types, which a saved state has not: a resumed run is the same program."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), tree)


class JaxEnvs(VectorEnv):
    """N copies, their state on JAX's device; what the trainer sees is copied to the host, where it collects."""

    def __init__(self, name: str, num_envs: int, kwargs: dict[str, Any]):
        self.name, self.num_envs = name, num_envs
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        rules, self._begin, self._advance = _compiled(name, json.dumps(kwargs, sort_keys=True))
        _, seen = jax.eval_shape(rules.reset, jax.random.PRNGKey(0))
        pixels = seen.dtype == np.uint8
        low, high, dtype = (0, 255, np.uint8) if pixels else (-np.inf, np.inf, np.float32)
        self.single_observation_space = spaces.Box(low, high, seen.shape, dtype)
        self.single_action_space = rules.actions
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(rules.actions, num_envs)
        self._running: Running | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Begin an episode in each; copy i gets the key of `seed + i`."""
        if options is not None:
            raise UsageError(f"{self.name}: reset takes no options, got {options}")
        if seed is not None or self._running is None:
            first = np.random.SeedSequence().generate_state(1)[0] if seed is None else seed
            keys = jax.vmap(jax.random.PRNGKey)(np.arange(self.num_envs, dtype=np.uint32) + np.uint32(first))
        else:
            keys = self._running.key
        self._running = self._begin(keys)
        return self._host(self._running.obs), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all; the last observation of an episode that ended is in `final_obs`."""
        if self._running is None:
            raise UsageError(f"{self.name}: step was called before reset")
        self._running, final, rewards, terminated, truncated = self._advance(self._running, np.asarray(actions))
        terminated, truncated = np.array(terminated), np.array(truncated)
        ended = terminated | truncated
        infos = {"final_obs": self._host(final), "_final_obs": ended} if ended.any() else {}
        return self._host(self._running.obs), np.array(rewards, np.float64), terminated, truncated, infos

    def _host(self, array: Array) -> np.ndarray:
        return np.array(array, self.single_observation_space.dtype)  # a copy: those of JAX cannot be written to

    def get_state(self) -> list[np.ndarray]:
        """The arrays of the state, in the order of its tree."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self._running)]

    def set_state(self, state: list[np.ndarray]) -> None:
        """Continue from `get_state`."""
        like = jax.eval_shape(self._begin, jax.ShapeDtypeStruct((self.num_envs, 2), np.uint32))
        leaves, tree = jax.tree.flatten(like)
        if [(np.shape(a), np.asarray(a).dtype) for a in state] != [(leaf.shape, leaf.dtype) for leaf in leaves]:
            raise UsageError(
                f"This state is of another number of environments than {self.num_envs}, or of another version of "
                f"{self.name}: resume with what the run began with."
            )
        self._running = jax.tree.unflatten(tree, [jnp.asarray(array) for array in state])
