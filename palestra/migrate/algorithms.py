"""SLM-Lab's `algorithm` and `memory` blocks as our `algorithm`."""

from dataclasses import dataclass
from typing import Any

from palestra.errors import UsageError
from palestra.migrate.blocks import Block
from palestra.migrate.nets import optimiser_fields, target_fields
from palestra.migrate.schedules import schedule

NAMES = {
    "Reinforce": "reinforce",
    "SARSA": "sarsa",
    "VanillaDQN": "dqn",
    "DQNBase": "dqn",
    "DQN": "dqn",
    "DoubleDQN": "dqn",
    "ActorCritic": "a2c",
    "SIL": "a2c",
    "PPO": "ppo",
    "PPOSIL": "ppo",
    "SoftActorCritic": "sac",
    "CrossQ": "crossq",
}
_COMMON = "name action_pdtype action_policy explore_var_spec gamma training_frequency "
_ACTOR = _COMMON + "lam entropy_coef_spec policy_loss_coef val_loss_coef normalize_v_targets "
_REPLAY = _COMMON + "training_batch_iter training_iter training_start_step "
_IMITATION = " sil_policy_loss_coef sil_val_loss_coef training_batch_iter training_iter"
_PPO = _ACTOR + ("clip_eps_spec minibatch_size time_horizon training_epoch clip_vloss symlog normalize_advantages")
_SAC = _REPLAY + (
    "policy_delay entropy_penalty_coef symlog log_alpha_min log_alpha_max alpha_lr fixed_alpha alpha_anneal_frames "
    "spectral_norm target_entropy entropy_anneal"
)
KEYS = {
    name: frozenset(keys.split())
    for name, keys in {
        "Reinforce": _COMMON + "center_return entropy_coef_spec policy_loss_coef",
        "SARSA": _COMMON,
        "VanillaDQN": _REPLAY,
        "DQNBase": _REPLAY,
        "DQN": _REPLAY,
        "DoubleDQN": _REPLAY,
        "ActorCritic": _ACTOR + "num_step_returns",
        "SIL": _ACTOR + "num_step_returns" + _IMITATION,
        "PPO": _PPO,
        "PPOSIL": _PPO + _IMITATION,
        "SoftActorCritic": _SAC,
        "CrossQ": _SAC,
    }.items()
}
MEMORY_KEYS = frozenset(
    {"name", "batch_size", "max_size", "use_cer", "alpha", "epsilon", "cross_entropy", "sil_replay_name"}
)
EPISODES_TO_STEPS = 128  # vector steps taken for SLM-Lab's episodes between updates


@dataclass(frozen=True)
class Setting:
    """What an algorithm's fields depend on besides its own block."""

    memory: Block
    net: Block
    num_envs: int
    frames: int


def algorithm_fields(block: Block, setting: Setting) -> dict[str, Any]:
    """The fields of our `algorithm`, `name` first."""
    theirs = block.take("name")
    if theirs not in NAMES:
        known = ", ".join(NAMES)
        raise UsageError(f"{block.path}.name: {theirs!r} has no counterpart here. There are ones for: {known}")
    block.known = KEYS[theirs]
    ours = NAMES[theirs]
    found: dict[str, Any] = {"name": ours}
    if "gamma" in block:
        found["gamma"] = block.take("gamma")
    found |= optimiser_fields(setting.net, ours, setting.frames)
    if ours in ("dqn", "sac", "crossq"):
        found |= _replay(block, setting, ours)
    if ours in ("dqn", "sarsa"):
        found |= _exploration(block, setting.frames)
    elif ours in ("reinforce", "a2c", "ppo"):
        found |= _on_policy(block, setting, ours)
    if ours == "dqn":
        found |= _dqn(block, setting, theirs, found["replay_ratio"])
    if ours == "sarsa":
        found["horizon"] = _vector_steps(block, setting, 32)
    if ours in ("sac", "crossq"):
        found |= _soft(block, setting, ours, found["replay_ratio"])
    if theirs in ("SIL", "PPOSIL"):
        found["self_imitation"] = _self_imitation(block, setting.memory)
    block.read |= {"explore_var_spec", "action_policy", "action_pdtype"}
    setting.memory.read |= {"name", "sil_replay_name"} | ({"batch_size", "max_size"} if ours in ON_POLICY else set())
    setting.memory.wanted("use_cer", False, "combined experience replay has no counterpart here")
    return found


ON_POLICY = ("reinforce", "sarsa", "a2c", "ppo")


def _on_policy(block: Block, setting: Setting, ours: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    entropy = schedule(block, "entropy_coef_spec", setting.frames)
    if entropy is not None:
        found["entropy"] = entropy
    pdtype = block.take("action_pdtype", "default")
    if pdtype == "Beta":
        found["distribution"] = "beta"
    elif pdtype not in ("default", "Normal", "Categorical", "MultiCategorical", "Bernoulli"):
        block.note("action_pdtype", f"{pdtype} has no counterpart here; the usual distribution was taken")
    block.wanted("policy_loss_coef", 1, "the policy loss has weight 1 here: scale the other weights instead")
    if ours == "reinforce":
        # SLM-Lab standardises whatever this says.
        block.take("center_return")
        found["normalise_returns"] = True
        found["horizon"] = _vector_steps(block, setting, EPISODES_TO_STEPS)
        return found
    found["value_coef"] = block.take("val_loss_coef", 1.0)
    block.wanted("normalize_v_targets", False, "value targets are not normalised here; env.normalise_reward may help")
    if ours == "a2c":
        steps = block.take("num_step_returns")
        found["lam"] = block.take("lam")
        found["horizon"] = steps or _vector_steps(block, setting, 16)
        block.read.add("training_frequency")
        return found
    return found | _ppo(block, setting)


def _ppo(block: Block, setting: Setting) -> dict[str, Any]:
    found: dict[str, Any] = {"lam": block.take("lam", 0.95), "epochs": block.take("training_epoch", 1)}
    clip = schedule(block, "clip_eps_spec", setting.frames)
    if clip is not None:
        found["clip"] = clip
    horizon = block.take("time_horizon") or _vector_steps(block, setting, 128)
    rows, wanted = horizon * setting.num_envs, block.take("minibatch_size", 4)
    whole = horizon if setting.net.data.get("type") == "RecurrentNet" else 1  # which learns from whole sequences
    sizes = [size for size in range(whole, rows + 1, whole) if rows % size == 0]
    size = min(sizes, key=lambda one: (abs(one - wanted), one))
    if size != wanted:
        parts = f"{horizon} × {setting.num_envs}" + (" into whole sequences" if whole > 1 else "")
        block.note("minibatch_size", f"{wanted} does not divide {parts}; {size} was taken")
    found |= {"horizon": horizon, "minibatch": size}
    if block.take("clip_vloss", False):
        found["clip_value"] = clip["start"] if isinstance(clip, dict) else clip
    how = block.take("normalize_advantages", "standardize")
    found["normalise_advantages"] = bool(how)
    if how not in (True, False, "standardize"):
        block.note("normalize_advantages", f"{how} has no counterpart here; advantages are standardised")
    block.wanted("symlog", False, "values are not squashed by symlog here")
    block.read.add("training_frequency")
    return found


def _replay(block: Block, setting: Setting, ours: str) -> dict[str, Any]:
    """What learns from a memory: SLM-Lab counts vector steps between updates and gradient steps at each."""
    memory, n = setting.memory, setting.num_envs
    every = block.take("training_frequency", 1)
    iterations = block.take("training_iter", n if ours != "dqn" else 1) * block.take("training_batch_iter", 1)
    batch = memory.take("batch_size", 32)
    start = block.take("training_start_step", batch if ours == "dqn" else max(1000, batch))
    found = {
        "batch": batch,
        "start": max(1, start),
        "update_every": every,
        "replay_ratio": iterations / (n * every),
        "horizon": every * max(1, 256 // every),
    }
    found["buffer"] = max(memory.take("max_size", 100_000), found["start"], 2 * n)
    return found


def _dqn(block: Block, setting: Setting, theirs: str, ratio: float) -> dict[str, Any]:
    net, memory = setting.net, setting.memory
    if theirs == "VanillaDQN":
        found: dict[str, Any] = {"double": False, "tau": 1.0}
        net.read |= {"update_type", "update_frequency", "polyak_coef"}
    else:
        found = {"double": True, **target_fields(net, ratio)}
        if theirs != "DoubleDQN":
            block.note("name", "SLM-Lab's DQN computes the targets of double DQN, and so does the imported spec")
    if "Dueling" in str(net.data.get("type")):
        found["dueling"] = True
    if memory.data.get("name") == "PrioritizedReplay":
        alpha, eps = memory.take("alpha", 0.6), memory.take("epsilon", 1e-6)
        found["prioritised"] = {"alpha": alpha, "eps": max(eps, 1e-12)}
        memory.note("name", "SLM-Lab has no importance weights; here beta goes from 0.4 to 1")
    return found


def _soft(block: Block, setting: Setting, ours: str, ratio: float) -> dict[str, Any]:
    found: dict[str, Any] = target_fields(setting.net, ratio) if ours == "sac" else {}
    if "target_every" in found:
        setting.net.note("update_type", "the targets of SAC follow by tau here; 0.005 was taken")
        found = {}
    setting.net.read |= {"update_type", "update_frequency", "polyak_coef"}
    found["policy_delay"] = block.take("policy_delay", 1)
    if "fixed_alpha" in block:
        found["alpha"] = block.take("fixed_alpha")
    target = block.take("target_entropy", "auto")
    if target != "auto":
        found["target_entropy"] = target
    if "alpha_lr" in block:
        found["alpha_lr"] = block.take("alpha_lr")
    block.read |= {"log_alpha_min", "log_alpha_max"}  # bounds that a tuned weight stays within by itself
    return found


def _exploration(block: Block, frames: int) -> dict[str, Any]:
    policy, value = block.take("action_policy", "epsilon_greedy"), schedule(block, "explore_var_spec", frames)
    if policy == "boltzmann":
        return {"temperature": 1.0 if value is None else value}
    if policy not in ("epsilon_greedy", "default"):
        block.note("action_policy", f"{policy} has no counterpart here; epsilon_greedy was taken")
    return {} if value is None else {"epsilon": value}


def _vector_steps(block: Block, setting: Setting, default: int) -> int:
    """Vector steps between updates; SLM-Lab's episodic memory counts episodes, whose length nobody knows."""
    count = block.take("training_frequency")
    if setting.memory.data.get("name") in ("OnPolicyReplay", "OnPolicyCrossEntropy"):
        block.note(
            "training_frequency",
            f"counts episodes in SLM-Lab; here the horizon counts transitions, {default} were taken",
        )
        return default
    return default if count is None else count


def _self_imitation(block: Block, memory: Block) -> dict[str, Any]:
    found = {
        "buffer": memory.take("max_size", 100_000),
        "batch": memory.take("batch_size", 512),
        "updates": block.take("training_iter", 1) * block.take("training_batch_iter", 1),
        "coef": block.take("sil_policy_loss_coef", 0.1),
        "value_coef": block.take("sil_val_loss_coef", 0.01),
    }
    if "alpha" in memory:
        found["alpha"] = memory.take("alpha")
    memory.read.add("epsilon")
    return found
