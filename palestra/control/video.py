"""Episodes of a policy in a window, or as a GIF or MP4."""

import os
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np

from palestra.control.policy import Policy
from palestra.errors import MissingExtra, UsageError


def has_display() -> bool:
    """Whether a window can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def play(policy: Policy, env: gym.Env, episodes: int, seed: int) -> tuple[list[float], list[np.ndarray]]:
    """Returns of some episodes with the most likely actions, and their pictures where the environment gives any."""
    returns, frames = [], []
    for episode in range(episodes):
        obs, info = env.reset(seed=seed + episode)
        policy.reset()
        total, over = 0.0, False
        _add_frame(env, frames)
        while not over:
            obs, reward, terminated, truncated, info = env.step(policy.act(obs, mask=info.get("action_mask")))
            total, over = total + float(reward), terminated or truncated
            _add_frame(env, frames)
        returns.append(total)
    return returns, frames


def video_path(out: Path) -> Path:
    """`out`, if a video can be written there."""
    if out.suffix not in (".gif", ".mp4"):
        raise UsageError(f"{out}: a video ends in .gif or .mp4")
    return out


def write_video(frames: list[np.ndarray], out: Path, fps: float) -> None:
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
    try:
        import imageio_ffmpeg
    except ImportError as error:
        raise MissingExtra(f"writing {out.name}", "video") from error
    height, width = frames[0].shape[:2]
    writer = imageio_ffmpeg.write_frames(str(out), (width, height), fps=fps, macro_block_size=2)
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()


def _add_frame(env: gym.Env, frames: list[np.ndarray]) -> None:
    try:
        frame = env.render()
    except NotImplementedError as error:
        raise UsageError(f"{type(env.unwrapped).__name__} has no render() to watch it by") from error
    if isinstance(frame, np.ndarray):
        frames.append(frame)
