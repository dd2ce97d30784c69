"""Registers the environments of gymnasium-robotics (`FetchReach-v4`), made to work with MuJoCo 4.

env: {id: FetchReach-v4, module: palestra.control.envs.robotics}
"""

import importlib
from types import SimpleNamespace
from typing import Any

import gymnasium as gym

from palestra.errors import needs_extra

with needs_extra("the environments of gymnasium-robotics", "robotics"):
    import gymnasium_robotics

    mujoco: Any = importlib.import_module("mujoco")
    utils: Any = importlib.import_module("gymnasium_robotics.utils.mujoco_utils")


class _Mujoco:
    """The module `mujoco` with the types of joints as integers.

    gymnasium-robotics up to 1.4.2 asks whether a NumPy integer is in a tuple of them, which of MuJoCo 4's own none is.
    """

    mjtJoint = SimpleNamespace(**{name: int(kind) for name, kind in mujoco.mjtJoint.__members__.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(mujoco, name)


utils.mujoco = _Mujoco()
gym.register_envs(gymnasium_robotics)
