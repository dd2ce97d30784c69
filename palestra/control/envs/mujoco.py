"""Gymnasium's MuJoCo environments stepped together, bit for bit equal to the single ones.

One environment of Gymnasium has the model and begins the episodes. MuJoCo 4 steps all simulations of a model in threads
of its own; observations, rewards and ends are computed of all as arrays, operation by operation as Gymnasium does it.
"""

import importlib
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
import numpy as np

from palestra.control.envs.classic import NumpyVector, continuous_actions


def has_batches() -> bool:
    """Whether the installed MuJoCo steps batches: from 4.0 on."""
    return find_spec("mujoco") is not None and find_spec("mujoco.batch") is not None


class MujocoVector(NumpyVector):
    """The common part. A subclass names what it `reads` of the simulations, and looks at nothing else of them."""

    reads: tuple[str, ...] = ("qpos", "qvel")
    """Arrays of `mjData`, each then in `self.now` with a row for each environment, flat."""

    def __init__(self, id: str, num_envs: int, threads: int):
        made: Any = gym.make(id)
        self.one = one = made.unwrapped
        """The environment that has the model and the constants, and in which episodes begin."""
        self._mujoco = importlib.import_module("mujoco")
        batches = importlib.import_module("mujoco.batch")
        self._forces = "cfrc_ext" in self.reads
        """Of contacts: no step computes them, so each simulation's data is kept, and looked at one by one."""
        self._batch = batches.Batch(one.model, num_envs, min(threads, num_envs), self._forces)
        super().__init__(self._batch.state.T, made.spec.max_episode_steps, one.observation_space, one.action_space)
        self._ctrl = self._batch.bind("ctrl")
        self._seen = {name: self._batch.bind(name).reshape(num_envs, -1) for name in self.reads if name != "cfrc_ext"}
        self.now = {name: np.zeros((num_envs, getattr(one.data, name).size)) for name in self.reads}
        self._one_data = self._mujoco.MjData(one.model)

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fresh arrays of the rewards and terminations of a step that led from `before` to `now`."""
        raise NotImplementedError

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        actions = continuous_actions(self, actions)
        before = {name: values.copy() for name, values in self.now.items()}
        self._ctrl[:] = actions
        self._batch.step(nstep=self.one.frame_skip)
        for name, values in self._seen.items():
            self.now[name][:] = values
        if self._forces:
            for i, forces in enumerate(self.now["cfrc_ext"]):
                data = self._batch.get_data(i, self._one_data)
                self._mujoco.mj_rnePostConstraint(self.one.model, data)
                forces[:] = data.cfrc_ext.reshape(-1)
        return self.outcome(before, actions)

    def _start(self, i: int) -> None:
        self.one._np_random = self._generators[i]
        self.one.reset()
        row = np.empty(self._batch.nstate)
        self._mujoco.mj_getState(self.one.model, self.one.data, row, int(self._mujoco.mjtState.mjSTATE_INTEGRATION))
        self._batch.state[i] = row
        for name, values in self.now.items():
            values[i] = getattr(self.one.data, name).reshape(-1)

    def get_state(self) -> dict[str, Any]:
        """All that the next steps depend on: what was read last too, since some of it is older than the positions."""
        return super().get_state() | {"now": {name: values.copy() for name, values in self.now.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        for name, values in state["now"].items():
            self.now[name][:] = values

    # ---- what several of them compute

    def speed(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Of positions x in m, in m/s."""
        return (after - before) / self.one.dt

    def effort(self, actions: np.ndarray) -> np.ndarray:
        """The cost of actions."""
        return self.one._ctrl_cost_weight * np.square(actions).sum(axis=1)


NEVER = partial(np.zeros, dtype=bool)


class Runner(MujocoVector):
    """HalfCheetah and Swimmer: paid for speed. Hopper and Walker2d, which are also paid while they are healthy."""

    def __init__(self, id: str, num_envs: int, threads: int):
        super().__init__(id, num_envs, threads)
        self.hidden = self.one.observation_structure["skipped_qpos"]
        self.falls = id in ("Hopper-v5", "Walker2d-v5")

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        qpos, one = self.now["qpos"], self.one
        rewards = one._forward_reward_weight * self.speed(before["qpos"][:, 0], qpos[:, 0])
        if not self.falls:
            return rewards - self.effort(actions), NEVER(self.num_envs)
        healthy = within(one._healthy_z_range, qpos[:, 1]) & within(one._healthy_angle_range, qpos[:, 2])
        if hasattr(one, "_healthy_state_range"):
            for part in (qpos[:, 2:], self.now["qvel"]):
                healthy &= within(one._healthy_state_range, part).all(axis=1)
        return rewards + healthy * one._healthy_reward - self.effort(actions), ~healthy

    def _observe(self) -> np.ndarray:
        qvel = self.now["qvel"]
        return np.concatenate([self.now["qpos"][:, self.hidden :], qvel.clip(-10, 10) if self.falls else qvel], axis=1)


class Ant(MujocoVector):
    """Paid for speed and health, less efforts and contacts."""

    reads = ("qpos", "qvel", "xpos", "cfrc_ext")

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        qpos, one, x = self.now["qpos"], self.one, 3 * self.one._main_body
        low, high = one._healthy_z_range
        healthy = np.isfinite(qpos).all(axis=1) & np.isfinite(self.now["qvel"]).all(axis=1)
        healthy &= (low <= qpos[:, 2]) & (qpos[:, 2] <= high)
        gains = self.speed(before["xpos"][:, x], self.now["xpos"][:, x]) * one._forward_reward_weight
        contacts = one._contact_cost_weight * np.square(self._contacts()).sum(axis=1)
        return gains + healthy * one._healthy_reward - (self.effort(actions) + contacts), ~healthy

    def _contacts(self) -> np.ndarray:
        return self.now["cfrc_ext"].clip(*self.one._contact_force_range)

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.now["qpos"][:, 2:], self.now["qvel"], self._contacts()[:, 6:]], axis=1)


class Humanoid(MujocoVector):
    """Paid for the speed of its center of mass and for health, less efforts and contacts."""

    reads = ("qpos", "qvel", "cinert", "cvel", "qfrc_actuator", "cfrc_ext", "xipos")

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = self.one
        healthy = within(one._healthy_z_range, self.now["qpos"][:, 2])
        gains = one._forward_reward_weight * self.speed(self._center(before["xipos"]), self._center(self.now["xipos"]))
        costs = self.effort(actions.astype(np.float64)) + self.contact(
            one._contact_cost_weight, one._contact_cost_range
        )
        return gains + healthy * one._healthy_reward - costs, ~healthy

    def contact(self, weight: float, limits: tuple[float, float]) -> np.ndarray:
        """The cost of contacts."""
        return (weight * np.square(self.now["cfrc_ext"]).sum(axis=1)).clip(*limits)

    def _center(self, bodies: np.ndarray) -> np.ndarray:
        """x of the center of mass; one by one, as sums of several are in another order."""
        masses = self.one.model.body_mass
        sums = [np.einsum("b,bj->j", masses, each.reshape(-1, 3))[0] for each in bodies]
        return np.array(sums) / masses.sum()

    def _observe(self) -> np.ndarray:
        parts = {"qpos": 2, "qvel": 0, "cinert": 10, "cvel": 6, "qfrc_actuator": 6, "cfrc_ext": 6}  # less the world's
        return np.concatenate([self.now[name][:, first:] for name, first in parts.items()], axis=1)


class HumanoidStandup(Humanoid):
    """Paid for the height of its head, less efforts and impacts."""

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        one = self.one
        gains = self.now["qpos"][:, 2] / one.model.opt.timestep
        impacts = self.contact(one._impact_cost_weight, one._impact_cost_range)
        return gains - self.effort(actions.astype(np.float64)) - impacts + 1, NEVER(self.num_envs)


class InvertedPendulum(MujocoVector):
    """Paid while the pole stands."""

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        obs = self._observe()
        terminated = ~np.isfinite(obs).all(axis=1) | (np.abs(obs[:, 1]) > 0.2)
        return (~terminated).astype(np.float64), terminated

    def _observe(self) -> np.ndarray:
        return np.concatenate([self.now["qpos"], self.now["qvel"]], axis=1)


class InvertedDoublePendulum(MujocoVector):
    """Paid while the upper pole is high, less its distance and its speed."""

    reads = ("qpos", "qvel", "site_xpos", "qfrc_constraint")

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, _, y = self.now["site_xpos"][:, :3].T
        _, v1, v2 = self.now["qvel"].T
        terminated = y <= 1
        far = 0.01 * np.float_power(x, 2) + np.float_power(y - 2, 2)
        fast = 1e-3 * np.float_power(v1, 2) + 5e-3 * np.float_power(v2, 2)
        return self.one._healthy_reward * ~terminated - far - fast, terminated

    def _observe(self) -> np.ndarray:
        cart, angles = self.now["qpos"][:, :1], self.now["qpos"][:, 1:]
        speeds, forces = self.now["qvel"].clip(-10, 10), self.now["qfrc_constraint"][:, :1].clip(-10, 10)
        return np.concatenate([cart, np.sin(angles), np.cos(angles), speeds, forces], axis=1)


class Arm(MujocoVector):
    """Reacher and Pusher: paid for what is near, less efforts."""

    reads = ("qpos", "qvel", "xpos")

    def body(self, name: str) -> np.ndarray:
        """Its positions, (N, 3)."""
        first = 3 * self.one.model.body(name).id
        return self.now["xpos"][:, first : first + 3]

    def distance(self, a: str, b: str) -> np.ndarray:
        """Between two bodies; one by one, as norms of several round differently."""
        return np.array([np.linalg.norm(each) for each in self.body(a) - self.body(b)])

    def efforts(self, actions: np.ndarray) -> np.ndarray:
        """Their cost, below 0."""
        return -np.square(actions).sum(axis=1) * self.one._reward_control_weight


class Reacher(Arm):
    """The finger is to be at the target."""

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        near = -self.distance("fingertip", "target") * self.one._reward_dist_weight
        return near + self.efforts(actions), NEVER(self.num_envs)

    def _observe(self) -> np.ndarray:
        angles, rest = self.now["qpos"][:, :2], self.now["qpos"][:, 2:]
        way = (self.body("fingertip") - self.body("target"))[:, :2]
        return np.concatenate([np.cos(angles), np.sin(angles), rest, self.now["qvel"][:, :2], way], axis=1)


class Pusher(Arm):
    """The arm is to be at the object, and the object at the goal."""

    def outcome(self, before: dict[str, np.ndarray], actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        near = -self.distance("object", "tips_arm") * self.one._reward_near_weight
        there = -self.distance("object", "goal") * self.one._reward_dist_weight
        return there + self.efforts(actions) + near, NEVER(self.num_envs)

    def _observe(self) -> np.ndarray:
        bodies = [self.body(name) for name in ("tips_arm", "object", "goal")]
        return np.concatenate([self.now["qpos"][:, :7], self.now["qvel"][:, :7], *bodies], axis=1)


def within(limits: tuple[float, float], values: np.ndarray) -> np.ndarray:
    """Whether they are, without the limits themselves."""
    return (limits[0] < values) & (values < limits[1])


VECTORS: dict[str, type[MujocoVector]] = {
    "Ant-v5": Ant,
    "HalfCheetah-v5": Runner,
    "Hopper-v5": Runner,
    "Humanoid-v5": Humanoid,
    "HumanoidStandup-v5": HumanoidStandup,
    "InvertedDoublePendulum-v5": InvertedDoublePendulum,
    "InvertedPendulum-v5": InvertedPendulum,
    "Pusher-v5": Pusher,
    "Reacher-v5": Reacher,
    "Swimmer-v5": Runner,
    "Walker2d-v5": Runner,
}
