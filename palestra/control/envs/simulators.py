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


def simulator(env: Any) -> str | None:
    """Say which simulator with an adapter an unwrapped environment has, without importing any."""
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(env).__mro__}
    if "gymnasium.envs.mujoco.mujoco_env.MujocoEnv" in bases:
        return "mujoco"
    return "atari" if "ale_py.env.AtariEnv" in bases else None


def simulator_state(env: Any, kind: str) -> dict[str, Any]:
    """Give the state of the simulator as arrays or bytes."""
    if kind == "atari":  # the emulator's own encoding of itself and its random generator
        return {"ale": env.ale.cloneState(include_rng=True).serialize()}
    mujoco: Any = importlib.import_module("mujoco")
    whole = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    physics = np.empty(mujoco.mj_stateSize(env.model, whole))
    mujoco.mj_getState(env.model, env.data, physics, whole)
    return {"physics": physics, "outputs": {name: getattr(env.data, name).copy() for name in _MUJOCO_OUTPUTS}}


def set_simulator_state(env: Any, kind: str, saved: dict[str, Any]) -> None:
    """Continue from what `simulator_state` gave."""
    if kind == "atari":
        env.ale.restoreState(importlib.import_module("ale_py").ALEState(saved["ale"]))
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
