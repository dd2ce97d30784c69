"""Atari games through ale-py's own vector environment: preprocessed, stacked and stepped in its threads.

A frame is one step of the agent, `frameskip` (4) of the emulator's. Observations are (4, 84, 84) bytes: grey, the
larger of the last two emulator frames, resized, the newest last. Rewards are the game's own: `env.clip_reward` clips
what is learned from. With the keyword `life_loss_info: true` a lost life ends an episode for the learner while the game
goes on; the score is of whole games all the same.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from palestra.control.envs.one import OneOf
from palestra.errors import UsageError


class AtariGames(VectorWrapper):
    """Adds `infos["game_over"]` where episodes end: whether the game is over too.

    It is when the emulator's frame count restarts. Lives cannot tell: Pong has none.
    """

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        self.frames = np.zeros(env.num_envs, np.int64)  # of the emulator in the running games

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self.frames = np.asarray(infos["episode_frame_number"], np.int64)
        return obs, infos

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        obs, rewards, terminated, truncated, infos = self.env.step(actions)
        frames = np.asarray(infos["episode_frame_number"], np.int64)
        ended = terminated | truncated
        if ended.any():
            over = ended & (frames <= self.frames)
            # After a lost life the game continues from `obs`: the emulator's own final_obs is not of this game then.
            # Only these rows of an array that is new in every step: choosing all rows anew costs more than the copies.
            final, lost = infos["final_obs"], ended & ~over
            final[lost] = obs[lost]
            infos = {**infos, "game_over": over, "_final_obs": ended}
        self.frames = frames
        return obs, np.asarray(rewards, np.float64), terminated, truncated, infos


class AtariGame(OneOf):
    """One game as the vector environment plays it, to watch: `render` shows what the policy sees, larger."""

    def __init__(self, games: VectorEnv, render_mode: str | None):
        if render_mode == "human":
            raise UsageError("Atari games have no window: write a video instead, for example --out game.gif")
        super().__init__(games)
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # 60 of the emulator a second
        self.render_mode = render_mode
        self._shown: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        self._shown, info = super().reset(seed=seed)
        return self._shown, info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        outcome = super().step(action)
        self._shown = outcome[0]
        return outcome

    def render(self) -> Any:
        """The newest frame as RGB, four times as large."""
        if self.render_mode is None or self._shown is None:
            return None
        frame = self._shown[-1]
        colors = frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=2)
        return np.ascontiguousarray(colors.repeat(4, axis=0).repeat(4, axis=1))


def atari_games(id: str, num_envs: int, kwargs: dict[str, Any], frame_stack: int | None) -> AtariGames:
    """`num_envs` games in parallel, by their Gymnasium id, which is registered already."""
    if kwargs.get("episodic_life"):
        raise UsageError(
            "env.kwargs: episodic_life starts a new game at each lost life, so that no game is ever played to its end: "
            "use life_loss_info: true, which ends the episode but not the game"
        )
    for name in ("autoreset_mode", "batch_size"):
        if name in kwargs:
            raise UsageError(f"env.kwargs: {name} cannot be set for Atari games: all games step together")
    if frame_stack is not None:
        if "stack_num" in kwargs:
            raise UsageError("env: frame_stack and the keyword stack_num mean the same: give one of them")
        kwargs = {**kwargs, "stack_num": frame_stack}
    arguments: dict[str, Any] = {"reward_clipping": False, **kwargs, "autoreset_mode": AutoresetMode.SAME_STEP}
    return AtariGames(gym.make_vec(id, num_envs, vectorization_mode="vector_entry_point", **arguments))
