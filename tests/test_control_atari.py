"""Atari through ale-py's vector environment: what is shown, whole-game scores, lives, seeds (points 10, 12, 13, 33)."""

import importlib
from contextlib import closing
from functools import cache
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from palestra.control.envs.make import evaluation_vector, make_single, make_vector
from palestra.control.envs.snapshot import restore_vector, vector_exactness, vector_state
from palestra.control.envs.stepping import Stepper
from palestra.control.episodes import Episodes
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

pytest.importorskip("ale_py")
PLAIN = {"repeat_action_probability": 0.0, "noop_max": 1, "use_fire_reset": False}


def games(num_envs: int, id: str = "ALE/Breakout-v5", **kwargs):
    return make_vector(EnvSpec(id=id, kwargs=kwargs), num_envs)


@cache
def weights(old: int, new: int) -> np.ndarray:
    """How much of each old pixel is in each new one."""
    edges = np.arange(new + 1) * old / new
    pixels = np.arange(old)
    return np.array([np.clip(np.minimum(pixels + 1, b) - np.maximum(pixels, a), 0, 1) for a, b in pairwise(edges)])


def area_resized(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    """The mean over the area that each new pixel covers."""
    rows, columns = weights(frame.shape[0], height), weights(frame.shape[1], width)
    return rows @ frame.astype(np.float64) @ columns.T / (rows[0].sum() * columns[0].sum())


def test_observations_are_the_emulators_frames_skipped_pooled_resized_and_stacked():  # point 33
    with closing(games(1, **PLAIN)) as env:
        assert env.single_observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        obs, infos = env.reset(seed=0)
        assert infos["episode_frame_number"].tolist() == [0]
        ale_py: Any = importlib.import_module("ale_py")
        gym.register_envs(ale_py)
        raw = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale")
        raw.reset(seed=0)
        stack = [np.zeros((84, 84))] * 3 + [obs[0, -1].astype(np.float64)]
        assert not obs[0, :3].any()  # cleared at reset
        rng = np.random.default_rng(0)
        for _ in range(40):
            action = int(rng.integers(0, 4))
            before = obs
            obs, rewards, *_ = env.step(np.array([action]))
            steps = [raw.step(action) for _ in range(4)]
            pooled = np.maximum(steps[-2][0], steps[-1][0])
            stack = [*stack[1:], area_resized(pooled, 84, 84)]
            assert np.abs(np.stack(stack) - obs[0]).max() <= 1.0  # rounding, and nothing else
            assert np.array_equal(obs[0, :3], before[0, 1:])  # the newest last
            assert rewards[0] == sum(step[1] for step in steps)
        assert obs.max() > 100


def played(env, steps: int, seed: int = 0) -> tuple[Episodes, int, list[float]]:
    """Random play: what was recorded, ends of episodes, and the scores of games by the emulator's frame counter."""
    stepper = Stepper(env, "game")
    episodes = Episodes(stepper)
    episodes.reset(seed)
    rng = np.random.default_rng(seed)
    ends = 0
    for _ in range(steps):
        moved = episodes.step(rng.integers(0, env.single_action_space.n, env.num_envs))
        ends += 0 if moved.ended is None else len(moved.ended)
    return episodes, ends, [score for score, _ in episodes.recent]


def test_lost_lives_end_episodes_and_scores_stay_those_of_whole_games():  # point 10
    kwargs = {"repeat_action_probability": 0.0}
    with closing(games(2, **kwargs)) as env:
        whole, ends, scores = played(env, 250)
    assert ends == len(scores) > 1
    with closing(games(2, life_loss_info=True, **kwargs)) as env:
        lives, life_ends, life_scores = played(env, 250)
    assert life_scores == scores
    assert [length for _, length in lives.recent] == [length for _, length in whole.recent]
    assert life_ends >= 5 * len(scores)


def test_pong_which_has_no_lives_scores_each_game_once():  # point 10
    with closing(games(1, "ALE/Pong-v5")) as env:
        episodes, ends, scores = played(env, 1100)
    assert ends == len(scores) > 0
    assert all(-21 <= score <= -15 for score in scores)
    assert episodes.frame == 1100  # steps of the agent, each four of the emulator's (point 12)


def test_final_observation_is_the_one_that_another_autoreset_mode_shows():  # points 3, 5
    kwargs: dict[str, Any] = {"repeat_action_probability": 0.0, "reward_clipping": False}
    ale_py: Any = importlib.import_module("ale_py")
    gym.register_envs(ale_py)
    with closing(games(1, **{k: v for k, v in kwargs.items() if k != "reward_clipping"})) as env:
        other = gym.make_vec("ALE/Breakout-v5", 1, autoreset_mode=AutoresetMode.NEXT_STEP, **kwargs)
        env.reset(seed=3)
        other.reset(seed=3)
        rng = np.random.default_rng(0)
        for _ in range(1000):
            action = rng.integers(0, 4, 1)
            obs, rewards, terminated, truncated, infos = env.step(action)
            shown, its_rewards, its_terminated, _, _ = other.step(action)
            assert (rewards[0], terminated[0]) == (its_rewards[0], its_terminated[0])
            if terminated[0] or truncated[0]:
                assert np.array_equal(infos["final_obs"][0], shown[0])
                assert not np.array_equal(obs[0], shown[0])
                return
            assert np.array_equal(obs, shown)
    raise AssertionError("no game ended")


def test_final_observation_of_a_lost_life_is_what_the_game_goes_on_with():
    with closing(games(2, life_loss_info=True)) as env:
        stepper = Stepper(env, "game")
        stepper.reset(0)
        rng, lost = np.random.default_rng(0), 0
        while lost < 3:
            moved = stepper.step(rng.integers(0, 4, 2))
            for row, i in enumerate(() if moved.ended is None else moved.ended):
                if stepper.over is None or i not in stepper.over:
                    assert moved.final_obs is not None
                    assert np.array_equal(moved.final_obs[row], moved.obs[i])
                    lost += 1


def test_evaluation_plays_whole_games():
    spec = EnvSpec(id="ALE/Breakout-v5", kwargs={"life_loss_info": True, "repeat_action_probability": 0.0})
    with closing(evaluation_vector(spec, 2)) as env:
        _, ends, scores = played(env, 300)
    assert ends == len(scores) > 0


def test_watched_game_goes_on_after_a_lost_life():
    spec = EnvSpec(id="ALE/Breakout-v5", kwargs={"life_loss_info": True, "repeat_action_probability": 0.0})
    with closing(evaluation_vector(spec, 1)) as whole, closing(make_single(spec, render_mode="rgb_array")) as watched:
        lengths = []
        for env, action in ((whole, np.ones(1, np.int64)), (watched, np.int64(1))):  # FIRE, and never move
            env.reset(seed=3)
            steps, over = 0, False
            while not over:
                _, _, terminated, truncated, _ = env.step(action)
                steps, over = steps + 1, bool(np.any(terminated) or np.any(truncated))
            lengths.append(steps)
    assert lengths[0] == lengths[1] > 50


def test_same_seed_gives_the_same_games_and_games_differ():  # point 14
    traces = []
    for seeds in ((5,), (5, 6)):
        with closing(games(2, "ALE/Pong-v5")) as env:
            for seed in seeds:
                env.reset(seed=seed)
                rng = np.random.default_rng(0)
                traces.append(np.stack([env.step(np.full(2, rng.integers(0, 6)))[0] for _ in range(40)]))
    assert traces[0].tobytes() == traces[1].tobytes()
    assert traces[0].tobytes() != traces[2].tobytes()
    assert traces[0][:, 0].tobytes() != traces[0][:, 1].tobytes()


def test_returned_arrays_are_never_written_again():  # point 13
    with closing(games(2, life_loss_info=True)) as env:
        kept = [(obs := env.reset(seed=0)[0], obs.copy())]
        for _ in range(60):
            obs, *_, infos = env.step(np.ones(2, np.int64))
            kept += [(array, array.copy()) for array in (obs, infos.get("final_obs")) if array is not None]
        assert len(kept) > 62  # lives were lost
        assert all(np.array_equal(array, copy) for array, copy in kept)


def test_rewards_are_the_games_own_unless_asked_otherwise():
    with closing(games(1, "ALE/SpaceInvaders-v5")) as env:
        env.reset(seed=0)
        rng = np.random.default_rng(0)
        rewards = np.concatenate([env.step(rng.integers(0, 6, 1))[1] for _ in range(200)])
    assert rewards.max() >= 5
    assert rewards.dtype == np.float64


def test_resume_begins_new_games_and_says_so():
    with closing(games(2)) as env:
        env.reset(seed=0)
        assert "running episodes restart" in str(vector_exactness(env))
        with pytest.warns(UserWarning, match="restart"):
            restarted = restore_vector(env, vector_state(env))
        assert restarted is not None
        assert restarted.which.all()
        assert restarted.observations.shape == (2, 4, 84, 84)


def test_single_game_to_watch_shows_what_the_vector_shows():
    spec = EnvSpec(id="ALE/Breakout-v5", frame_stack=2)
    with closing(make_vector(spec, 1)) as env, closing(make_single(spec, render_mode="rgb_array")) as single:
        assert single.observation_space.shape == (2, 84, 84)
        obs, _ = single.reset(seed=4)
        assert np.array_equal(env.reset(seed=4)[0][0], obs)
        for _ in range(20):
            assert np.array_equal(env.step(np.array([1]))[0][0], single.step(1)[0])
        picture: Any = single.render()
        assert picture.shape == (336, 336, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kwargs": {"episodic_life": True}}, "life_loss_info"),
        ({"kwargs": {"autoreset_mode": "NextStep"}}, "cannot be set"),
        ({"kwargs": {"stack_num": 2}, "frame_stack": 4}, "give one of them"),
        ({"kwargs": {"no_such": 1}}, "could not be made with"),
        ({"id": "ALE/Nothing-v5"}, "there is no environment"),
    ],
)
def test_bad_arguments_are_errors_of_the_spec(given, said):
    with pytest.raises(UsageError, match=said):
        make_vector(EnvSpec(**{"id": "ALE/Breakout-v5", **given}), 1)


@pytest.mark.parametrize("id", ["ALE/Pong-v5", "ALE/Boxing-v5", "ALE/Freeway-v5", "ALE/Enduro-v5"])
def test_games_without_lives_end_only_where_a_single_game_does(id):  # point 10: the sum of many games as one
    # The same seed, no-ops and actions: the emulator is the same, so returns are the same to the last point.
    ale_py: Any = importlib.import_module("ale_py")
    gym.register_envs(ale_py)
    spec = EnvSpec(id=id, kwargs={"life_loss_info": True, "max_num_frames_per_episode": 400, **PLAIN})
    raw = gym.make(id, obs_type="ram", repeat_action_probability=0.0, max_num_frames_per_episode=400)
    with closing(make_vector(spec, 1)) as env, closing(raw):
        episodes = Episodes(Stepper(env, id))
        episodes.reset(0)
        rng, returns = np.random.default_rng(0), []
        for _ in range(2):
            raw.reset(seed=0)
            total, over = 0.0, False
            while not over:
                action = int(rng.integers(0, raw.action_space.n))
                _, reward, terminated, truncated, _ = raw.step(action)
                total, over = total + float(reward), terminated or truncated
                moved = episodes.step(np.array([action]))
                assert (moved.ended is not None) == over
            returns.append(total)
    assert [score for score, _ in episodes.recent] == returns
    assert episodes.finished == 2
