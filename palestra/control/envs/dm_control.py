"""Registers the DeepMind Control Suite (`dm_control/cartpole-balance-v0`) through Shimmy, made to work with MuJoCo 4.

env: {id: dm_control/cartpole-balance-v0, module: palestra.control.envs.dm_control}
"""

import importlib
import os
from typing import Any

import gymnasium as gym

from palestra.errors import needs_extra

if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # else GLFW complains that there is no screen

with needs_extra("the environments of dm_control", "dm-control"):
    mujoco: Any = importlib.import_module("mujoco")
    sizes: Any = importlib.import_module("dm_control.mujoco.wrapper.mjbindings.sizes")
    shimmy: Any = importlib.import_module("shimmy")

# dm_control up to 1.0.50 lists fields of MuJoCo 3 that MuJoCo 4 no longer has.
for struct, kind in (("mjmodel", mujoco.MjModel), ("mjdata", mujoco.MjData)):
    for name in [name for name in sizes.array_sizes.get(struct, {}) if not hasattr(kind, name)]:
        del sizes.array_sizes[struct][name]
gym.register_envs(shimmy)
