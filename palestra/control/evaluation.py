"""Evaluation of a policy: whole episodes in separate environments, a fixed number from each; episodes as video."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

from palestra.control.envs.stepping import EnvironmentFailed, Stepper, random_allowed
from palestra.control.episodes import Episodes
from palestra.control.policy import Policy
from palestra.errors import UsageError, needs_extra

Act = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of observations and where episodes start, bool (N,)

LONGEST_EPISODE = 200_000  # steps; the longest of Gymnasium's own environments end long before


@dataclass(frozen=True)
class PolicyEvaluation:
    """Undiscounted returns and lengths of the evaluated episodes."""

    returns: np.ndarray
    lengths: np.ndarray

    def metrics(self) -> dict[str, float]:
        return {
            "eval/return": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/return_min": float(self.returns.min()),
            "eval/length": float(self.lengths.mean()),
        }

    @property
    def frames(self) -> int:
        """Environment transitions of its episodes."""
        return int(self.lengths.sum())


def evaluate(
    policy: Policy, stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool] = lambda: False
) -> PolicyEvaluation | None:
    """`episodes` episodes with the most likely actions; None if `stop()` became true before their end.

    Each environment has a quota: taking the first episodes to finish, wherever, would favor short ones.
    """

    policy.reset()

    def act(obs: np.ndarray, began: np.ndarray) -> np.ndarray:
        if began.any():
            policy.reset(began)
        mask = None if stepper.mask is None else torch.from_numpy(stepper.mask)
        return policy.head.to_env(policy.actions(torch.from_numpy(obs), mask))

    return _episodes(act, stepper, episodes, seed, stop)


def random_episodes(stepper: Stepper, episodes: int, seed: int) -> PolicyEvaluation:
    """`episodes` episodes of uniformly random allowed actions: the zero of the trial metrics."""
    space, single = stepper.env.action_space, stepper.env.single_action_space
    space.seed(seed)
    random = np.random.default_rng(seed)

    def act(obs: np.ndarray, began: np.ndarray) -> np.ndarray:
        return space.sample() if stepper.mask is None else random_allowed(stepper.mask, single, random)

    evaluation = _episodes(act, stepper, episodes, seed, lambda: False)
    assert evaluation is not None
    return evaluation


def _episodes(
    act: Act, stepper: Stepper, episodes: int, seed: int, stop: Callable[[], bool]
) -> PolicyEvaluation | None:
    """Whole episodes of `act(obs, began)`."""
    n = stepper.num_envs
    quota = np.full(n, episodes // n)
    quota[: episodes % n] += 1
    done: list[list[tuple[float, int]]] = [[] for _ in range(n)]  # return and length
    running = Episodes(stepper)
    running.reset(seed)
    while sum(map(len, done)) < episodes:
        if stop():
            return None
        running.step(act(running.now, running.began))
        for i, total, length in running.just_finished:
            if len(done[i]) < quota[i]:
                done[i].append((total, length))
        if running.episode_length.max() >= LONGEST_EPISODE:
            raise EnvironmentFailed(
                f"an episode of {stepper.name} did not end within {LONGEST_EPISODE:,} steps, so evaluation cannot: "
                "give the environment a time limit, for example env.kwargs: {max_episode_steps: 1000}"
            )
    returns, lengths = zip(*chain.from_iterable(done), strict=True)
    return PolicyEvaluation(np.array(returns), np.array(lengths))


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


Video = list[np.ndarray]


def play(policy: Policy, env: gym.Env, episodes: int, seed: int) -> tuple[list[float], list[Video]]:
    """Returns of some episodes with the most likely actions, and the pictures of each, if there are any."""
    returns, videos = [], []
    for episode in range(episodes):
        frames: Video = []
        obs, info = env.reset(seed=seed + episode)
        policy.reset()
        total, over = 0.0, False
        _add_frame(env, frames)
        while not over:
            obs, reward, terminated, truncated, info = env.step(policy.act(obs, mask=info.get("action_mask")))
            total, over = total + float(reward), terminated or truncated
            _add_frame(env, frames)
        returns.append(total)
        videos.append(frames)
    return returns, videos


def tiled(videos: list[Video]) -> Video:
    """Videos of one size side by side, in a grid about as wide as high; those that end early stay at their last."""
    longest, columns = max(map(len, videos)), math.ceil(math.sqrt(len(videos)))
    if longest == 0:
        return []
    padded = np.stack([np.stack(video + video[-1:] * (longest - len(video))) for video in videos])  # (V, T, H, W, 3)
    empty = np.zeros((-len(videos) % columns, *padded.shape[1:]), padded.dtype)
    cells = np.concatenate([padded, empty]).reshape(-1, columns, *padded.shape[1:])  # (rows, columns, T, H, W, 3)
    rows, _, _, height, width, colors = cells.shape
    return list(cells.transpose(2, 0, 3, 1, 4, 5).reshape(longest, rows * height, columns * width, colors))


def video_path(out: Path) -> Path:
    """`out`, if a video can be written there."""
    if out.suffix not in (".gif", ".mp4"):
        raise UsageError(f"{out}: a video ends in .gif or .mp4")
    return out


def write_video(frames: Video, out: Path, fps: float) -> None:
    """The pictures as a GIF (in the base of training) or an MP4 (with the extra `video`)."""
    video_path(out)
    if not frames:
        raise UsageError(f"{out}: the environment gave no pictures; make it with render_mode='rgb_array'")
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame).quantize(64, Image.Quantize.FASTOCTREE) for frame in frames]
        # Viewers slow a GIF down whose frames last under 20 ms.
        images[0].save(out, save_all=True, append_images=images[1:], duration=max(20, round(1000 / fps)), loop=0)
        return
    with needs_extra(f"writing {out.name}", "video"):
        import imageio_ffmpeg
    height, width = frames[0].shape[:2]
    writer = imageio_ffmpeg.write_frames(str(out), (width, height), fps=fps, macro_block_size=2)
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def _add_frame(env: gym.Env, frames: Video) -> None:
    try:
        frame = env.render()
    except NotImplementedError as error:
        raise UsageError(f"{type(env.unwrapped).__name__} has no render() to watch it by") from error
    if isinstance(frame, np.ndarray):
        frames.append(frame)
