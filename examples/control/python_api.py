"""Palestra from Python: an environment of our own, trained, looked at, loaded and asked for actions.

Run it from anywhere: python examples/control/python_api.py
"""

import gymnasium as gym
import numpy as np

import palestra


class Corridor(gym.Env):
    """Walk right to the end of a corridor: -1 a step, so the shortest way is the best (return -9 from the left end)."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)  # 0: left, 1: right
    length = 10
    palestra_state = ("position", "steps")  # with these, a resumed run continues in the middle of an episode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.steps = int(self.np_random.integers(self.length - 1)), 0
        return self._observation(), {}

    def step(self, action):
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.steps += 1
        arrived = self.position == self.length - 1
        return self._observation(), -1.0, arrived, self.steps >= 50, {}

    def _observation(self):
        return np.array([self.position / (self.length - 1)], np.float32)


spec = {
    "kind": "control",
    "name": "corridor",
    "env": Corridor,
    "algorithm": {"name": "ppo", "horizon": 64, "lr": 1e-3},
    "train": {"frames": 20_000},
}

run = palestra.run(spec, max_session=2, algorithm__entropy=0.01)
print(run.state, run.path)

for row in run.metrics(seed=0)[::20]:
    print(f"frame {row['frame']:>6}  return {row['return']:6.1f}")

policy = palestra.load(run)
print("actions at the left end, the middle and near the right end:", policy.act([[0.0], [0.5], [0.9]]))
