"""The state of an environment in the middle of an episode, with all its wrappers, saved and restored without pickle.

Pickle does not work: LunarLander, Reacher and Pong pickle without an error and come back fresh.
A state is a tree of plain data (`encode`). How it is taken depends on what the environment says of itself:

- attributes: it lists the attributes that make up its state in `palestra_state = ("position", "velocity")`;
- replay: it says nothing. The episode is reset from the generators' state before its reset and its actions are
  repeated; the last observation, reward and flags must then be the same, bit for bit;
- none: it has `palestra_state = None`. Its episodes restart after a resume.

Gymnasium's Box2D environments are reset in a new world each time: in a used one BipedalWalker depends on earlier
episodes. The generator of an Atari game is in its emulator, whose state is saved with the generators.
"""

import functools
import importlib
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from copy import deepcopy
from enum import Enum
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.wrappers.utils import RunningMeanStd

from palestra.errors import UsageError

Tree = dict[str, Any]

_TAG = "#"  # marks a dictionary that stands for something else


class NotPlain(TypeError):
    """A value that cannot be written as plain data; `value` is the innermost one."""

    def __init__(self, value: Any):
        super().__init__(f"a {type(value).__module__}.{type(value).__qualname__} is not plain data")
        self.value = value


def encode(value: Any) -> Any:
    """Turn a value into a tree of str-keyed dicts, lists, str, int, float, bool, None, bytes and numeric arrays.

    NumPy scalars keep their type: float32(1) and 1.0 do not compute alike. Exact types only: a subclass may hold more.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes):
        return value
    if kind is np.ndarray:
        return _encode_array(value)
    if isinstance(value, np.generic):
        return {_TAG: "scalar", "array": _encode_array(np.array([value]))}
    if kind is list:
        return [encode(item) for item in value]
    if kind is tuple:
        return {_TAG: "tuple", "items": [encode(item) for item in value]}
    if kind is deque:
        return {_TAG: "deque", "items": [encode(item) for item in value], "maxlen": value.maxlen}
    if kind is dict:
        if _TAG not in value and all(type(key) is str for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {_TAG: "dict", "keys": [encode(key) for key in value], "values": [encode(v) for v in value.values()]}
    if kind is np.random.Generator:
        return {_TAG: "generator", "state": encode(value.bit_generator.state)}
    if kind is RunningMeanStd:
        return {_TAG: "running_mean_std", "fields": encode(vars(value))}
    raise NotPlain(value)


def decode(tree: Any, current: Any = None) -> Any:
    """Rebuild what `encode` was given. Where `current` is a generator or a view of other memory, it is set in place."""
    if isinstance(tree, np.ndarray):
        view = isinstance(current, np.ndarray) and current.base is not None and current.flags.writeable
        if view and (current.shape, current.dtype) == (tree.shape, tree.dtype):
            current[...] = tree
            return current
        return tree.copy()
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree.get(_TAG):
        case None:
            return {key: decode(item) for key, item in tree.items()}
        case "array":
            return np.frombuffer(tree["data"], tree["dtype"]).reshape(tree["shape"]).copy()
        case "scalar":
            return decode(tree["array"])[0]
        case "tuple":
            return tuple(decode(tree["items"]))
        case "deque":
            return deque(decode(tree["items"]), tree["maxlen"])
        case "dict":
            return dict(zip(decode(tree["keys"]), decode(tree["values"]), strict=True))
        case "generator":
            state = decode(tree["state"])
            in_place = isinstance(current, np.random.Generator)
            if not (in_place and current.bit_generator.state["bit_generator"] == state["bit_generator"]):
                current = np.random.Generator(getattr(np.random, state["bit_generator"])())
            current.bit_generator.state = state
            return current
        case "running_mean_std":
            statistics = RunningMeanStd()
            vars(statistics).update(decode(tree["fields"]))
            return statistics
        case other:
            raise ValueError(f"unknown tag {other!r} in a saved environment")


def _encode_array(value: np.ndarray) -> Any:
    if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative:
        return value.copy()
    if value.dtype.kind in "biufcSUmM":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    raise NotPlain(value)


_NOT_STATE = {"env", "spec", "metadata", "_metadata", "_cached_spec", "_saved_kwargs", "palestra_state"}
# A wrapper that holds one of these holds nothing that changes with an episode.
_CONSTANT = (
    *(gymnasium.Env, Space, EnvSpec, Enum, np.dtype, np.ufunc, type, functools.partial),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
)


def layers(env: Any) -> Iterator[Any]:
    """The wrappers around an environment, from the outermost, then it itself."""
    while isinstance(env, gymnasium.Wrapper):
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
    if names:
        values = {name: getattr(layer, name) for name in names if name != "np_random" and hasattr(layer, name)}
        # Past the property np_random, which would make a generator.
        values |= {name: value for name, value in vars(layer).items() if name == "_np_random"}
    else:
        values = {name: value for name, value in vars(layer).items() if name not in _NOT_STATE}
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
            if strict and not isinstance(problem.value, _CONSTANT):
                raise
    return encoded


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
        self._kind = "attributes" if declared(self._core) else "replay"
        if any(declared(layer) is None for layer in self._chain):
            self._kind = "none"
        self._ended = False
        self._before: Tree | None = None  # what the last reset depended on
        self._arguments: Tree = {}  # of the last reset
        self._actions: list[np.ndarray] = []  # since then
        self._last: tuple[Any, ...] = ()  # observation, reward, terminated, truncated

    @property
    def exactness(self) -> str | None:
        """One sentence for the user when episodes cannot continue after a resume, None when they can."""
        return restarts(self.name) if self._kind == "none" else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, remembering what is needed to begin it again."""
        if seed is None:
            getattr(self._core, "np_random", None)  # made now if it is not there, else the reset makes it unseen
        self._before, self._arguments = self._beginnings(), {"seed": seed, "options": deepcopy(options)}
        self._actions, self._ended = [], False
        if type(self._core).__module__.startswith("gymnasium.envs.box2d."):
            # A new world: a used one has traces of earlier episodes, on which BipedalWalker's steps depend (Gymnasium
            # issue 728). LunarLander makes one itself.
            self._core._destroy()
            self._core.world = type(self._core.world)(gravity=self._core.world.gravity)
        observation, info = self.env.reset(seed=seed, options=options)
        self._last = (observation,)
        if self._kind == "attributes":
            try:
                self._attributes()
            except NotPlain:  # a wrapper holds something that may change and is not plain data
                self._kind = "replay"
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, recording the action where the episode can only be repeated."""
        if self._kind == "replay":
            self._actions.append(np.array(action))
        result = self.env.step(action)
        self._ended = bool(result[2] or result[3])
        if self._ended:
            # The reset that follows may write into the array that an environment keeps for its observations.
            result = (deepcopy(result[0]), *result[1:])
        self._last = result[:4]
        return result

    def get_state(self) -> Tree:
        """All that the next steps depend on; changes nothing."""
        state: Tree = {"environment": self.name, "kind": self._kind, "ended": self._ended}
        try:
            if self._kind == "attributes":
                return state | self._attributes()
            if self._kind == "replay" and self._before is not None:
                return state | {
                    "before": self._before,
                    "arguments": encode(self._arguments),
                    "actions": np.array(self._actions),
                    "last": self._outcome(),
                    "spaces": space_generators(self._spaces),
                }
        except NotPlain:  # something that appeared after the reset
            pass
        return state | {"kind": "none"} | self._beginnings()

    def set_state(self, state: Tree) -> bool:
        """Continue from a state; where that is not possible, begin an episode (see `restart`) and return False."""
        if state["environment"] != self.name:
            raise UsageError(f"This is the state of {state['environment']}, it cannot be continued by {self.name}.")
        self.restart, restored = None, state["kind"] != "none"
        if restored:
            self._kind = state["kind"]
        if state["kind"] == "replay":
            restored = self._replay(state)
        else:
            self._load(state)
        if restored:
            self._ended = state["ended"]
        else:
            self.restart, _ = self.reset()
        return restored

    def _replay(self, state: Tree) -> bool:
        """Repeat the episode; whether it came to the same observation, reward and flags, bit for bit."""
        self._load(state["before"])
        self.reset(**decode(state["arguments"]))
        for action in state["actions"].copy():  # numbers where the environment takes one, else arrays
            if self._ended:
                return False
            self.step(action)
        if self._outcome() != state["last"]:
            return False
        set_space_generators(self._spaces, state["spaces"])
        return True

    def _outcome(self) -> bytes:
        return b"".join(np.asarray(part).tobytes() for part in self._last)

    def _attributes(self) -> Tree:
        """The attributes of all layers."""
        return self._saved([attributes(layer) for layer in self._chain])

    def _beginnings(self) -> Tree:
        """What a reset depends on, as far as it can be saved: all generators, and the attributes of the wrappers."""
        own = vars(self._core)
        generators = {name: encode(value) for name, value in own.items() if type(value) is np.random.Generator}
        generators |= {} if "_np_random" in generators else {"_np_random": None}
        saved = self._saved([*(attributes(layer, strict=False) for layer in self._chain[:-1]), generators])
        return saved if "ale" not in own else saved | {"ale": own["ale"].cloneState(include_rng=True).serialize()}

    def _saved(self, values: list[Tree]) -> Tree:
        pairs = zip(self._chain, values, strict=True)
        saved = [{"type": type(layer).__name__, "attributes": encoded} for layer, encoded in pairs]
        return {"layers": saved, "spaces": space_generators(self._spaces)}

    def _load(self, saved: Tree) -> None:
        if [layer["type"] for layer in saved["layers"]] != [type(layer).__name__ for layer in self._chain]:
            raise UsageError(f"This state of {self.name} was taken with other wrappers: resume with the same ones.")
        for layer, before in zip(self._chain, saved["layers"], strict=True):
            for name, tree in before["attributes"].items():
                setattr(layer, name, decode(tree, getattr(layer, name, None)))
        set_space_generators(self._spaces, saved["spaces"])
        if "ale" in saved:
            self._core.ale.restoreState(importlib.import_module("ale_py").ALEState(saved["ale"]))


class Restarted(NamedTuple):
    """Which environments had to begin a new episode when a state was restored, and the observations to act on next."""

    which: np.ndarray  # bool (N,)
    observations: Any  # (N, ...), set where `which` is True


def vector_exactness(venv: Any) -> str | None:
    """One sentence for the user when a vector environment cannot continue its episodes after a resume, else None."""
    if hasattr(type(venv), "exactness"):
        return venv.exactness()
    return None if hasattr(type(venv), "get_state") else restarts(type(venv.unwrapped).__name__)


def vector_state(venv: Any) -> Tree:
    """The state of a vector environment as plain data; changes nothing."""
    saves = hasattr(type(venv), "get_state")  # of the type: wrappers pass the attributes of what they wrap on
    return {"type": type(venv.unwrapped).__name__, "state": venv.get_state() if saves else None}


def restore_vector(venv: Any, state: Tree) -> Restarted | None:
    """Continue from `vector_state`: None when all do; else warn once and say which environments began a new episode."""
    name = type(venv.unwrapped).__name__
    if "type" not in state:
        raise UsageError("The environments of this checkpoint were saved by an older version: start a new run.")
    if name != state["type"]:
        raise UsageError(
            f"This state is of another kind of vector environment ({state['type']}) than {name}: "
            "resume with the environment that the run began with."
        )
    which, observations = np.ones(venv.num_envs, bool), None
    if state["state"] is not None:
        which = venv.set_state(state["state"])
        if which is None:
            return None
        observations = venv.observations
    name = getattr(venv, "name", name)
    warnings.warn(f"{name} could not be restored to its running episodes: they restart.", stacklevel=2)
    return Restarted(which, venv.reset()[0] if observations is None else observations)


def restarts(name: str) -> str:
    """The sentence about an environment whose episodes restart after a resume."""
    return f"{name} has no way to save its state: after a resume its running episodes restart."
