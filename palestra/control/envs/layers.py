"""The wrappers around an environment and it itself, layer by layer: what each holds that changes, saved and set."""

import functools
import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Space
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers import PassiveEnvChecker

from palestra.control.envs.plain import NotPlain, decode, encode, same_bits
from palestra.control.envs.simulators import RecordedAle
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
