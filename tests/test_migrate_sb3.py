"""Models that Stable-Baselines3 really trained act alike here, evaluate alike, and are trained on."""

from copy import deepcopy
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import palestra
from palestra.control.envs.make import make_vector
from palestra.control.trainer import ControlTrainer
from palestra.errors import UsageError
from palestra.migrate.sb3 import import_model, spec_text
from palestra.spec.load import load
from palestra.spec.source import write_text

sb3 = pytest.importorskip("stable_baselines3", reason="pip install 'palestra[peers]'")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

SMALL = {"net_arch": [32, 24]}
MODELS = {
    "ppo_cartpole": ("PPO", "CartPole-v1", {"n_steps": 256, "batch_size": 64, "policy_kwargs": SMALL}, 512),
    "ppo_pendulum": ("PPO", "Pendulum-v1", {"n_steps": 256, "clip_range_vf": 0.3}, 512),
    "a2c_cartpole": ("A2C", "CartPole-v1", {"policy_kwargs": {"net_arch": {"pi": [16], "vf": [24, 8]}}}, 200),
    "dqn_cartpole": ("DQN", "CartPole-v1", {"learning_starts": 100, "target_update_interval": 40}, 300),
    "sac_pendulum": ("SAC", "Pendulum-v1", {"policy_kwargs": SMALL}, 300),
    "td3_pendulum": ("TD3", "Pendulum-v1", {"policy_kwargs": {**SMALL, "activation_fn": torch.nn.Tanh}}, 250),
}


def saved(tmp_path: Path, name: str):
    kind, env, settings, frames = MODELS[name]
    model = getattr(sb3, kind)("MlpPolicy", env, seed=0, device="cpu", **deepcopy(settings)).learn(frames)
    model.save(tmp_path / name)
    return model, tmp_path / f"{name}.zip", env


def learner(path: Path, env: str, **fields) -> ControlTrainer:
    data, _ = import_model(path, env)
    spec = load({"name": "imported", **data}, overrides={"train.frames": 2000, **fields}).spec
    trainer = ControlTrainer(spec, 0, None, make_vector, compile=False)
    trainer.begin(None)
    return trainer


@pytest.mark.parametrize("name", MODELS)
def test_imported_model_acts_as_in_stable_baselines3_and_learns_on(tmp_path, name):
    model, path, env = saved(tmp_path, name)
    trainer = learner(path, env)
    space = model.observation_space
    obs = np.clip(np.random.default_rng(0).normal(0, 2, (64, *space.shape)), space.low, space.high).astype(np.float32)
    expected, _ = model.predict(obs, deterministic=True)
    np.testing.assert_allclose(trainer.policy.act(obs), expected, atol=1e-5)
    before = trainer.algorithm.policy.state()["weights"]
    for _ in range(3):
        trainer.improve(trainer.episodes.frame / 2000)
    after = trainer.algorithm.policy.state()["weights"]
    assert any(not torch.equal(before[weight], after[weight]) for weight in before)
    trainer.env.close()


def test_imported_distributions_values_and_targets_are_those_of_stable_baselines3(tmp_path):
    model, path, env = saved(tmp_path, "ppo_pendulum")
    trainer, obs = learner(path, env), torch.randn(16, 3)
    distribution, values = trainer.algorithm.net(obs)
    theirs = model.policy.get_distribution(obs).distribution
    # In the environment's units, twice ours on Pendulum: the density of an action is halved.
    actions = theirs.sample()
    expected = theirs.log_prob(actions).sum(1) + np.log(2)
    torch.testing.assert_close(distribution.log_prob(actions / 2), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, model.policy.predict_values(obs).squeeze(1), atol=1e-5, rtol=1e-5)

    model, path, env = saved(tmp_path, "sac_pendulum")
    algorithm, actions = learner(path, env).algorithm, torch.rand(16, 1) * 2 - 1
    for vector, critic in (
        (algorithm.learned.critics.vector, model.critic),
        (algorithm.learned.target, model.critic_target),
    ):
        ours = algorithm.critics(vector)(obs, actions)
        torch.testing.assert_close(ours, torch.cat(critic(obs, actions), dim=1).T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(algorithm.learned.alpha.vector, model.log_ent_coef.detach())

    model, path, env = saved(tmp_path, "dqn_cartpole")
    algorithm, obs = learner(path, env).algorithm, torch.randn(16, 4)
    torch.testing.assert_close(algorithm.net.q(obs), model.q_net(obs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(algorithm.target.net.q(obs), model.q_net_target(obs), atol=1e-5, rtol=1e-5)
    assert not torch.equal(algorithm.target.vector, algorithm.flat.vector)


def test_images_through_the_cnn_act_alike(tmp_path):
    class Screen(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (3, 40, 40), np.uint8)
        action_space = gym.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.observation_space.sample(), {}

        def step(self, action):
            return self.observation_space.sample(), 0.0, False, False, {}

    obs = np.random.default_rng(0).integers(256, size=(4, 3, 40, 40)).astype(np.uint8)
    for kind, settings in (("PPO", {"n_steps": 8, "batch_size": 8}), ("DQN", {"buffer_size": 100})):
        model = getattr(sb3, kind)("CnnPolicy", Screen(), seed=0, device="cpu", **settings)
        model.save(tmp_path / kind)
        data, _ = import_model(tmp_path / f"{kind}.zip", "X")
        spec = load({"name": "x", **data, "train": {"frames": 100}}, overrides={"env.id": "object:Screen"}).spec
        trainer = ControlTrainer(spec, 0, Screen, make_vector, compile=False)
        trainer.begin(None)
        if kind == "PPO":
            theirs = model.policy.get_distribution(torch.from_numpy(obs)).distribution.logits
            ours = trainer.algorithm.net.policy(torch.from_numpy(obs)).logprobs
        else:
            theirs, ours = model.q_net(torch.from_numpy(obs)), trainer.algorithm.net.q(torch.from_numpy(obs))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        trainer.env.close()


def returns(env: str, act, seeds: range) -> np.ndarray:
    """The return of one episode of each seed."""
    made, found = gym.make(env), []
    for seed in seeds:
        obs, total, over = made.reset(seed=seed)[0], 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = made.step(act(obs[None])[0])
            total, over = total + float(reward), terminated or truncated
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("name", ["ppo_cartpole", "dqn_cartpole", "sac_pendulum"])
def test_imported_model_evaluates_within_the_interval_of_stable_baselines3_over_the_same_seeds(tmp_path, name):
    model, path, env = saved(tmp_path, name)
    theirs = returns(env, lambda obs: model.predict(obs, deterministic=True)[0], range(20))
    trainer = learner(path, env)
    ours = returns(env, trainer.policy.act, range(20))
    interval = 1.96 * theirs.std(ddof=1) / np.sqrt(20)
    print(f"{name}: {theirs.mean():.1f} ± {interval:.1f} by Stable-Baselines3, {ours.mean():.1f} here")
    assert interval > 0
    assert ours.mean() == pytest.approx(theirs.mean(), abs=interval)
    trainer.env.close()


def test_run_from_a_zip_first_evaluates_it_within_its_own_interval_and_resumes(tmp_path):
    from stable_baselines3.common.evaluation import evaluate_policy

    model, path, env = saved(tmp_path, "ppo_cartpole")
    mean, std = evaluate_policy(model, sb3.common.env_util.make_vec_env(env, seed=1), 100)
    data, notes = import_model(path, env)
    (tmp_path / "it.yaml").write_text(spec_text(path, data, notes))
    run = palestra.run(tmp_path / "it.yaml", root=tmp_path, quiet=True, eval__episodes=100, train__frames=512)
    first = run.metrics(0)[0]
    assert first["frame"] == 0
    error = 3 * (std + first["eval/return_std"]) / np.sqrt(100)
    assert first["eval/return"] == pytest.approx(mean, abs=error)
    again = palestra.run(resume=run, allow=["train.frames"], quiet=True, root=tmp_path, train__frames=1024)
    assert again.metrics(0)[-1]["frame"] == 1024


def test_zip_that_does_not_fit_is_refused_with_what_to_do(tmp_path):
    _, path, env = saved(tmp_path, "dqn_cartpole")
    with pytest.raises(UsageError, match=r"trunk\.mlp\.layers\.0\.weight has the shape \(64, 4\) there and \(32, 4\)"):
        learner(path, env, **{"net.hidden": [32, 32]})
    with pytest.raises(UsageError, match=r"is a model of dqn, and `algorithm\.name` is ppo"):
        learner(path, env, algorithm={"name": "ppo", "minibatch": 64})
    (tmp_path / "no.zip").write_text(write_text({"a": 1}))
    with pytest.raises(UsageError, match="is not a model of Stable-Baselines3"):
        import_model(tmp_path / "no.zip", env)
    model = sb3.PPO("MlpPolicy", "Pendulum-v1", use_sde=True, n_steps=8, batch_size=8)
    model.save(tmp_path / "sde")
    with pytest.raises(UsageError, match="use_sde is not supported"):
        import_model(tmp_path / "sde.zip", "Pendulum-v1")
    model = sb3.SAC("MlpPolicy", "Pendulum-v1", policy_kwargs={"n_critics": 1, "net_arch": [8]}, buffer_size=200)
    model.save(tmp_path / "single")
    with pytest.raises(UsageError, match="expected two critics"):
        learner(tmp_path / "single.zip", "Pendulum-v1")
