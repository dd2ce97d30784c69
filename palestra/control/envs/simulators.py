"""What simulators keep out of Python's sight: the states of MuJoCo and of the ALE, and the worlds of Box2D."""

import importlib
from typing import Any

import numpy as np

# What mj_step leaves in MjData of the *start* of its last substep. mj_step itself needs none of it, but Ant reads xpos
# and Humanoid xipos before they step, and mj_forward would compute them for the end of the substep instead.
_MUJOCO_OUTPUTS = (
    *(
        "xpos",
        "xquat",
        "xmat",
        "xipos",
        "ximat",
        "xanchor",
        "xaxis",
        "geom_xpos",
        "geom_xmat",
        "site_xpos",
        "site_xmat",
    ),
    *("cam_xpos", "cam_xmat", "light_xpos", "light_xdir", "subtree_com", "subtree_linvel", "subtree_angmom"),
    *("cdof", "cdof_dot", "cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "ten_length", "ten_velocity"),
    *("actuator_length", "actuator_velocity", "actuator_force", "act_dot", "qacc", "qacc_smooth", "qfrc_bias"),
    *("qfrc_passive", "qfrc_actuator", "qfrc_smooth", "qfrc_constraint", "qfrc_inverse", "sensordata", "energy"),
)


class RecordedAle:
    """An ALE that remembers how it came through its last frames.

    With sticky actions each frame repeats the action in force with some probability, and the state that the ALE saves
    has its random generator but not the action in force. Going again through the last 32 to 64 frames brings it about:
    one frame that does not repeat is enough, and 32 in a row repeat with probability 0.25³² ≈ 5e-20.
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
        """Begin a game; the action in force is NOOP again."""
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
        """Give the emulator's own encoding of itself and its random generator, and of the way there."""
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
    """Say which simulator with an adapter an unwrapped environment has, without importing any."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(env).__mro__}
    if "gymnasium.envs.mujoco.mujoco_env.MujocoEnv" in bases:
        return "mujoco"
    return "atari" if "ale_py.env.AtariEnv" in bases else None


def simulator_state(env: Any, kind: str) -> dict[str, Any]:
    """Give the state of the simulator as arrays or bytes."""
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
    mujoco.mj_forward(env.model, env.data)  # contacts and constraints, whose number changes, for whoever reads them
    mujoco.mj_setState(env.model, env.data, saved["physics"], whole)
    for name, value in saved["outputs"].items():
        getattr(env.data, name)[:] = value


def renew_world(env: Any) -> None:
    """Give one of Gymnasium's Box2D environments a new world before a reset: episodes leave traces in a used one.

    LunarLander does so itself; BipedalWalker's steps otherwise depend on the episodes before (Gymnasium issue 728).
    """
    if type(env).__module__.startswith("gymnasium.envs.box2d."):
        env._destroy()
        env.world = type(env.world)(gravity=env.world.gravity)
