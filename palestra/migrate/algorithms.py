"""SLM-Lab's `algorithm` and `memory` blocks as our `algorithm`."""

from dataclasses import dataclass
from math import gcd
from typing import Any

from palestra.errors import UsageError
from palestra.migrate.blocks import ForeignBlock, schedule
from palestra.migrate.nets import dqn_target_fields, optimizer_fields, sac_target_fields

_COMMON = "name action_pdtype action_policy explore_var_spec gamma training_frequency "
_ACTOR = _COMMON + "lam entropy_coef_spec policy_loss_coef val_loss_coef normalize_v_targets "
_A2C = _ACTOR + "num_step_returns"
_REPLAY = _COMMON + "training_iter training_start_step "
_DQN = _REPLAY + "training_batch_iter"
_IMITATION = " sil_policy_loss_coef sil_val_loss_coef training_batch_iter training_iter"
_PPO = _ACTOR + "clip_eps_spec minibatch_size time_horizon training_epoch clip_vloss symlog normalize_advantages"
_SAC = _REPLAY + (
    "policy_delay entropy_penalty_coef symlog log_alpha_min log_alpha_max alpha_lr fixed_alpha alpha_anneal_frames "
    "spectral_norm target_entropy entropy_anneal"
)
# By SLM-Lab's name: ours, and the keys that it reads.
ALGORITHMS = {
    "Reinforce": ("reinforce", _COMMON + "center_return entropy_coef_spec policy_loss_coef"),
    "SARSA": ("sarsa", _COMMON),
    "VanillaDQN": ("dqn", _DQN),
    "DQNBase": ("dqn", _DQN),
    "DQN": ("dqn", _DQN),
    "DoubleDQN": ("dqn", _DQN),
    "ActorCritic": ("a2c", _A2C),
    "SIL": ("a2c", _A2C + _IMITATION),
    "PPO": ("ppo", _PPO),
    "PPOSIL": ("ppo", _PPO + _IMITATION),
    "SoftActorCritic": ("sac", _SAC),
    "CrossQ": ("crossq", _SAC),
}
MEMORY_KEYS = frozenset(
    {"name", "batch_size", "max_size", "use_cer", "alpha", "epsilon", "cross_entropy", "sil_replay_name"}
)
EPISODIC = ("OnPolicyReplay", "OnPolicyCrossEntropy")
EPISODES_TO_STEPS = 128  # vector steps taken for SLM-Lab's episodes between updates


@dataclass(frozen=True)
class Setting:
    """What an algorithm's fields depend on besides its own block."""

    memory: ForeignBlock
    net: ForeignBlock
    num_envs: int
    frames: int


def algorithm_fields(block: ForeignBlock, setting: Setting) -> dict[str, Any]:
    """The fields of our `algorithm`, `name` first."""
    theirs = block.take("name")
    if theirs not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise UsageError(f"{block.path}.name: {theirs!r} has no counterpart here. There are ones for: {known}")
    ours, keys = ALGORITHMS[theirs]
    block.known = frozenset(keys.split())
    fields: dict[str, Any] = {"name": ours} | block.renamed(gamma="gamma")
    fields |= optimizer_fields(setting.net, ours, setting.frames)
    if ours in ("dqn", "sac", "crossq"):
        fields |= _replay(block, setting, ours)
    if ours in ("dqn", "sarsa"):
        fields |= _exploration(block, setting.frames)
    elif ours in ("reinforce", "a2c", "ppo"):
        fields |= _on_policy(block, setting, ours)
    if ours == "dqn":
        fields |= _dqn(block, setting, theirs, fields["replay_ratio"] * setting.num_envs)
    if ours == "sarsa":
        fields["horizon"] = _vector_steps(block, setting, 32)
    if ours in ("sac", "crossq"):
        fields |= _soft(block, setting, ours)
    if theirs in ("SIL", "PPOSIL"):
        fields["self_imitation"] = _self_imitation(block, setting.memory)
    pdtype = block.take("action_pdtype", "default")
    if pdtype == "Beta" and ours in ("reinforce", "a2c", "ppo"):
        fields["distribution"] = "beta"
    elif pdtype not in ("default", "Normal", "Categorical", "MultiCategorical", "Bernoulli", "Argmax"):
        block.note("action_pdtype", f"{pdtype} has no counterpart here; the usual distribution was taken")
    block.read |= {"explore_var_spec", "action_policy"}
    setting.memory.read |= {"name", "sil_replay_name"} | ({"batch_size", "max_size"} if ours in ON_POLICY else set())
    setting.memory.wanted("use_cer", False, "combined experience replay has no counterpart here")
    return fields


ON_POLICY = ("reinforce", "sarsa", "a2c", "ppo")


def _on_policy(block: ForeignBlock, setting: Setting, ours: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    entropy = schedule(block, "entropy_coef_spec", setting.frames)
    if entropy is not None:
        fields["entropy"] = entropy
    block.wanted("policy_loss_coef", 1, "the policy loss has weight 1 here: scale the other weights instead")
    if ours == "reinforce":
        # SLM-Lab standardizes whatever this says.
        block.take("center_return")
        fields["normalize_returns"] = True
        fields["horizon"] = _vector_steps(block, setting, EPISODES_TO_STEPS)
        return fields
    fields["value_coef"] = block.take("val_loss_coef", 1.0)
    block.wanted("normalize_v_targets", False, "value targets are not normalized here; env.normalize_reward may help")
    if ours == "a2c":
        steps, fields["lam"] = block.count("num_step_returns"), block.take("lam")
        if fields["lam"] is None and steps and setting.memory.data.get("name") not in EPISODIC:
            fields["horizon"] = steps  # SLM-Lab overrides its training_frequency with it
            block.read.add("training_frequency")
            return fields
        fields["horizon"] = _vector_steps(block, setting, 16)
        if steps:
            what = "with lam it is ignored" if fields["lam"] is not None else "returns go up to the horizon here"
            block.note("num_step_returns", f"{what}, and {fields['horizon']} vector steps are between updates")
        elif fields["lam"] is None:
            block.note("lam", "without it SLM-Lab takes Monte Carlo returns; here the value at the horizon bootstraps")
        return fields
    return fields | _ppo(block, setting)


def _ppo(block: ForeignBlock, setting: Setting) -> dict[str, Any]:
    fields: dict[str, Any] = {"lam": block.take("lam", 0.95), "epochs": block.count("training_epoch", 1)}
    clip = schedule(block, "clip_eps_spec", setting.frames)
    if clip is not None:
        fields["clip"] = clip
    horizon = block.count("time_horizon") or _vector_steps(block, setting, 128)
    rows, wanted = horizon * setting.num_envs, block.count("minibatch_size", 4)
    whole = horizon if setting.net.data.get("type") == "RecurrentNet" else 1  # which learns from whole sequences
    sizes = [size for size in range(whole, rows + 1, whole) if rows % size == 0 and (size > 1 or rows == 1)]
    size = min(sizes, key=lambda size: (abs(size - wanted), size))
    if size != wanted:
        parts = f"{horizon} × {setting.num_envs}" + (" into whole sequences" if whole > 1 else "")
        block.note("minibatch_size", f"{wanted} does not divide {parts}; {size} was taken")
    fields |= {"horizon": horizon, "minibatch": size}
    if block.take("clip_vloss", False):
        fields["clip_value"] = clip["start"] if isinstance(clip, dict) else clip
    how = block.take("normalize_advantages", "standardize")
    fields["normalize_advantages"] = bool(how)
    if how not in (True, False, "standardize"):
        block.note("normalize_advantages", f"{how} has no counterpart here; advantages are standardized")
    block.wanted("symlog", False, "values are not squashed by symlog here")
    block.read.add("training_frequency")
    return fields


def _replay(block: ForeignBlock, setting: Setting, ours: str) -> dict[str, Any]:
    """Off-policy fields: SLM-Lab counts transitions between updates, but updates at most once per vector step."""
    memory, n = setting.memory, setting.num_envs
    frequency = max(1, block.count("training_frequency", 1))
    iterations = block.count("training_iter", n if ours != "dqn" else 1)
    iterations *= block.count("training_batch_iter", 1) if ours == "dqn" else 1
    frames = max(frequency, n)  # between updates
    every = frames // n
    if frames % n:
        every = frames // gcd(frames, n * iterations)
        how = f"{n * iterations * every // frames} updates every {every} vector steps keep their rate"
        block.note("training_frequency", f"{frames} transitions are not whole vector steps of {n}; {how}")
    batch = memory.count("batch_size", 32)
    start = max(1, block.count("training_start_step", batch if ours == "dqn" else max(1000, batch)))
    size = memory.count("max_size", 100_000)
    buffer = max(size, start, 2 * n)
    if buffer != size:
        memory.note("max_size", f"{size} are fewer than are collected before the first update; {buffer} was taken")
    return {
        "batch": batch,
        "start": start,
        "update_every": every,
        "replay_ratio": iterations / frames,
        "horizon": every * max(1, 256 // every),
        "buffer": buffer,
    }


def _dqn(block: ForeignBlock, setting: Setting, theirs: str, updates: float) -> dict[str, Any]:
    net, memory = setting.net, setting.memory
    if theirs == "VanillaDQN":
        fields: dict[str, Any] = {"double": False, "tau": 1.0}
        net.read |= {"update_type", "update_frequency", "polyak_coef"}
    else:
        fields = {"double": True, **dqn_target_fields(net, setting.num_envs, updates, setting.frames)}
        if theirs != "DoubleDQN":
            block.note("name", "SLM-Lab's DQN computes the targets of double DQN, and so does the imported spec")
    if "Dueling" in str(net.data.get("type")):
        fields["dueling"] = True
    if memory.data.get("name") == "PrioritizedReplay":
        alpha, eps = memory.take("alpha", 0.6), memory.take("epsilon", 1e-6)
        fields["prioritized"] = {"alpha": alpha, "eps": max(eps, 1e-12)}
        memory.note("name", "SLM-Lab has no importance weights; here beta goes from 0.4 to 1")
    return fields


def _soft(block: ForeignBlock, setting: Setting, ours: str) -> dict[str, Any]:
    fields: dict[str, Any] = sac_target_fields(setting.net, setting.num_envs) if ours == "sac" else {}
    setting.net.read |= {"update_type", "update_frequency", "polyak_coef"}
    if setting.memory.data.get("name") == "PrioritizedReplay":
        setting.memory.note("name", f"{ours} samples uniformly here; priorities were left out")
        setting.memory.read |= {"alpha", "epsilon"}
    fields["policy_delay"] = block.count("policy_delay", 1)
    fields |= block.renamed(fixed_alpha="alpha", alpha_lr="alpha_lr")
    target = block.take("target_entropy", "auto")
    if target != "auto":
        fields["target_entropy"] = target
    for key, usual in (("log_alpha_min", -5), ("log_alpha_max", 2)):
        block.wanted(key, usual, "the entropy's weight is not bounded here")
    return fields


def _exploration(block: ForeignBlock, frames: int) -> dict[str, Any]:
    policy, value = block.take("action_policy", "epsilon_greedy"), schedule(block, "explore_var_spec", frames)
    if policy == "boltzmann":
        return {"temperature": 1.0 if value is None else value}
    if policy not in ("epsilon_greedy", "default"):
        block.note("action_policy", f"{policy} has no counterpart here; epsilon_greedy was taken")
    return {} if value is None else {"epsilon": value}


def _vector_steps(block: ForeignBlock, setting: Setting, default: int) -> int:
    """Vector steps between updates; SLM-Lab's episodic memory counts episodes, whose length is unknown."""
    count = block.count("training_frequency")
    if setting.memory.data.get("name") in EPISODIC:
        here = f"here the horizon counts transitions, {default} were taken"
        block.note("training_frequency", f"counts episodes in SLM-Lab; {here}")
        return default
    return default if count is None else count


def _self_imitation(block: ForeignBlock, memory: ForeignBlock) -> dict[str, Any]:
    memory.read.add("epsilon")
    return {
        "buffer": memory.count("max_size", 100_000),
        "batch": memory.count("batch_size", 512),
        "updates": block.count("training_iter", 1) * block.count("training_batch_iter", 1),
        "coef": block.take("sil_policy_loss_coef", 0.1),
        "value_coef": block.take("sil_val_loss_coef", 0.01),
        **memory.renamed(alpha="alpha"),
    }
