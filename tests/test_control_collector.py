"""Rollouts are the same whatever the autoreset mode, successors are the true ones, counters count, seeds differ."""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs import LENGTH, Faulty
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import DenseFinalObs, Scripted, Walk, place, ppo_on, scripted_action, sync

from palestra.control.collector import Collector, Rollout
from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import EnvironmentFailed, Stepper
from palestra.control.episodes import Episodes, NotFinite
from palestra.control.seeding import stream
from palestra.errors import UsageError
from palestra.spec.kinds.control import EnvSpec

torch.set_num_threads(1)

SAME, NEXT, OFF = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def dense(factory: Callable[[], gym.Env], num_envs: int) -> VectorEnv:
    return DenseFinalObs(sync(factory, num_envs, SAME))


VECTORS: dict[str, Callable[[Callable[[], gym.Env], int], VectorEnv]] = {
    "same_step": lambda factory, n: sync(factory, n, SAME),
    "same_step_dense": dense,
    "next_step": lambda factory, n: sync(factory, n, NEXT),
    "disabled": lambda factory, n: sync(factory, n, OFF),
}


def collector_of(env: VectorEnv, horizon: int, seed: int = 0) -> Collector:
    collector = Collector(Episodes(Stepper(env)), horizon, (), torch.int64)
    collector.episodes.reset(seed)
    return collector


def collect(collector: Collector) -> Rollout:
    """One rollout of the scripted actions, which need no noise."""
    noise = torch.zeros(collector.horizon, 1)
    return collector.collect(lambda obs, _: scripted_action(obs), noise, lambda action: action.numpy())


def transitions(rollout: Rollout) -> dict[int, list[tuple]]:
    """The valid transitions of each environment, in order; the successor as the rollout's own bootstrap sees it."""
    _, successors = rollout.next_values(place)
    found = defaultdict(list)
    for t, n in np.ndindex(*rollout.rewards.shape):
        if rollout.valid[t, n]:
            flags = (bool(rollout.terminated[t, n]), bool(rollout.truncated[t, n]))
            row = (rollout.obs[t, n].numpy().tobytes(), int(rollout.actions[t, n]), float(rollout.rewards[t, n]))
            found[n].append((*row, *flags, float(successors[t, n])))
    return found


def true_transitions(seed: int, count: int, longest: int = 6) -> list[tuple]:
    """The same from one environment alone, reset by hand."""
    env, found = Scripted(longest), []
    obs, _ = env.reset(seed=seed)
    for _ in range(count):
        action = int(scripted_action(torch.from_numpy(obs[None]))[0])
        after, reward, terminated, truncated, _ = env.step(action)
        successor = float(place(torch.from_numpy(after[None]))[0])
        found.append((obs.tobytes(), action, reward, terminated, truncated, successor))
        obs = env.reset()[0] if terminated or truncated else after
    return found


def assert_true_transitions(env: VectorEnv, horizon: int, rollouts: int, seed: int, longest: int = 6) -> Collector:
    collector = collector_of(env, horizon, seed)
    found, valid, ends = defaultdict(list), 0, 0
    for _ in range(rollouts):
        rollout = collect(collector)
        for n, rows in transitions(rollout).items():
            found[n] += rows
        valid, ends = valid + int(rollout.valid.sum()), ends + len(rollout.ends)
        assert not rollout.final_obs[:, 3].any()
    for n, rows in found.items():
        assert rows == true_transitions(seed + n, len(rows), longest)
        assert all(row[-1] % 10 == 0 for row in rows)  # no flag in a successor
    assert valid == collector.episodes.frame == sum(map(len, found.values()))
    assert ends == collector.episodes.finished == sum(row[3] or row[4] for rows in found.values() for row in rows)
    return collector


@pytest.mark.parametrize("mode", VECTORS)
@given(seed=st.integers(0, 900), horizon=st.integers(1, 9), num_envs=st.integers(1, 4), longest=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_collect_any_autoreset_mode_gives_the_true_transitions(mode, seed, horizon, num_envs, longest):
    env = VECTORS[mode](lambda: Scripted(longest), num_envs)
    assert_true_transitions(env, horizon, rollouts=4, seed=seed, longest=longest)


@pytest.mark.parametrize("mode", [SAME, NEXT, OFF])
def test_collect_environments_in_processes_gives_the_true_transitions(mode):
    env = AsyncVectorEnv([Scripted] * 2, autoreset_mode=mode)
    try:
        assert_true_transitions(env, horizon=13, rollouts=3, seed=5)
    finally:
        env.close()


@pytest.mark.parametrize("mode", VECTORS)
def test_collect_rows_valid_is_the_sum_of_episode_lengths(mode):
    collector = collector_of(VECTORS[mode](lambda: Walk([5.0] * 4), 3), horizon=30)
    rollout = collect(collector)
    finished = [length for _, length in collector.episodes.recent]
    assert finished == [4] * len(finished)
    assert int(rollout.valid.sum()) == sum(finished) + int(collector.episodes.episode_length.sum())
    assert int(rollout.valid.sum()) == (3 * 30 if mode != "next_step" else 3 * 24)  # every fifth step only resets
    assert collector.episodes.metrics() == {"return": 20.0, "length": 4.0, "episodes": len(finished)}


@pytest.mark.parametrize("mode", VECTORS)
def test_next_values_rollout_ending_on_an_episode_end_uses_the_final_observation(mode):
    """Environments of lengths 1 and 3, horizon 3: both end in the last row, the first also before."""
    lengths = iter([1, 3])
    env = VECTORS[mode](lambda: Walk([1.0] * next(lengths), truncates=True), 2)
    rollout = collect(collector_of(env, horizon=3))
    values, successors = rollout.next_values(lambda obs: obs[:, 0] + 100)
    assert successors[:, 1].tolist() == [101, 102, 103]
    assert values[:, 1].tolist() == [100, 101, 102]
    first = successors[:, 0][rollout.valid[:, 0]]
    assert first.tolist() == [101] * len(first)
    assert rollout.truncated[-1].tolist() == [True, True]


def test_next_values_mixed_ends_equals_looking_each_successor_up():
    rollout = collect(collector_of(sync(Scripted, 5), horizon=40, seed=3))
    weights = torch.randn(4, generator=torch.Generator().manual_seed(0))
    values, successors = rollout.next_values(lambda obs: torch.tanh(obs @ weights))
    ends = dict(zip(rollout.ends.tolist(), rollout.final_obs, strict=True))
    for t, n in np.ndindex(40, 5):
        following = rollout.last_obs[n] if t == 39 else rollout.obs[t + 1, n]
        after = ends.get(t * 5 + n, following)
        torch.testing.assert_close(values[t, n], torch.tanh(rollout.obs[t, n] @ weights))
        torch.testing.assert_close(successors[t, n], torch.tanh(after @ weights))


@pytest.mark.parametrize("mode", VECTORS)
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.95), (1.0, 1.0), (0.97, 0.0), (0.0, 0.5)])
def test_gae_of_collected_episodes_equals_each_episode_by_itself(mode, gamma, lam):
    ppo = ppo_on(VECTORS[mode](Scripted, 3), seed=7, horizon=24, minibatch=8, gamma=gamma, lam=lam, net={"hidden": [8]})
    for _ in range(2):
        rollout = ppo.collect()
        batch = ppo.prepare(rollout)
        row_of = {obs.numpy().tobytes(): i for i, obs in enumerate(batch.obs) if batch.valid is None or batch.valid[i]}
        assert len(row_of) == int(rollout.valid.sum())
        ends = dict(zip(rollout.ends.tolist(), rollout.final_obs, strict=True))

        def value(obs: torch.Tensor) -> float:
            with torch.no_grad():
                return float(ppo.policy.net.value(obs[None])[0])

        for n in range(3):
            episode: list[tuple[bytes, float, float]] = []  # row, δ, V
            for t in range(24):
                if not rollout.valid[t, n]:
                    continue
                over = t * 3 + n in ends
                following = rollout.last_obs[n] if t == 23 else rollout.obs[t + 1, n]
                after = ends[t * 3 + n] if over else following
                v = value(rollout.obs[t, n])
                bootstrap = 0.0 if rollout.terminated[t, n] else value(after)
                delta = float(rollout.rewards[t, n]) + gamma * bootstrap - v
                episode.append((rollout.obs[t, n].numpy().tobytes(), delta, v))
                if over or t == 23:
                    for k, (row, _, v_k) in enumerate(episode):
                        expected = sum((gamma * lam) ** i * later[1] for i, later in enumerate(episode[k:]))
                        assert float(batch.advantages[row_of[row]]) == pytest.approx(expected, abs=1e-5)
                        assert float(batch.returns[row_of[row]]) == pytest.approx(expected + v_k, abs=1e-5)
                    episode = []


def test_collect_stored_observations_are_not_changed_by_later_steps():
    """Shared memory without copies: every observation the environment returns is overwritten by its next step."""
    env = SyncVectorEnv([Scripted] * 2, copy=False, autoreset_mode=NEXT)
    collector = collector_of(env, horizon=6, seed=1)
    first = collect(collector)
    kept, last = transitions(first), first.last_obs.clone()
    assert kept[0] == true_transitions(1, len(kept[0]))
    assert kept[1] == true_transitions(2, len(kept[1]))
    env.step(np.zeros(2, np.int64))
    assert torch.equal(first.last_obs, last)
    assert transitions(first) == kept


def test_metrics_rewards_of_any_size_logs_raw_returns_of_the_last_hundred_episodes():
    collector = collector_of(sync(lambda: Walk([5.0, 5.0, -1e6]), 2), horizon=300)
    collect(collector)
    assert collector.episodes.finished == 200
    assert len(collector.episodes.recent) == 100
    assert collector.episodes.metrics() == {"return": 10 - 1e6, "length": 3.0, "episodes": 200}


def test_metrics_no_episode_finished_says_nothing_of_returns():
    collector = collector_of(sync(lambda: Walk([1.0] * 9), 1), horizon=3)
    collect(collector)
    assert collector.episodes.metrics() == {"episodes": 0}


def test_frame_counts_transitions_of_all_environments():
    collector = collector_of(sync(Scripted, 3), horizon=10)
    for rollouts in (1, 2, 3):
        collect(collector)
        assert collector.episodes.frame == rollouts * 30
        assert collector.episodes.stepper.steps == rollouts * 10


def cartpole_trace(seed: int) -> np.ndarray:
    """(200, 2, 4): two environments of a run's seed, with actions that depend on the observation alone."""
    env = make_vector(EnvSpec(id="CartPole-v1", vectorize="sync"), 2)
    collector = Collector(Episodes(Stepper(env)), 200, (), torch.int64)
    collector.episodes.reset(stream(seed, "env"))
    act = lambda obs, _: (obs[:, 2] + obs[:, 3] > 0).long()  # noqa: E731
    return collector.collect(act, torch.zeros(200, 1), lambda a: a.numpy()).obs.numpy().copy()


def test_seed_environments_and_neighboring_seeds_give_different_traces():
    trace, again, neighbor = cartpole_trace(3), cartpole_trace(3), cartpole_trace(4)
    assert trace.tobytes() == again.tobytes()
    starts = [tuple(row) for row in np.concatenate([trace[0], neighbor[0]])]
    assert len(set(starts)) == 4  # in particular environment 1 of seed 3 is not environment 0 of seed 4


def test_state_taken_in_the_middle_of_episodes_continues_identically():
    def made() -> Collector:
        return collector_of(make_vector(EnvSpec(id="object:Scripted"), 3, Scripted), horizon=7, seed=11)

    going = made()
    collect(going)
    state = going.episodes.state()
    second = transitions(collect(going))
    fresh = made()
    fresh.episodes.load_state(state)
    again = transitions(collect(fresh))
    assert again == second
    assert fresh.episodes.metrics() == going.episodes.metrics()
    assert (fresh.episodes.frame, fresh.episodes.finished, fresh.episodes.stepper.steps) == (
        going.episodes.frame,
        going.episodes.finished,
        going.episodes.stepper.steps,
    )
    np.testing.assert_array_equal(fresh.episodes.episode_return, going.episodes.episode_return)


def test_state_taken_changes_nothing_and_is_not_changed_by_going_on():
    plain = collector_of(make_vector(EnvSpec(id="object:Scripted"), 2, Scripted), horizon=5, seed=2)
    watched = collector_of(make_vector(EnvSpec(id="object:Scripted"), 2, Scripted), horizon=5, seed=2)
    for _ in range(4):
        expected = transitions(collect(plain))
        before = watched.episodes.state()
        held = [before["now"].copy(), before["episode_return"].copy(), before["frame"], list(before["recent"])]
        assert transitions(collect(watched)) == expected
        watched.episodes.state()
        np.testing.assert_array_equal(before["now"], held[0])
        np.testing.assert_array_equal(before["episode_return"], held[1])
        assert [before["frame"], before["recent"]] == held[2:]


@pytest.mark.parametrize("metadata", [{}, {"autoreset_mode": None}, {"autoreset_mode": "NextStep"}])
def test_stepper_autoreset_mode_not_said_is_refused(metadata):
    env = sync(Scripted, 2)
    env.metadata = metadata
    with pytest.raises(UsageError, match="autoreset"):
        Stepper(env, "Odd-v0")


def test_step_same_step_without_final_observations_is_refused():
    class Silent(DenseFinalObs):
        def step(self, actions: Any) -> tuple:
            return (*self.env.step(actions)[:4], {})

    stepper = Stepper(Silent(sync(lambda: Walk([1.0]), 1)), "Silent-v0")
    stepper.reset(0)
    with pytest.raises(UsageError, match=r"Silent-v0.*final_obs"):
        stepper.step(np.zeros(1, np.int64))


class Stuck(Walk):
    """Raises in its second reset."""

    resets = 0

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict]:
        self.resets += 1
        if self.resets == 2:
            raise RuntimeError("the door is stuck")
        return super().reset(**arguments)


@pytest.mark.parametrize("mode", [SAME, NEXT, OFF])
def test_step_environment_raises_when_resetting_says_which_and_when(mode):
    stepper = Stepper(sync(lambda: Stuck([1.0, 1.0]), 2, mode), "Stuck-v0")
    stepper.reset(0)
    for _ in range(2 if mode is NEXT else 1):
        stepper.step(np.zeros(2, np.int64))
    with pytest.raises(EnvironmentFailed, match=r"Stuck-v0 raised RuntimeError .*step [23].*the door is stuck"):
        stepper.step(np.zeros(2, np.int64))


def test_reset_environment_raises_says_so():
    env = sync(lambda: Stuck([1.0]), 1)
    Stepper(env).reset(0)
    with pytest.raises(EnvironmentFailed, match="the door is stuck"):
        Stepper(env).reset(0)


@pytest.mark.parametrize(
    ("fault", "at", "what"),
    [
        ("nan_reward", 7, "reward of nan in environment 0 at vector step 7 "),
        ("nan_obs", 7, "observation of nan in environment 0 at vector step 7 "),
        ("nan_obs", 32, "observation of nan in environment 0 at vector step 32 "),  # what follows the last row
        ("nan_final", LENGTH, f"final observation of nan in environment 0 at vector step {LENGTH} "),
    ],
)
def test_collect_number_not_finite_raises_before_anything_is_learned(fault, at, what):
    ppo = ppo_on(sync(lambda: Faulty(at=at, fault=fault), 2), horizon=32, minibatch=32)
    before = ppo.flat.vector.clone()
    with pytest.raises(NotFinite, match=what):
        ppo.step(0.0)
    assert torch.equal(ppo.flat.vector, before)
    assert ppo.updates == 0


def test_make_vector_environment_of_a_module_beside_the_spec_is_registered(tmp_path, monkeypatch):
    registers = (
        "import gymnasium\n"
        "gymnasium.register('Beside-v0', vector_entry_point='palestra.control.envs.classic:CartPoleVector')\n"
    )
    (tmp_path / "beside_the_spec.py").write_text(registers)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = make_vector(EnvSpec(id="Beside-v0", vectorize="vector", module="beside_the_spec"), 3)
    assert env.num_envs == 3
    assert env.reset(seed=0)[0].shape == (3, 4)
