"""Attributes and simulator states of environments as plain data and back: Python, MuJoCo, the ALE, Box2D."""

import importlib
from collections import deque
from typing import Any

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

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


def encode_actions(actions: list[Any]) -> Any:
    """Encode a list of actions, as one array where they are arrays or NumPy scalars of one type and shape."""
    kinds = {(type(a), getattr(a, "dtype", None), getattr(a, "shape", None)) for a in actions}
    first = actions[0] if actions else None
    if len(kinds) == 1 and isinstance(first, np.ndarray | np.generic) and first.dtype.kind in "biuf":
        return {_TAG: "stack", "scalars": isinstance(first, np.generic), "array": np.stack(actions)}
    return encode(actions)


def decode_actions(tree: Any) -> list[Any]:
    """Rebuild the list that `encode_actions` was given."""
    if not isinstance(tree, dict):
        return decode(tree)
    # iterating over a vector gives NumPy scalars
    return list(tree["array"]) if tree["scalars"] else [np.array(action) for action in tree["array"]]


def same_bits(a: Any, b: Any) -> bool:
    """Whether two encoded trees are equal bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b) if isinstance(a, float) else a == b


def _encode_array(value: np.ndarray) -> Any:
    if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative:
        return value.copy()
    if value.dtype.kind in "biufcSUmM":
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    raise NotPlain(value)


# What mj_step leaves in MjData of the *start* of its last substep. mj_step itself needs none of it, but Ant reads xpos
# and Humanoid xipos before they step, and mj_forward would compute them for the end of the substep instead.
_MUJOCO_OUTPUTS = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "xanchor", "xaxis", "geom_xpos", "geom_xmat", "site_xpos"),
    *("site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir", "subtree_com", "subtree_linvel"),
    *("subtree_angmom", "cdof", "cdof_dot", "cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "ten_length"),
    *("ten_velocity", "actuator_length", "actuator_velocity", "actuator_force", "act_dot", "qacc", "qacc_smooth"),
    *("qfrc_bias", "qfrc_passive", "qfrc_actuator", "qfrc_smooth", "qfrc_constraint", "qfrc_inverse"),
    *("sensordata", "energy"),
)


class RecordedAle:
    """An ALE that records its last frames.

    With sticky actions each frame repeats the previous action with some probability, and the state that the ALE saves
    has its random generator but not that action. Replaying the last 32 to 64 frames restores it: one frame that does
    not repeat is enough, and 32 in a row repeat with probability 0.25³² ≈ 5e-20.
    """

    WINDOW = 32

    def __init__(self, ale: Any):
        self._ale = ale
        self._start: Any = None  # the state before `_frames`
        self._middle: Any = None  # the state after the first WINDOW of them
        self._frames: list[tuple[int, float]] = []  # action and strength

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ale, name)

    def reset_game(self) -> None:
        """Begin a game; the previous action is NOOP again."""
        self._ale.reset_game()
        self._start, self._middle, self._frames = self._ale.cloneState(include_rng=True), None, []

    def act(self, action: Any, strength: float = 1.0) -> int:
        """Emulate one frame."""
        if len(self._frames) == self.WINDOW and self._middle is None:
            self._middle = self._ale.cloneState(include_rng=True)
        elif len(self._frames) == 2 * self.WINDOW:
            self._start, self._middle = self._middle, self._ale.cloneState(include_rng=True)
            del self._frames[: self.WINDOW]
        self._frames.append((action.value, float(strength)))
        return self._ale.act(action, strength)

    def get_state(self) -> dict[str, Any]:
        """The emulator's own encoding of itself and its random generator, and the recorded frames."""
        frames = np.array(self._frames, dtype=np.float64).reshape(-1, 2)
        start = self._start.serialize() if self._start is not None else None
        return {"ale": self._ale.cloneState(include_rng=True).serialize(), "start": start, "frames": frames}

    def set_state(self, saved: dict[str, Any]) -> None:
        """Continue from what `get_state` gave."""
        ale_py: Any = importlib.import_module("ale_py")
        if saved["start"] is not None:
            self.reset_game()
            self._start = ale_py.ALEState(saved["start"])
            self._ale.restoreState(self._start)
            for action, strength in saved["frames"].tolist():
                self.act(ale_py.Action(int(action)), strength)
        self._ale.restoreState(ale_py.ALEState(saved["ale"]))


def simulator(env: Any) -> str | None:
    """Which supported simulator an unwrapped environment has, found without importing any."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(env).__mro__}
    if "gymnasium.envs.mujoco.mujoco_env.MujocoEnv" in bases:
        return "mujoco"
    return "atari" if "ale_py.env.AtariEnv" in bases else None


def simulator_state(env: Any, kind: str) -> dict[str, Any]:
    """The state of the simulator as arrays or bytes."""
    if kind == "atari":
        return env.ale.get_state()
    mujoco: Any = importlib.import_module("mujoco")
    whole = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    physics = np.empty(mujoco.mj_stateSize(env.model, whole))
    mujoco.mj_getState(env.model, env.data, physics, whole)
    return {"physics": physics, "outputs": {name: getattr(env.data, name).copy() for name in _MUJOCO_OUTPUTS}}


def set_simulator_state(env: Any, kind: str, saved: dict[str, Any]) -> None:
    """Continue from what `simulator_state` gave."""
    if kind == "atari":
        env.ale.set_state(saved)
        return
    mujoco: Any = importlib.import_module("mujoco")
    whole = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_resetData(env.model, env.data)
    mujoco.mj_setState(env.model, env.data, saved["physics"], whole)
    mujoco.mj_forward(env.model, env.data)  # contacts and constraints, whose number changes
    mujoco.mj_setState(env.model, env.data, saved["physics"], whole)
    for name, value in saved["outputs"].items():
        getattr(env.data, name)[:] = value


def renew_world(env: Any) -> None:
    """Give a Box2D environment of Gymnasium a new world before a reset: episodes leave traces in a used one.

    LunarLander does so itself; BipedalWalker's steps otherwise depend on the episodes before (Gymnasium issue 728).
    """
    if type(env).__module__.startswith("gymnasium.envs.box2d."):
        env._destroy()
        env.world = type(env.world)(gravity=env.world.gravity)
