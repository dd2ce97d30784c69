"""The state of an environment in the middle of an episode, with all its wrappers, saved and restored without pickle.

Pickle is no way to do it: LunarLander, Reacher and Pong pickle without an error and come back fresh.
A state is a tree of plain data (see `plain`). How it is taken depends on the family of the environment:

- attributes: Gymnasium's classic control and toy text, and any environment that lists the attributes that make up its
  state in `palestra_state = ("position", "velocity")`;
- mujoco: the integration state of MuJoCo, and what Python may read of the last step before the next one;
- atari: the state of the ALE, with its random generator;
- replay: all others. The episode is reset from the generators' state before its reset and its actions are repeated;
- none: an environment with `palestra_state = None`. Its episodes restart.

Gymnasium's Box2D environments are replayed and reset in a new world each time: a used one makes BipedalWalker depend on
the episodes before. What an environment changes in a MuJoCo *model* is not saved; one that does so says None.
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
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate, iterate
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
    """Give the wrappers around an environment, or around a vector of them, from the outermost, then it itself."""
    while isinstance(env, gymnasium.Wrapper | VectorWrapper):
        yield env
        env = env.env
    yield env


def declared(layer: Any) -> tuple[str, ...] | None:
    """Give the attributes that a layer says are its state; None: it says it cannot be saved; (): it says nothing."""
    return vars(layer).get("palestra_state", getattr(type(layer), "palestra_state", ()))


def attributes(layer: Any, strict: bool = True) -> dict[str, Any]:
    """Give the attributes of one layer that are plain data, encoded; NotPlain, if `strict`, when others may change."""
    if type(layer).__module__ == "gymnasium.wrappers.rendering":
        return {}
    names = declared(layer)
    constants = _NOT_STATE
    if type(layer).__module__.startswith("gymnasium.envs.toy_text."):
        constants = _NOT_STATE | {"P"}  # Taxi's table of transitions takes a tenth of a second to encode
    if names:
        held = {name: getattr(layer, name) for name in names if name != "np_random" and hasattr(layer, name)}
        # read past the property np_random, which would make a generator
        held |= {name: value for name, value in vars(layer).items() if name == "_np_random"}
    else:
        held = {name: value for name, value in vars(layer).items() if name not in constants}
    encoded = {}
    for name, value in held.items():
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


def generators(layer: Any) -> dict[str, Any]:
    """Give the NumPy generators among the attributes of one layer, encoded."""
    return {name: encode(value) for name, value in vars(layer).items() if type(value) is np.random.Generator}


def set_attributes(layer: Any, saved: dict[str, Any]) -> None:
    """Set the attributes of one layer to encoded values."""
    for name, tree in saved.items():
        setattr(layer, name, decode(tree, getattr(layer, name, None)))


def revert_attributes(layer: Any, initial: dict[str, Any], kept: Iterable[str]) -> None:
    """Undo what changed in a layer since its attributes were `initial`, but for the names in `kept`."""
    for name, now in attributes(layer).items():
        if name in kept:
            continue
        if name not in initial:
            delattr(layer, name)
        elif not same_bits(now, initial[name]):
            setattr(layer, name, decode(initial[name], getattr(layer, name)))


def spaces(chain: Iterable[Any]) -> list[Space]:
    """Give all spaces that the layers hold, parts of composed ones too, each once and always in the same order."""
    found = [value for layer in chain for value in vars(layer).values() if isinstance(value, Space)]
    unique: dict[int, Space] = {}
    while found:
        space = found.pop(0)
        if id(space) in unique:
            continue
        unique[id(space)] = space
        for part in vars(space).values():
            parts = part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else [part]
            found += [one for one in parts if isinstance(one, Space)]
    return list(unique.values())


def space_generators(held: Iterable[Space]) -> list[Any]:
    """Give the generators from which the spaces sample, encoded; None where one was never seeded nor used."""
    return [encode(space._np_random) for space in held]


def set_space_generators(held: Iterable[Space], saved: list[Any]) -> None:
    """Set the generators from which the spaces sample."""
    for space, tree in zip(held, saved, strict=True):
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
        self.reset_due = False  # the next step resets instead, as the vector environment of NEXT_STEP would have
        self.restart: Any = None  # the first observation of the episode that had to be begun when a state was restored
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
        self.reset_due = self._ended = False
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
        if self.reset_due:
            observation, info = self.reset()
            return observation, 0.0, False, False, info
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
        """Give all that the next steps depend on; changes nothing."""
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
        """Continue from a state; where that cannot be done, warn, begin an episode (see `restart`) and say False."""
        self.snapshot = state
        if self.restart is None:
            return True
        _warn(self.name)
        return False

    @property
    def snapshot(self) -> Tree:
        """The state as an attribute: so a vector environment can hand each of its environments its own."""
        return self.get_state()

    @snapshot.setter
    def snapshot(self, state: Tree) -> None:
        if state["environment"] != self.name:
            raise UsageError(f"This is the state of {state['environment']}, it cannot be continued by {self.name}.")
        self.restart, self.reset_due = None, False
        if state["kind"] == "none":
            self._load_beginnings(state)
            going = False
        elif state["kind"] == "replay":
            self._family = "replay"
            going = self._replay(state)
        else:
            self._load_exact(state)
            going = True
        if going:
            self._ended = state["ended"]
        else:
            self.restart, _ = self.reset()

    def _exact_state(self) -> Tree:
        held = []
        for layer, initial in zip(self._chain, self._initial, strict=True):
            now = attributes(layer)
            changed = {k: v for k, v in now.items() if k not in initial or not same_bits(v, initial[k])}
            held.append({"type": type(layer).__name__, "attributes": changed})
        state: Tree = {"layers": held, "spaces": space_generators(self._spaces)}
        if self._family in ("mujoco", "atari"):
            state["simulator"] = simulator_state(self._core, self._family)
        return state

    def _load_exact(self, state: Tree) -> None:
        if state["kind"] != self._family:
            raise self._other_wrappers()
        self._check_layers(state["layers"])
        for layer, initial, saved in zip(self._chain, self._initial, state["layers"], strict=True):
            revert_attributes(layer, initial, saved["attributes"].keys())
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
        held = [attributes(layer, strict=False) for layer in self._chain[:-1]] + [generators(self._core)]
        names = [type(layer).__name__ for layer in self._chain]
        saved = [{"type": name, "attributes": one} for name, one in zip(names, held, strict=True)]
        return {"layers": saved, "spaces": space_generators(self._spaces)}

    def _load_beginnings(self, saved: Tree) -> None:
        self._check_layers(saved["layers"])
        for layer, before in zip(self._chain, saved["layers"], strict=True):
            set_attributes(layer, before["attributes"])
        if "_np_random" not in saved["layers"][-1]["attributes"]:
            vars(self._core).pop("_np_random", None)
        set_space_generators(self._spaces, saved["spaces"])

    def _check_layers(self, saved: list[Tree]) -> None:
        if [layer["type"] for layer in saved] != [type(layer).__name__ for layer in self._chain]:
            raise self._other_wrappers()

    def _other_wrappers(self) -> UsageError:
        return UsageError(f"This state of {self.name} was taken with other wrappers around it: resume with the same.")


@dataclass(frozen=True)
class Restarted:
    """Which environments had to begin a new episode when a state was restored, and the observations to go on from."""

    which: np.ndarray  # bool (N,)
    observations: Any  # of all N, as the vector environment gives them


def vector_exactness(venv: VectorEnv) -> str | None:
    """One sentence for the user when a vector environment cannot continue its episodes after a resume, else None."""
    wrappers, core = _split(venv)
    for wrapper in wrappers:
        try:
            attributes(wrapper)
        except NotPlain:
            return _sentence(type(wrapper).__name__)
    match _kind(core):
        case "own":
            return None
        case "copies":
            return core.exactness()
        case "snapshots":
            return next((sentence for sentence in core.get_attr("exactness") if sentence is not None), None)
    return _sentence(type(core).__name__)


def vector_state(venv: VectorEnv) -> Tree:
    """Give the state of a vector environment as plain data; changes nothing."""
    wrappers, core = _split(venv)
    kind = _kind(core)
    state: Tree = {"kind": kind, "spaces": space_generators(spaces(layers(venv)))}
    state["wrappers"] = [attributes(wrapper, strict=False) for wrapper in wrappers]
    if kind == "own":
        state["own"] = core.get_state()
    elif kind == "copies":
        state["environments"] = core.get_states()
    elif kind == "snapshots":
        state["environments"] = list(core.call("get_state"))
        state["internals"] = {name: encode(getattr(core, name)) for name in _internals(core)}
    return state


def restore_vector(venv: VectorEnv, state: Tree) -> Restarted | None:
    """Continue from `vector_state`: None when all do; else warn once and say which environments began a new episode."""
    wrappers, core = _split(venv)
    kind = _kind(core)
    if kind != state["kind"] or len(wrappers) != len(state["wrappers"]):
        raise UsageError(
            f"This state is of another kind of vector environment than {type(core).__name__} with {len(wrappers)} "
            "wrappers: resume with the environment that the run began with."
        )
    which = np.zeros(venv.num_envs, dtype=bool)
    if kind == "own":
        core.set_state(state["own"])
    elif kind == "copies":
        which = core.set_states(state["environments"])
    elif kind == "snapshots":
        which = np.array([restart is not None for restart in _restore_snapshots(core, state)])
    for wrapper, saved in zip(wrappers, state["wrappers"], strict=True):
        set_attributes(wrapper, saved)
    set_space_generators(spaces(layers(venv)), state["spaces"])
    if kind != "none" and not which.any():
        return None
    _warn(core.get_attr("name")[0] if kind == "snapshots" else getattr(core, "name", type(core).__name__))
    if kind == "none" or wrappers:
        # Wrappers around the vector change observations as they please: only a reset of all gives consistent ones.
        observations, _ = venv.reset()
        return Restarted(np.ones(venv.num_envs, dtype=bool), observations)
    return Restarted(which, core.observations if kind == "copies" else deepcopy(_observations(core)))


def _restore_snapshots(venv: SyncVectorEnv | AsyncVectorEnv, state: Tree) -> list[Any]:
    """Hand each environment its state; give for each the first observation of the episode it had to begin, or None."""
    saved = state["environments"]
    if len(saved) != venv.num_envs or state["internals"].keys() != set(_internals(venv)):
        raise UsageError(
            f"This state is of {len(saved)} environments in another arrangement than the {venv.num_envs} of this "
            f"{type(venv).__name__}: resume with the environments that the run began with."
        )
    if isinstance(venv, AsyncVectorEnv):
        venv.reset()  # clears the workers' own notes of ended episodes
    venv.set_attr("snapshot", saved)
    restarts = list(venv.get_attr("restart"))
    going = [restart is None for restart in restarts]
    if isinstance(venv, AsyncVectorEnv):
        rows = iterate(venv.observation_space, decode(state["internals"]["observations"]))
        if venv.autoreset_mode is AutoresetMode.NEXT_STEP:
            # A worker notes in a local variable, out of reach, that its episode ended: its environment does it instead.
            venv.set_attr("reset_due", [one["ended"] and on for one, on in zip(saved, going, strict=True)])
    else:
        for name, value in state["internals"].items():
            setattr(venv, name, decode(value))
        venv._autoreset_envs &= np.array(going)
        venv._env_obs = [old if on else new for old, new, on in zip(venv._env_obs, restarts, going, strict=True)]
        rows = iterate(venv.observation_space, deepcopy(venv._observations))
    # Written, not replaced: these may be the memory shared with the workers.
    items = [old if new is None else new for old, new in zip(rows, restarts, strict=True)]
    concatenate(venv.single_observation_space, items, _observations(venv))
    return restarts


def _split(venv: VectorEnv) -> tuple[list[Any], Any]:
    *wrappers, core = layers(venv)
    return wrappers, core


def _internals(venv: SyncVectorEnv | AsyncVectorEnv) -> tuple[str, ...]:
    if isinstance(venv, AsyncVectorEnv):
        return ("observations",)
    return ("_env_obs", "_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")


def _observations(venv: SyncVectorEnv | AsyncVectorEnv) -> Any:
    return venv.observations if isinstance(venv, AsyncVectorEnv) else venv._observations


def _kind(venv: VectorEnv) -> str:
    if hasattr(venv, "get_state") and hasattr(venv, "set_state"):
        return "own"
    if hasattr(venv, "get_states") and hasattr(venv, "set_states"):
        return "copies"
    gymnasiums = isinstance(venv, SyncVectorEnv | AsyncVectorEnv)
    return "snapshots" if gymnasiums and all(venv.call("has_wrapper_attr", "reset_due")) else "none"


def _sentence(name: str) -> str:
    return f"{name} has no way to save its state: after a resume its running episodes restart."


def _warn(name: str) -> None:
    warnings.warn(f"{name} could not be brought back into its running episodes: they restart.", stacklevel=3)


def _family(chain: list[gymnasium.Env]) -> str:
    core = chain[-1]
    if any(declared(layer) is None for layer in chain):
        return "none"
    if declared(core) != ():
        return "attributes"
    plain = type(core).__module__.startswith(("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text."))
    return "attributes" if plain else simulator(core) or "replay"
