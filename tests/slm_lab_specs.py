"""Specs in SLM-Lab's format, written for these tests from what its format is known to have."""

import json
from typing import Any


def net(**changes: Any) -> dict[str, Any]:
    """The `net` of a small spec."""
    return {
        "type": "MLPNet",
        "shared": False,
        "hid_layers": [64, 64],
        "hid_layers_activation": "tanh",
        "init_fn": "orthogonal_",
        "clip_grad_val": 0.5,
        "use_same_optim": True,
        "loss_spec": {"name": "MSELoss"},
        "optim_spec": {"name": "Adam", "lr": 6.35e-4},
        "lr_scheduler_spec": None,
        "gpu": "auto",
        **changes,
    }


def arc_net(layers: list[Any], graph: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The same of layers that are written out, as TorchArc reads them."""
    arc = {"modules": {"body": {"Sequential": layers}}} | ({} if graph is None else {"graph": graph})
    return net(type="TorchArcNet", arc=arc, **changes)


def schedule(name: str, start: float, end: float | None = None, first: int = 0, last: int = 0) -> dict[str, Any]:
    return {"name": name, "start_val": start, "end_val": end, "start_step": first, "end_step": last}


def spec(algorithm: dict[str, Any], memory: dict[str, Any], nets: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A whole spec on CartPole."""
    return {
        "agent": {"name": algorithm["name"], "algorithm": algorithm, "memory": memory, "net": nets},
        "env": {"name": "CartPole-v1", "num_envs": 4, "max_t": None, "max_frame": 200_000},
        "meta": {
            "distributed": False,
            "log_frequency": 500,
            "eval_frequency": 500,
            "rigorous_eval": 0,
            "max_session": 4,
            "max_trial": 1,
        },
        **changes,
    }


PPO = {
    "name": "PPO",
    "action_pdtype": "default",
    "action_policy": "default",
    "explore_var_spec": None,
    "gamma": 0.9769,
    "lam": 0.9112,
    "clip_eps_spec": schedule("no_decay", 0.1312, 0.1312),
    "entropy_coef_spec": schedule("no_decay", 0.0074, 0.0074),
    "val_loss_coef": 0.6049,
    "time_horizon": 256,
    "minibatch_size": 128,
    "training_epoch": 15,
}
DQN = {
    "name": "DQN",
    "action_pdtype": "Argmax",
    "action_policy": "epsilon_greedy",
    "explore_var_spec": schedule("linear_decay", 1.0, 0.1, 0, 20_000),
    "gamma": 0.99,
    "training_batch_iter": 2,
    "training_iter": 4,
    "training_frequency": 8,
    "training_start_step": 64,
}
SAC = {"name": "SoftActorCritic", "gamma": 0.99, "training_iter": 2, "training_frequency": 1, "alpha_lr": 1e-3}
REPLAY = {"name": "Replay", "batch_size": 32, "max_size": 10_000, "use_cer": False}
TARGETS = {"update_type": "replace", "update_frequency": 200}
ON_POLICY = {"name": "OnPolicyBatchReplay"}

SPECS: dict[str, dict[str, Any]] = {
    "ppo": spec(PPO, ON_POLICY, net()),
    "ppo_shared_decayed": spec(
        {**PPO, "clip_eps_spec": schedule("linear_decay", 0.2, 0.0, 10_000, 100_000), "clip_vloss": True},
        ON_POLICY,
        net(shared=True, lr_scheduler_spec={"name": "LinearToZero", "frame": 200_000}, actor_init_std=0.01),
    ),
    "ppo_recurrent": spec(PPO, ON_POLICY, net(type="RecurrentNet", fc_hid_layers=[32], cell_type="LSTM", seq_len=4)),
    "ppo_sil": spec(
        {**PPO, "name": "PPOSIL", "sil_policy_loss_coef": 0.1, "sil_val_loss_coef": 0.01, "training_iter": 4},
        {**ON_POLICY, "sil_replay_name": "Replay", "batch_size": 32, "max_size": 10_000},
        net(),
    ),
    "a2c_gae": spec(
        {
            "name": "ActorCritic",
            "gamma": 0.99,
            "lam": 0.95,
            "num_step_returns": None,
            "val_loss_coef": 0.5,
            "entropy_coef_spec": schedule("linear_decay", 0.01, 0.001, 0, 100_000),
            "training_frequency": 32,
        },
        ON_POLICY,
        net(optim_spec={"name": "RMSprop", "lr": 7e-4}),
    ),
    "a2c_nstep": spec(
        {"name": "ActorCritic", "gamma": 0.99, "lam": None, "num_step_returns": 5, "policy_loss_coef": 0.5},
        ON_POLICY,
        net(init_fn="kaiming_uniform_"),
    ),
    "reinforce": spec(
        {
            "name": "Reinforce",
            "gamma": 0.99,
            "center_return": True,
            "training_frequency": 1,
            "entropy_coef_spec": schedule("no_decay", 0.001),
        },
        {"name": "OnPolicyReplay"},
        net(hid_layers=[64], hid_layers_activation="selu"),
    ),
    "sarsa_boltzmann": spec(
        {
            "name": "SARSA",
            "gamma": 0.99,
            "action_policy": "boltzmann",
            "training_frequency": 32,
            "explore_var_spec": schedule("linear_decay", 5.0, 0.5, 0, 10_000),
        },
        ON_POLICY,
        net(init_fn=None),
    ),
    "dqn": spec(DQN, REPLAY, net(**TARGETS)),
    "vanilla_dqn": spec({**DQN, "name": "VanillaDQN"}, REPLAY, net()),
    "ddqn_per_dueling": spec(
        {**DQN, "name": "DoubleDQN"},
        {**REPLAY, "name": "PrioritizedReplay", "alpha": 0.6, "epsilon": 0.0001, "use_cer": True},
        net(type="DuelingMLPNet", update_type="polyak", update_frequency=1, polyak_coef=0.01),
    ),
    "sac": spec(SAC, REPLAY, net(update_type="polyak", update_frequency=1, polyak_coef=0.005, clip_grad_val=None)),
    "crossq": spec(
        {**SAC, "name": "CrossQ", "policy_delay": 3},
        REPLAY,
        net(optim_spec={"name": "Adam", "lr": 1e-3, "betas": [0.5, 0.999]}),
    ),
    "sil_recurrent": spec(
        {**PPO, "name": "PPOSIL", "training_iter": 4},
        {**ON_POLICY, "sil_replay_name": "Replay", "batch_size": 32, "max_size": 1e4},
        net(type="RecurrentNet", fc_hid_layers=[], rnn_hidden_size=32),
    ),
    "torch_arc": spec(
        PPO,
        ON_POLICY,
        arc_net(
            [{"LazyLinear": {"out_features": 48}}, "ReLU", {"LazyLinear": {"out_features": 24}}, "ReLU"],
            graph={"input": "x", "modules": {"body": ["x"]}, "output": "body"},
        ),
    ),
    "atari": spec(
        PPO,
        ON_POLICY,
        net(
            type="ConvNet",
            conv_hid_layers=[[32, 8, 4, 0, 1], [64, 4, 2, 0, 1], [64, 3, 1, 0, 1]],
            fc_hid_layers=[512],
            normalize=True,
        ),
        env={
            "name": "ALE/Pong-v5",
            "num_envs": 16,
            "max_t": None,
            "max_frame": 10_000_000,
            "life_loss_info": True,
        },
    ),
    "atari_arc": spec(
        {**SAC, "training_frequency": 4},
        REPLAY,
        arc_net(
            [
                {"LazyConv2d": {"out_channels": 32, "kernel_size": 8, "stride": 4}},
                {"ReLU": None},
                {"LazyConv2d": {"out_channels": 64, "kernel_size": 4, "stride": 2}},
                {"ReLU": None},
                {"LazyConv2d": {"out_channels": 64, "kernel_size": 3, "stride": 1}},
                {"ReLU": None},
                {"Flatten": None},
                {"LazyLinear": {"out_features": 512}},
                {"ReLU": None},
            ],
            normalize=True,
        ),
        env={"name": "ALE/Pong-v5", "num_envs": 16, "max_frame": 2e6},
    ),
    "mujoco": spec(
        {**PPO, "normalize_v_targets": True},
        ON_POLICY,
        net(
            log_std_init=-0.5,
            critic_optim_spec={"name": "AdamW", "lr": 1e-3},
            actor_optim_spec={"name": "AdamW", "lr": 3e-4},
        ),
        env={
            "name": "Reacher-v5",
            "num_envs": 16,
            "max_t": None,
            "max_frame": 4e6,
            "normalize_obs": True,
            "normalize_reward": True,
        },
    ),
}


def as_json(**extra: Any) -> str:
    """A file of all of them."""
    return json.dumps({**SPECS, **extra}, indent="\t")
