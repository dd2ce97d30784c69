"""The state of an environment in the middle of an episode, with all its wrappers, saved and restored without pickle.

Pickle does not work: LunarLander, Reacher and Pong pickle without an error and come back fresh.
A state is a tree of plain data (see `values`). How it is taken depends on the family of the environment:

- attributes: Gymnasium's classic control and toy text, and any environment that lists the attributes that make up its
  state in `palestra_state = ("position", "velocity")`;
- mujoco: the integration state of MuJoCo, and what Python may read of the last step before the next one;
- atari: the state of the ALE, with its random generator;
- replay: all others. The episode is reset from the generators' state before its reset and its actions are repeated;
- none: an environment with `palestra_state = None`. Its episodes restart after a resume.

Gymnasium's Box2D environments are replayed, and reset in a new world each time: in a used one BipedalWalker depends on
earlier episodes. Changes to a MuJoCo *model* are not saved: an environment that makes them should say None.
"""

import functools
import types
import warnings
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import PassiveEnvChecker

from palestra.control.envs.values import (
    NotPlain,
    RecordedAle,
    decode,
    decode_actions,
    encode,
    encode_actions,
    renew_world,
    same_bits,
    set_simulator_state,
    simulator,
    simulator_state,
)
from palestra.errors import UsageError

_NOT_STATE = {
    *("env", "spec", "metadata", "_metadata", "_cached_spec"),
    *("_saved_kwargs", "_ezpickle_args", "_ezpickle_kwargs", "palestra_state"),
}
# A layer that holds one of these holds nothing that changes with an episode, or what a simulator's adapter saves.
_CONSTANT = (
    *(gymnasium.Env, VectorEnv, Space, EnvSpec, Enum, np.dtype, np.ufunc, type, functools.partial, RecordedAle),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)
_CONSTANT_PACKAGES = {"mujoco", "ale_py", "pygame"}


def layers(env: Any) -> Iterator[Any]:
    """The wrappers around an environment, or around a vector of them, from the outermost, then it itself."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
    yield env


def declared(layer: Any) -> tuple[str, ...] | None:
    """The attributes that a layer declares as its state; None: it cannot be saved; (): it declares nothing."""
    return vars(layer).get("palestra_state", getattr(type(layer), "palestra_state", ()))


def attributes(layer: Any, strict: bool = True) -> dict[str, Any]:
    """The attributes of one layer that are plain data, encoded; NotPlain, if `strict`, when others may change."""
    if type(layer).__module__ == "gymnasium.wrappers.rendering":
        return {}
    names = declared(layer)
    constants = _NOT_STATE
    if type(layer).__module__.startswith("gymnasium.envs.toy_text."):
        constants = _NOT_STATE | {"P"}  # Taxi's table of transitions takes a tenth of a second to encode
    if names:
        values = {name: getattr(layer, name) for name in names if name != "np_random" and hasattr(layer, name)}
        # Past the property np_random, which would make a generator.
        values |= {name: value for name, value in vars(layer).items() if name == "_np_random"}
    else:
        values = {name: value for name, value in vars(layer).items() if name not in constants}
    encoded = {}
    for name, value in values.items():
        try:
            encoded[name] = encode(value)
        except NotPlain as problem:
            if names:
                raise UsageError(
                    f"{type(layer).__name__} lists {name!r} in palestra_state, but {problem}: list numbers, strings, "
                    "arrays, NumPy generators and lists, tuples and dicts of them, or set palestra_state = None."
                ) from problem
            if strict and not isinstance(layer, PassiveEnvChecker) and not _is_constant(problem.value):
                raise
    return encoded


def set_attributes(layer: Any, saved: dict[str, Any]) -> None:
    """Set the attributes of one layer to encoded values."""
    for name, tree in saved.items():
        setattr(layer, name, decode(tree, getattr(layer, name, None)))


def spaces(chain: Iterable[Any]) -> list[Space]:
    """All spaces that the layers hold, parts of composed ones too, each once and always in the same order."""
    queue = [value for layer in chain for value in vars(layer).values() if isinstance(value, Space)]
    unique: dict[int, Space] = {}
    while queue:
        space = queue.pop(0)
        if id(space) in unique:
            continue
        unique[id(space)] = space
        for part in vars(space).values():
            parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else [part]
            queue += [inner for inner in parts if isinstance(inner, Space)]
    return list(unique.values())


def space_generators(sampled: Iterable[Space]) -> list[Any]:
    """The generators from which the spaces sample, encoded; None where one was never seeded nor used."""
    return [encode(space._np_random) for space in sampled]


def set_space_generators(sampled: Iterable[Space], saved: list[Any]) -> None:
    """Set the generators from which the spaces sample."""
    for space, tree in zip(sampled, saved, strict=True):
        space._np_random = decode(tree, space._np_random)


def _is_constant(value: Any) -> bool:
    module = type(value).__module__
    return isinstance(value, _CONSTANT) or module.split(".")[0] in _CONSTANT_PACKAGES or module.endswith("_rendering")


Tree = dict[str, Any]

_EXACT = ("attributes", "mujoco", "atari")


class Snapshot(gymnasium.Wrapper):
    """The outermost wrapper of one environment: gives its state and continues from one."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        spec = env.unwrapped.spec
        self.name = spec.id if spec is not None else type(env.unwrapped).__name__
        self.restart: Any = None  # the first observation of the episode begun because a state could not be restored
        self._chain = list(layers(env))
        self._core: Any = self._chain[-1]
        self._spaces = spaces(self._chain)
        self._family = _family(self._chain)
        if self._family == "atari":
            self._core.ale = RecordedAle(self._core.ale)
        self._confirmed = False  # whether a state could be taken after a reset, when all attributes are there
        self._ended = False
        self._before: Tree | None = None  # the generators and wrappers just before the last reset
        self._reset_arguments: Tree = {}
        self._actions: list[Any] = []
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated
        self._initial: list[Tree] = []  # the attributes of a new environment: those that changed since are its state
        if self._family in _EXACT:
            try:
                self._initial = [attributes(layer) for layer in self._chain]
            except NotPlain:
                self._family = "replay"

    @property
    def exactness(self) -> str | None:
        """One sentence for the user when episodes cannot continue after a resume, None when they can."""
        return _sentence(self.name) if self._family == "none" else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, remembering what is needed to begin it again."""
        self._ended = False
        if self._family == "replay" or not self._confirmed:
            if seed is None:
                getattr(self._core, "np_random", None)  # made now if it is not there, else the reset makes it unseen
            self._before = self._beginnings()
            self._reset_arguments = {"seed": seed, "options": deepcopy(options)}
            self._actions = []
        renew_world(self._core)
        observation, info = self.env.reset(seed=seed, options=options)
        self._last = (observation,)
        if not self._confirmed and self._family in _EXACT:
            try:
                self._exact_state()
            except NotPlain:  # a layer holds something that may change and is not plain data
                self._family = "replay"
        self._confirmed = True
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, recording the action where the episode can only be repeated."""
        if self._family == "replay":
            constant = isinstance(action, int | np.generic)
            self._actions.append(action if constant else deepcopy(action))
        result = self.env.step(action)
        self._ended = bool(result[2] or result[3])
        if self._ended:
            # The reset that follows may write into the array that an environment keeps for its observations.
            result = (deepcopy(result[0]), *result[1:])
        self._last = result[:4]
        return result

    def get_state(self) -> Tree:
        """All that the next steps depend on; changes nothing."""
        state: Tree = {"environment": self.name, "kind": self._family, "ended": self._ended}
        try:
            if self._family == "replay":
                return {**state, **self._replay_state()}
            if self._family in _EXACT:
                return {**state, **self._exact_state()}
        except NotPlain:  # something that appeared after the first reset
            state["kind"] = "none"
        return {**state, **self._beginnings()}

    def set_state(self, state: Tree) -> bool:
        """Continue from a state; where that is not possible, begin an episode (see `restart`) and return False."""
        if state["environment"] != self.name:
            raise UsageError(f"This is the state of {state['environment']}, it cannot be continued by {self.name}.")
        self.restart, restored = None, True
        if state["kind"] == "none":
            self._load_beginnings(state)
            restored = False
        elif state["kind"] == "replay":
            self._family = "replay"
            restored = self._replay(state)
        else:
            self._load_exact(state)
        if restored:
            self._ended = state["ended"]
        else:
            self.restart, _ = self.reset()
        return restored

    def _exact_state(self) -> Tree:
        saved = []
        for layer, initial in zip(self._chain, self._initial, strict=True):
            now = attributes(layer)
            changed = {k: v for k, v in now.items() if k not in initial or not same_bits(v, initial[k])}
            saved.append({"type": type(layer).__name__, "attributes": changed})
        state: Tree = {"layers": saved, "spaces": space_generators(self._spaces)}
        if self._family in ("mujoco", "atari"):
            state["simulator"] = simulator_state(self._core, self._family)
        return state

    def _load_exact(self, state: Tree) -> None:
        self._check_layers(state["layers"], state["kind"] == self._family)
        for layer, initial, saved in zip(self._chain, self._initial, state["layers"], strict=True):
            # What changed here since the start, and had not where the state was taken, is undone.
            for name, now in attributes(layer).items():
                if name in saved["attributes"]:
                    continue
                if name not in initial:
                    delattr(layer, name)
                elif not same_bits(now, initial[name]):
                    setattr(layer, name, decode(initial[name], getattr(layer, name)))
            set_attributes(layer, saved["attributes"])
        if "simulator" in state:
            set_simulator_state(self._core, self._family, state["simulator"])
        set_space_generators(self._spaces, state["spaces"])
        self._confirmed = True

    def _replay_state(self) -> Tree:
        return {
            "begun": self._before is not None,
            "before": self._before or self._beginnings(),
            "arguments": encode(self._reset_arguments),
            "actions": encode_actions(self._actions),
            "last": encode(list(self._last)),
            "spaces": space_generators(self._spaces),
        }

    def _replay(self, state: Tree) -> bool:
        """Repeat the episode; whether it came to the same observation, reward and flags, bit for bit."""
        self._load_beginnings(state["before"])
        if state["begun"]:
            self.reset(**decode(state["arguments"]))
            for action in decode_actions(state["actions"]):
                if self._ended:
                    return False
                self.step(action)
            if not same_bits(encode(list(self._last)), state["last"]):
                return False
        set_space_generators(self._spaces, state["spaces"])
        return True

    def _beginnings(self) -> Tree:
        """What a reset depends on, as far as it can be saved: all generators, and the attributes of the wrappers."""
        wrappers = [attributes(layer, strict=False) for layer in self._chain[:-1]]
        generators = {k: encode(v) for k, v in vars(self._core).items() if type(v) is np.random.Generator}
        pairs = zip(self._chain, [*wrappers, generators], strict=True)
        saved = [{"type": type(layer).__name__, "attributes": values} for layer, values in pairs]
        return {"layers": saved, "spaces": space_generators(self._spaces)}

    def _load_beginnings(self, saved: Tree) -> None:
        self._check_layers(saved["layers"])
        for layer, before in zip(self._chain, saved["layers"], strict=True):
            set_attributes(layer, before["attributes"])
        if "_np_random" not in saved["layers"][-1]["attributes"]:
            vars(self._core).pop("_np_random", None)
        set_space_generators(self._spaces, saved["spaces"])

    def _check_layers(self, saved: list[Tree], same_family: bool = True) -> None:
        if not same_family or [layer["type"] for layer in saved] != [type(layer).__name__ for layer in self._chain]:
            raise UsageError(f"This state of {self.name} was taken with other wrappers: resume with the same ones.")


@dataclass(frozen=True)
class Restarted:
    """Which environments had to begin a new episode when a state was restored, and the observations to act on next."""

    which: np.ndarray  # bool (N,)
    observations: Any  # (N, ...), set where `which` is True


def vector_exactness(venv: VectorEnv) -> str | None:
    """One sentence for the user when a vector environment cannot continue its episodes after a resume, else None."""
    wrappers, core, kind = _split(venv)
    for wrapper in wrappers:
        try:
            attributes(wrapper)
        except NotPlain:
            return _sentence(type(wrapper).__name__)
    if kind == "copies":
        return core.exactness()
    return None if kind == "own" else _sentence(type(core).__name__)


def vector_state(venv: VectorEnv) -> Tree:
    """The state of a vector environment as plain data; changes nothing."""
    wrappers, core, kind = _split(venv)
    state: Tree = {"kind": kind, "spaces": space_generators(spaces(layers(venv)))}
    state["wrappers"] = [attributes(wrapper, strict=False) for wrapper in wrappers]
    if kind == "own":
        state["own"] = core.get_state()
    elif kind == "copies":
        state["environments"] = core.get_states()
    return state


def restore_vector(venv: VectorEnv, state: Tree) -> Restarted | None:
    """Continue from `vector_state`: None when all do; else warn once and say which environments began a new episode."""
    wrappers, core, kind = _split(venv)
    if kind != state["kind"] or len(wrappers) != len(state["wrappers"]):
        raise UsageError(
            f"This state is of another kind of vector environment than {type(core).__name__} with {len(wrappers)} "
            "wrappers: resume with the environment that the run began with."
        )
    which = np.full(venv.num_envs, kind == "none")
    if kind == "own":
        core.set_state(state["own"])
    elif kind == "copies":
        which = core.set_states(state["environments"])
    for wrapper, saved in zip(wrappers, state["wrappers"], strict=True):
        set_attributes(wrapper, saved)
    set_space_generators(spaces(layers(venv)), state["spaces"])
    if not which.any():
        return None
    name = getattr(core, "name", type(core).__name__)
    warnings.warn(f"{name} could not be restored to its running episodes: they restart.", stacklevel=2)
    if kind == "none" or wrappers:
        # Wrappers around the vector change observations as they please: only a reset of all gives consistent ones.
        observations, _ = venv.reset()
        return Restarted(np.ones(venv.num_envs, dtype=bool), observations)
    return Restarted(which, core.observations)


def _split(venv: VectorEnv) -> tuple[list[Any], Any, str]:
    """The wrappers around a vector environment, it itself, and how its state is saved."""
    *wrappers, core = layers(venv)
    if hasattr(core, "get_state") and hasattr(core, "set_state"):
        return wrappers, core, "own"
    return wrappers, core, "copies" if hasattr(core, "get_states") and hasattr(core, "set_states") else "none"


def _sentence(name: str) -> str:
    return f"{name} has no way to save its state: after a resume its running episodes restart."


def _family(chain: list[gymnasium.Env]) -> str:
    core = chain[-1]
    if any(declared(layer) is None for layer in chain):
        return "none"
    if declared(core) != ():
        return "attributes"
    plain = type(core).__module__.startswith(("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text."))
    return "attributes" if plain else simulator(core) or "replay"
