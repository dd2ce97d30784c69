"""Action masks off-policy: stored with what they are of, in exploration, in targets and soft values, resuming."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import fast_only
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from on_policy_envs import Forbidding
from probe_envs import learner_on, sync

from palestra.control.algorithms.off_policy import Inputs, random_allowed
from palestra.control.envs.make import make_vector
from palestra.control.envs.stepping import Stepper
from palestra.control.evaluation import evaluate
from palestra.control.memory.replay import Replay
from palestra.rl.losses import allowed_entropy
from palestra.spec.kinds.control import EnvSpec
from palestra.spec.schedule import Schedule

torch.set_num_threads(1)

NAMES = ["dqn", "sac", "crossq"]
MODES = [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
SMALL: dict[str, Any] = {"horizon": 16, "start": 24, "batch": 32, "buffer": 90, "replay_ratio": 1 / 3, "gamma": 0.9}


class Cut(Forbidding):
    """Shows its mask, also in the observation that a time limit cuts off; now and then it terminates."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, over, _, info = super().step(action)
        ends = over and self.np_random.random() < 0.3
        info = info if ends else {"action_mask": self._formed(obs > 0)}  # a time limit leaves the choices as they are
        return obs, reward, ends, over and not ends, info


def learner(
    name: str, mode: AutoresetMode = MODES[0], steps: int = 2, env: VectorEnv | None = None, **given: Any
) -> Any:
    made = learner_on(env or sync(Cut, 3, mode), name, net={"hidden": [16]}, **{**SMALL, **given})
    for _ in range(steps):
        made.step(0.0)
    return made


@pytest.mark.parametrize(
    ("name", "mode"), fast_only([(n, m) for n in NAMES for m in MODES], *zip(NAMES, MODES, strict=True))
)
def test_learner_and_evaluation_never_do_what_is_forbidden(name, mode):
    """The environment raises at a forbidden action."""
    made = learner(name, mode)
    assert made.updates > 0
    evaluate(made.policy, Stepper(sync(Cut, 3, mode)), 6, seed=1)


@pytest.mark.parametrize("mode", MODES)
def test_memory_gives_the_masks_of_both_observations_final_ones_too(mode):
    """The observation is the mask, also the final one."""
    memory = learner("dqn", mode, steps=3).memory
    batch = memory.sample(300, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch.masks, batch.obs > 0)
    alive = batch.discounts > 0
    assert (~alive).any()
    torch.testing.assert_close(batch.next_masks[alive], batch.next_obs[alive] > 0)


def test_memory_of_copies_gives_the_masks_of_final_observations():
    env = make_vector(EnvSpec(id="object:Cut", vectorize="sync"), 3, Cut)
    batch = learner("dqn", env=env).memory.sample(300, torch.Generator().manual_seed(0))
    alive = batch.discounts > 0
    torch.testing.assert_close(batch.next_masks[alive], batch.next_obs[alive] > 0)


@pytest.mark.parametrize("double", [True, False])
def test_dqn_targets_are_the_best_of_allowed_actions(double):
    made = learner("dqn", double=double)
    torch.manual_seed(0)
    made.target.vector.add_(torch.randn_like(made.target.vector))
    batch = made.memory.sample(200, torch.Generator().manual_seed(0))
    with torch.no_grad():
        targets = made.targets(batch)[:, 0]
        theirs, own = made.target.net.q(batch.next_obs), made.net.q(batch.next_obs)
    for i in range(200):
        allowed = [a for a in range(4) if batch.next_masks[i, a]]
        best = max(allowed, key=lambda a, i=i: float((own if double else theirs)[i, a]))
        torch.testing.assert_close(targets[i], batch.rewards[i] + batch.discounts[i] * theirs[i, best])


def test_sac_values_and_entropies_are_of_allowed_actions_whatever_alpha():
    made = learner("sac")
    batch = made.memory.sample(100, torch.Generator().manual_seed(0))
    made.learned.alpha.vector.fill_(5.0)  # α = 148: times the log-probability of a forbidden action beyond float32
    alpha = made.learned.alpha.vector.exp()
    with torch.no_grad():
        q = made.critics(made.learned.target)(batch.next_obs)
        _, logprobs, entropies = made.sampled(made.learned.actor.vector, batch.next_obs, None, batch.next_masks)
        values = made.value(q, logprobs, alpha)
        logits = made.net.policy_head(made.net.trunk(batch.next_obs))
    for i in range(100):
        allowed = batch.next_masks[i]
        p = torch.softmax(logits[i, allowed], 0)
        torch.testing.assert_close(entropies[i], -(p * p.log()).sum())
        torch.testing.assert_close(
            values[i], (p * (q.amin(0)[i, allowed] - alpha * p.log())).sum(), rtol=1e-4, atol=1e-4
        )
    made.update(made.learned, batch, Inputs(torch.zeros(2, 0, 4), torch.full((3, 2), 1e-3)), torch.zeros(5))
    assert all(torch.isfinite(part.vector).all() for part in made.learned[:2])


def test_sac_target_entropy_is_a_share_of_what_allowed_actions_can_have():
    masks = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    target = float(allowed_entropy(0.6 * np.log(4), masks))
    assert target == pytest.approx(0.6 * (np.log(4) + np.log(1) + np.log(2)) / 3)
    assert float(allowed_entropy(0.0, torch.ones(2, 1).bool())) == 0.0


def test_exploration_is_uniform_over_allowed_actions():
    made = learner("dqn", steps=0)
    made.exploration = type(made.exploration)(made.net, made.generator, Schedule(shape="constant", start=0.5), None)
    mask = np.array([[True, False, True, True]] * 4000)
    q = torch.tensor([[0.0, 9.0, 1.0, 0.5]]).expand(4000, 4)
    noise = made.exploration.noise(1, 4000)
    shares = torch.bincount(made.exploration.chosen(lambda: q, noise, 0, 0.0, mask), minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([1 / 6, 0.0, 0.5 + 1 / 6, 1 / 6]), atol=0.03, rtol=0)
    first = torch.bincount(random_allowed(mask, made.generator), minlength=4) / 4000
    torch.testing.assert_close(first, torch.tensor([1 / 3, 0.0, 1 / 3, 1 / 3]), atol=0.03, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trip_continues_identically(name):
    def made() -> Any:
        return learner(name, steps=0, env=make_vector(EnvSpec(id="object:Cut", vectorize="sync"), 3, Cut))

    going = made()
    for _ in range(3):  # the buffer is full, its oldest rows gone
        going.step(0.0)
    state, generator = going.state(), going.generator.get_state()
    expected = [going.step(0.0) for _ in range(2)]
    resumed = made()
    resumed.load_state(state)
    resumed.generator.set_state(generator)
    assert [resumed.step(0.0) for _ in range(2)] == expected


def test_cut_keeps_the_mask_of_what_was_shown():
    made = learner("dqn")
    memory: Replay = made.memory
    shown = torch.as_tensor(memory.columns["obs"][memory.added % memory.ring]).clone()
    memory.cut(np.ones(3, bool))
    flat = torch.arange(3) + (memory.added - 1) % memory.ring * 3
    after = memory._after(flat, memory.columns["flags"].take(flat), "masks", "final_mask")
    open_ended = memory.columns["flags"].take(flat) == 1
    torch.testing.assert_close(after[open_ended], (shown > 0)[open_ended])


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_masked_environment_is_learned(name):
    given = {"lr": 1e-2, "horizon": 32, "start": 64, "batch": 64, "buffer": 4000, "replay_ratio": 0.25, "gamma": 0.0}
    made = learner_on(sync(partial(Forbidding), 8), name, net={"hidden": [32]}, frames=2000, **given)
    for i in range(6):
        made.step(i / 6)
    assert evaluate(made.policy, Stepper(sync(Forbidding, 8)), 16, seed=1).returns.mean() > 4.6  # of 5


def test_actions_that_are_not_discrete_are_still_refused():
    class Wrong(gym.Env):
        observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))

        def reset(self, **given: Any) -> tuple[np.ndarray, dict]:
            super().reset(seed=given.get("seed"))
            return np.zeros(1, np.float32), {"action_mask": np.ones(2)}

    with pytest.raises(Exception, match="masks are for Discrete and MultiDiscrete"):
        learner_on(sync(Wrong, 2), "sac")
