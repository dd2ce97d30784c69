"""Evaluation takes its quota from every environment and leaves the learner alone; videos are written."""

import random

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from envs import Identity
from gymnasium.vector import AutoresetMode
from PIL import Image, ImageSequence
from probe_envs import Walk, ppo_on, sync

from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate, play, random_episodes, tiled, write_video
from palestra.control.policy import Policy
from palestra.control.seeding import load_random_state, random_state, seed_everything, stream
from palestra.errors import UsageError

torch.set_num_threads(1)

MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]


def short_and_long(mode: AutoresetMode) -> Stepper:
    """Two environments whose episodes always have 1 and 100 steps, with a reward of 1 each."""
    lengths = iter([1, 100])
    return Stepper(sync(lambda: Walk([1.0] * next(lengths)), 2, mode))


def policy_for(env: gym.vector.VectorEnv, seed: int = 0) -> Policy:
    return probe_envs.policy_for(env.single_observation_space, env.single_action_space, seed)


@pytest.mark.parametrize("mode", MODES)
def test_evaluate_short_and_long_episodes_takes_as_many_of_both(mode):
    stepper = short_and_long(mode)
    evaluation = evaluate(policy_for(stepper.env), stepper, 10, seed=0)
    assert sorted(evaluation.lengths.tolist()) == [1] * 5 + [100] * 5
    assert evaluation.returns.tolist() == evaluation.lengths.tolist()
    expected = {"eval/return": 50.5, "eval/return_std": 49.5, "eval/return_min": 1.0, "eval/length": 50.5}
    assert evaluation.metrics() == expected


@pytest.mark.parametrize("mode", MODES)
def test_evaluate_episodes_not_a_multiple_of_the_environments_gives_that_many(mode):
    stepper = short_and_long(mode)
    assert sorted(random_episodes(stepper, 5, seed=0).lengths.tolist()) == [1, 1, 1, 100, 100]
    assert random_episodes(stepper, 1, seed=0).lengths.tolist() == [1]


def test_evaluate_same_seed_again_gives_the_same_returns_and_another_seed_others():
    stepper = Stepper(sync(lambda: gym.make("CartPole-v1"), 3))
    policy = policy_for(stepper.env)
    first, other, again = (evaluate(policy, stepper, 9, seed) for seed in (1, 2, 1))
    assert first.returns.tolist() == again.returns.tolist()
    assert first.returns.tolist() != other.returns.tolist()
    assert random_episodes(stepper, 9, 1).returns.tolist() == random_episodes(stepper, 9, 1).returns.tolist()


def test_evaluate_takes_the_most_likely_actions():
    stepper = Stepper(sync(lambda: Identity("discrete"), 2))
    policy = policy_for(stepper.env)
    with torch.no_grad():
        policy.net.policy_head.weight.zero_()
        policy.net.policy_head.bias.copy_(torch.tensor([0.0, 0.001, 0.0]))  # sampling would take each a third of times
    obs = stepper.reset(7)
    wanted = []
    for _ in range(20):
        wanted.append(obs.argmax(axis=1) == 1)
        obs = stepper.step(np.ones(2, np.int64)).obs
    evaluation = evaluate(policy, stepper, 2, seed=7)
    assert evaluation.returns.tolist() == np.sum(wanted, axis=0).tolist()


def test_evaluate_between_steps_changes_no_number_of_the_learner():
    def run(evaluating: bool) -> list[dict[str, float]]:
        seed_everything(3)
        ppo = ppo_on(sync(Identity, 4), horizon=16, minibatch=32)
        stepper, rows = Stepper(sync(Identity, 3)), []
        for step in range(3):
            rows.append(ppo.step(0.0))
            if evaluating:
                evaluate(ppo.policy, stepper, 4, seed=step)
        drawn = {"python": random.random(), "numpy": float(np.random.rand()), "torch": float(torch.rand(()))}  # noqa: NPY002
        return [*rows, drawn]

    assert run(evaluating=True) == run(evaluating=False)


def test_stream_seeds_and_names_give_unrelated_numbers():
    seeds = [stream(seed, *names) for seed in range(50) for names in (("env",), ("policy",), ("eval", 1), ("eval", 2))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert stream(3, "env") + 1 != stream(4, "env")


def test_random_state_restored_continues_every_global_generator():
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    seed_everything(9)
    state = random_state()
    drawn = draw()
    assert draw() != drawn
    load_random_state(state)
    assert draw() == drawn
    seed_everything(9)
    assert draw() == drawn


def test_play_episodes_gives_their_returns_and_every_picture(tmp_path):
    env = gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=7)
    policy = probe_envs.policy_for(env.observation_space, env.action_space)
    returns, videos = play(policy, env, 2, seed=0)
    assert returns == [7.0, 7.0]
    assert [len(video) for video in videos] == [7 + 1, 7 + 1]
    frames = [frame for video in videos for frame in video]
    write_video(frames, tmp_path / "new" / "film.gif", 50)
    with Image.open(tmp_path / "new" / "film.gif") as film:
        assert film.size == (600, 400)
        assert film.n_frames > 1  # equal pictures in a row become one that lasts longer
        assert sum(frame.info["duration"] for frame in ImageSequence.Iterator(film)) == len(frames) * 20  # ms


def test_tiled_videos_are_in_a_grid_and_short_ones_stay_at_their_last_picture():
    videos = [
        [np.full((2, 3, 3), 10 * number + t, np.uint8) for t in range(length)]
        for number, length in enumerate((1, 3, 2))
    ]
    frames = tiled(videos)
    assert [frame.shape for frame in frames] == [(4, 6, 3)] * 3
    corners = [[int(frame[y, x, 0]) for y, x in ((0, 0), (0, 5), (3, 0), (3, 5))] for frame in frames]
    assert corners == [[0, 10, 20, 0], [0, 11, 21, 0], [0, 12, 21, 0]]


def test_write_video_without_pictures_or_of_another_kind_is_refused(tmp_path):
    with pytest.raises(UsageError, match="rgb_array"):
        write_video([], tmp_path / "film.gif", 30)
    with pytest.raises(UsageError, match=r"\.gif or \.mp4"):
        write_video([np.zeros((4, 4, 3), np.uint8)], tmp_path / "film.avi", 30)
