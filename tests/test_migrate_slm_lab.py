"""SLM-Lab's specs as ours: valid, with the same numbers, and with a word on every key that did not come along."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from slm_lab_specs import PPO, SPECS, as_json, net, schedule, spec

from palestra.errors import UsageError
from palestra.migrate.slm_lab import VARIABLE, Imported, convert, import_spec
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load
from palestra.spec.schedule import Schedule
from palestra.spec.source import read_text


def imported(name: str) -> tuple[dict[str, Any], list[str]]:
    found = convert(copy.deepcopy(SPECS[name]), name)
    return found.data, found.notes


def loaded(name: str) -> ControlSpec:
    made = load(imported(name)[0]).spec
    assert isinstance(made, ControlSpec)
    return made


def changed(path: str, value: Any, name: str = "ppo") -> dict[str, Any]:
    """A spec with one value set, by dotted path."""
    data = copy.deepcopy(SPECS[name])
    *outer, last = path.split(".")
    here = data
    for part in outer:
        here = here[part]
    here[last] = value
    return data


@pytest.mark.parametrize("name", SPECS)
def test_import_any_algorithm_gives_a_file_that_loads(tmp_path, name):
    (tmp_path / "slm.json").write_text(as_json())
    found = import_spec(tmp_path / "slm.json", name)
    (tmp_path / "ours.yaml").write_text(found.to_yaml("slm.json"))
    assert load(tmp_path / "ours.yaml").spec == load(found.data).spec


def test_import_ppo_cartpole_has_the_numbers_of_the_shipped_spec():
    ours, shipped = loaded("ppo"), load("examples/control/ppo_cartpole.yaml").spec
    assert isinstance(shipped, ControlSpec)
    assert ours.algorithm.adam_eps == 1e-8  # torch's, which SLM-Lab leaves as it is
    assert ours.algorithm == shipped.algorithm.model_copy(update={"adam_eps": 1e-8})
    assert ours.net == shipped.net
    assert ours.train == shipped.train
    assert (ours.env, ours.seeds) == (shipped.env, shipped.seeds)
    assert imported("ppo")[1] == []  # nothing was lost


def test_import_schedules_in_frames_become_fractions_of_the_run():
    ours = loaded("ppo_shared_decayed").algorithm
    assert ours.clip == Schedule(shape="linear", start=0.2, end=0.0, begin=0.05, finish=0.5)
    assert ours.lr == Schedule(shape="linear", start=6.35e-4, end=0.0)
    assert ours.clip_value == 0.2
    assert loaded("sarsa_boltzmann").algorithm.temperature == Schedule(shape="linear", start=5.0, end=0.5, finish=0.05)


def test_import_schedule_that_ends_after_the_run_is_cut_off_on_its_line():
    data = changed("agent.algorithm.entropy_coef_spec", schedule("linear_decay", 1.0, 0.0, 0, 400_000))
    assert convert(data, "x").data["algorithm"]["entropy"] == {"shape": "linear", "start": 1.0, "end": 0.5}


def test_import_replay_keeps_gradient_steps_for_each_frame():
    """Every 8 transitions, so every 2 vector steps of 4 environments, 4 batches of 2 updates each."""
    ours = loaded("dqn")
    assert ours.algorithm.replay_ratio == 1.0
    assert ours.algorithm.updates_at_once(4) == 8
    assert (ours.algorithm.update_every, ours.algorithm.start, ours.algorithm.batch) == (2, 64, 32)
    assert ours.algorithm.target_every == 200  # of 200 frames
    assert ours.algorithm.buffer == 10_000


def slm_lab_updates(frequency: int, num_envs: int, iterations: int, start: int, size: int, frames: int) -> int:
    """Gradient steps as SLM-Lab's replay memory and training loop count them.

    Each transition is stored by itself; one past `start` at a multiple of the frequency asks for training, which is
    done once all of the vector step are stored.
    """
    updates, seen = 0, 0
    for _ in range(frames // num_envs):
        asked = False
        for _ in range(num_envs):
            seen += 1
            asked |= seen > start and (seen - 1) % size % frequency == 0
        updates += iterations if asked else 0
    return updates


def our_updates(ours: ControlSpec, frames: int) -> int:
    """Gradient steps as our loop counts them: every `update_every` vector steps, from `start` frames on."""
    algorithm, n = ours.algorithm, ours.env.num_envs
    due = [t for t in range(1, frames // n + 1) if t % algorithm.update_every == 0 and t * n >= algorithm.start]
    return len(due) * algorithm.updates_at_once(n)


@given(
    frequency=st.integers(1, 40),
    num_envs=st.sampled_from([1, 2, 4, 8, 16]),
    iterations=st.integers(1, 8),
    name=st.sampled_from(["dqn", "sac", "crossq"]),
)
def test_import_any_replay_updates_as_often_as_slm_lab(frequency, num_envs, iterations, name):
    data = changed("agent.algorithm.training_frequency", frequency, name)
    data["env"]["num_envs"] = num_envs
    data["agent"]["algorithm"] |= {"training_iter": iterations, "training_batch_iter": 1, "training_start_step": 100}
    ours = load(convert(data, "x").data).spec
    assert isinstance(ours, ControlSpec)
    frames, size = 8000, 10_000
    theirs = slm_lab_updates(frequency, num_envs, iterations, 100, size, frames)
    batches = frames * iterations / max(frequency, num_envs)
    # The first and the last training may fall on either side of an edge.
    once = max(iterations, ours.algorithm.updates_at_once(num_envs))
    assert abs(our_updates(ours, frames) - theirs) <= 2 * once
    assert theirs == pytest.approx(batches * (1 - 100 / frames), abs=2 * iterations)


def test_import_sixteen_environments_train_at_every_vector_step():
    """4 of 16 transitions of a vector step ask for training, and it is done once: 2 updates for 16 frames."""
    ours = loaded("atari_arc").algorithm
    assert (ours.update_every, ours.replay_ratio) == (1, 2 / 16)
    assert slm_lab_updates(4, 16, 2, 0, 1000, 1600) == 200


def test_import_replay_with_a_frequency_between_vector_steps_keeps_the_rate_and_says_so():
    found = convert(changed("agent.algorithm.training_frequency", 6, "sac"), "x")
    assert (found.data["algorithm"]["update_every"], found.data["algorithm"]["replay_ratio"]) == (3, 2 / 6)
    assert any("training_frequency: 6 transitions" in note for note in found.notes)


def test_import_target_of_dqn_moves_as_far_for_each_frame():
    """SLM-Lab moves it once a vector step, here it is moved at each of 4 gradient steps."""
    tau = loaded("ddqn_per_dueling").algorithm.tau
    assert (1 - tau) ** 4 == pytest.approx(0.99)
    assert any("polyak_coef" in note for note in imported("ddqn_per_dueling")[1])
    plain = changed("agent.net.update_frequency", 1, "dqn")
    assert convert(plain, "x").data["algorithm"]["target_every"] == 4  # a vector step
    del plain["agent"]["net"]["update_type"]  # which is "replace" where it is not given
    assert convert(plain, "x").data["algorithm"]["target_every"] == 4
    frozen = changed("agent.net.polyak_coef", 0, "ddqn_per_dueling")
    assert convert(frozen, "x").data["algorithm"]["target_every"] > 200_000
    with pytest.raises(UsageError, match=r"algorithm\.tau: expected a number above 0"):
        convert(changed("agent.net.polyak_coef", 0, "sac"), "x")


def test_import_of_atari_clips_rewards_and_keeps_its_relu():
    for name in ("atari", "atari_arc"):
        assert loaded(name).env.clip_reward == 1.0
        assert loaded(name).net.trunk == "nature"
    assert (loaded("atari_arc").net.activation, loaded("atari_arc").net.hidden) == ("relu", [512])
    assert not any("arc" in note for note in imported("atari_arc")[1])
    one = changed("env.num_envs", 1, "atari")
    assert "clip_reward" not in convert(one, "x").data["env"]  # SLM-Lab clips no rewards of a single game
    bare = changed("agent.net.hid_layers_activation", None, "atari")
    assert convert(bare, "x").data["net"]["activation"] == "relu"


@pytest.mark.parametrize(
    ("value", "clip"), [({"reward_scale": 0.1}, None), ({"clip_reward": [-1, 5]}, 5.0), ({"clip_reward": 3}, 3.0)]
)
def test_import_of_rewards_changed_otherwise_is_named(value, clip):
    data = copy.deepcopy(SPECS["ppo"])
    data["env"] |= value
    found = convert(data, "x")
    assert found.data["env"].get("clip_reward") == clip
    assert any(next(iter(value)) in note for note in found.notes) == (value != {"clip_reward": 3})
    assert "kwargs" not in found.data["env"]


def test_import_what_a_spec_leaves_out_is_slm_labs_default_not_ours():
    data = copy.deepcopy(SPECS["crossq"])
    for key in ("clip_grad_val", "optim_spec", "init_fn"):
        del data["agent"]["net"][key]
    ours = load(convert(data, "x").data).spec
    assert isinstance(ours, ControlSpec)
    assert (ours.algorithm.max_grad_norm, ours.algorithm.lr.start, ours.algorithm.beta1) == (None, 1e-3, 0.9)
    assert not ours.net.orthogonal
    assert convert(copy.deepcopy(SPECS["ppo"]), "x").data["algorithm"]["adam_eps"] == 1e-8


def test_import_critic_net_of_crossq_comes_along_or_is_named():
    data = copy.deepcopy(SPECS["crossq"])
    renorm = {"LazyBatchRenorm1d": {"momentum": 0.05, "warmup_steps": 500}}
    body = [{"LazyLinear": {"out_features": 96}}, renorm, "ReLU"]
    data["agent"]["critic_net"] = net(
        type="TorchArcNet",
        arc={"modules": {"body": {"Sequential": body}}},
        optim_spec={"name": "Adam", "lr": 2e-3, "betas": [0.5, 0.999]},
        clip_grad_val=1.0,
    )
    found = convert(data, "x")
    ours = load(found.data).spec
    assert isinstance(ours, ControlSpec)
    assert ours.net.critic_hidden == [96]
    assert (ours.algorithm.critic_lr.start, ours.algorithm.renorm_momentum) == (2e-3, 0.05)
    assert ours.algorithm.renorm_warmup == 500
    assert any("critic_net.max_grad_norm" in note for note in found.notes)
    assert any("critic_net.activation" in note for note in found.notes)  # the policy's is tanh


def test_import_whole_numbers_written_as_powers_of_ten_are_whole():
    data = changed("agent.memory.max_size", 1e5, "dqn")
    data["agent"]["algorithm"] |= {"training_start_step": 1e3, "training_frequency": 4.0}
    algorithm = convert(data, "x").data["algorithm"]
    assert [algorithm[key] for key in ("buffer", "start", "update_every")] == [100_000, 1000, 1]
    with pytest.raises(UsageError, match=r"agent.memory.max_size: expected a whole number, got 10.5"):
        convert(changed("agent.memory.max_size", 10.5, "dqn"), "x")


def test_import_variants_of_dqn_differ_where_slm_lab_says_they_do():
    assert (loaded("vanilla_dqn").algorithm.tau, loaded("vanilla_dqn").algorithm.double) == (1.0, False)
    best = loaded("ddqn_per_dueling").algorithm
    assert (best.double, best.dueling) == (True, True)
    assert (best.prioritized.alpha, best.prioritized.eps) == (0.6, 0.0001)
    assert any("targets of double DQN" in note for note in imported("dqn")[1])
    assert not any("targets of double DQN" in note for note in imported("ddqn_per_dueling")[1])


def test_import_other_algorithms_have_their_fields():
    assert (loaded("a2c_gae").algorithm.lam, loaded("a2c_gae").algorithm.horizon) == (0.95, 32)
    assert (loaded("a2c_nstep").algorithm.lam, loaded("a2c_nstep").algorithm.horizon) == (None, 5)
    assert loaded("ppo_sil").algorithm.self_imitation.updates == 4
    assert loaded("ppo_recurrent").net.recurrent.cell == "lstm"
    assert loaded("crossq").algorithm.beta1 == 0.5
    assert loaded("crossq").algorithm.policy_delay == 3
    assert loaded("sac").algorithm.replay_ratio == 0.5
    assert loaded("sil_recurrent").net.hidden == [32]  # in place of a layer that remembers
    assert loaded("sil_recurrent").algorithm.self_imitation.buffer == 10_000
    assert loaded("torch_arc").net.hidden == [48, 24]
    assert loaded("torch_arc").net.activation == "relu"
    atari = loaded("atari")
    assert (atari.net.trunk, atari.net.hidden, atari.env.clip_reward) == ("nature", [512], 1.0)
    assert atari.env.kwargs == {"life_loss_info": True}
    mujoco = loaded("mujoco")
    assert (mujoco.env.normalize_obs, mujoco.env.clip_reward, mujoco.net.log_std) == (True, 10.0, -0.5)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("agent.algorithm.clip_val_loss", True),
        ("agent.algorithm.training_frequncy", 3),
        ("agent.net.actor_init_std", 0.01),
        ("agent.net.hid_layer", [3]),
        ("agent.memory.batchsize", 3),
        ("meta.num_gpus", 2),
    ],
)
def test_import_key_that_slm_lab_ignores_is_named_and_changes_nothing(path, value):
    found = convert(changed(path, value), "x")
    (note,) = found.notes
    assert note.startswith(f"{path}: ")
    assert "SLM-Lab ignores this key" in note
    assert found.data == convert(copy.deepcopy(SPECS["ppo"]), "x").data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("agent.algorithm.normalize_v_targets", True),
        ("agent.algorithm.symlog", True),
        ("agent.algorithm.policy_loss_coef", 0.5),
        ("agent.algorithm.normalize_advantages", "percentile"),
        ("agent.net.batch_norm", True),
        ("agent.net.init_fn", "xavier_uniform_"),
        ("agent.net.hid_layers_activation", "selu"),
        ("agent.net.lr_scheduler_spec", {"name": "StepLR", "step_size": 10}),
        ("agent.net.optim_spec", {"name": "RAdam", "lr": 1e-3}),
        ("agent.memory.use_cer", True),
        ("meta.distributed", "synced"),
        ("env.reward_scale", "sign"),
    ],
)
def test_import_key_without_a_counterpart_is_named(path, value):
    notes = convert(changed(path, value), "x").notes
    key = path.rpartition(".")[2]
    assert any(key in note.partition(":")[0] for note in notes), notes
    assert not any("SLM-Lab ignores this key" in note for note in notes)


@given(st.text("abcdefghijklmnop_", min_size=3, max_size=12), st.sampled_from(["algorithm", "net", "memory"]))
def test_import_any_unknown_key_is_never_dropped_without_a_word(key, block):
    data = copy.deepcopy(SPECS["ppo"])
    if key in data["agent"][block]:
        return
    data["agent"][block][key] = 0.123
    notes = convert(data, "x").notes
    assert any(key in note for note in notes)


@pytest.mark.parametrize(("name", "path"), [("sac", "agent.algorithm.action_pdtype"), ("crossq", "agent.memory.name")])
def test_import_of_sac_with_what_it_has_not_here_is_named(name, path):
    value = {"action_pdtype": "GumbelSoftmax", "name": "PrioritizedReplay"}[path.rpartition(".")[2]]
    assert any(note.startswith(f"{path}: ") for note in convert(changed(path, value, name), "x").notes)


def test_import_search_keys_become_a_space():
    data = changed(
        "search",
        {
            "agent.algorithm.gamma__uniform": [0.98, 0.999],
            "agent.net.optim_spec.lr__loguniform": [1e-4, 1e-3],
            "agent.algorithm.training_epoch__randint": [2, 11],
            "agent.algorithm.minibatch_size__choice": [64, 128],
            "agent.algorithm.clip_eps_spec.start_val__quniform": [0.1, 0.3, 0.05],
            "agent.algorithm.symlog__choice": [True, False],
            "agent.algorithm.lam__randn": [0.9, 0.1],
        },
    )
    data["meta"] |= {"max_trial": 12, "search_scheduler": {"grace_period": 1e4, "reduction_factor": 3}}
    found = convert(data, "x")
    made = load(found.data).spec
    assert found.data["search"]["space"] == {
        "algorithm.gamma": {"uniform": [0.98, 0.999]},
        "algorithm.lr": {"loguniform": [1e-4, 1e-3]},
        "algorithm.epochs": {"int": [2, 10]},
        "algorithm.minibatch": {"choice": [64, 128]},
        "algorithm.clip": {"uniform": [0.1, 0.3]},
    }
    assert made.search is not None
    assert made.search.trials == 12
    assert made.search.pruner is not None
    assert (made.search.pruner.asha.grace, made.search.pruner.asha.by) == (10_000, "frames")
    assert sum("search." in note for note in found.notes) == 3


def test_import_search_that_is_nested_is_the_same_as_with_dotted_keys():
    nested = {
        "agent": [
            {"algorithm": {"gamma__uniform": [0.98, 0.999]}, "net": {"optim_spec": {"lr__loguniform": [1e-4, 1e-3]}}}
        ],
        "meta": {"max_session__choice": [2, 4]},
    }
    dotted = {
        "agent.algorithm.gamma__uniform": [0.98, 0.999],
        "agent.net.optim_spec.lr__loguniform": [1e-4, 1e-3],
        "meta.max_session__choice": [2, 4],
    }
    found, same = convert(changed("search", nested), "x"), convert(changed("search", dotted), "x")
    assert found == same
    assert len(found.data["search"]["space"]) == 2
    assert any("search.meta.max_session__choice" in note for note in found.notes)
    empty = convert(changed("search", {"agent": {"algorithm": {}}}), "x")
    assert "search" not in empty.data


def test_import_search_values_are_in_our_units():
    space = {
        "agent.algorithm.explore_var_spec.end_step__choice": [10_000, 50_000, 400_000],
        "agent.net.update_frequency__grid_search": [100, 200],
        "agent.net.hid_layers_activation__choice": ["sigmoid", "relu", "tanh"],
        "agent.net.hid_layers__choice": [[], [32]],
        "agent.net.fc_hid_layers__choice": [[16], [32]],
        "agent.net.polyak_coef__choice": [0.1, 0.2],
    }
    found = convert(changed("search", space, "dqn"), "x")
    assert found.data["search"]["space"] == {
        "algorithm.epsilon.finish": {"choice": [0.05, 0.25]},
        "algorithm.target_every": {"choice": [100, 200]},
        "net.activation": {"choice": ["relu", "tanh"]},
        "net.hidden": {"choice": [[], [32]]},
    }
    for key in ("end_step__choice", "grid_search", "activation__choice", "fc_hid_layers", "polyak_coef"):
        assert any(key in note for note in found.notes), key
    soft = convert(changed("search", {"agent.net.polyak_coef__choice": [0.1, 0.2, 0]}, "ddqn_per_dueling"), "x")
    first, second = soft.data["search"]["space"]["algorithm.tau"]["choice"]
    assert ((1 - first) ** 4, (1 - second) ** 4) == pytest.approx((0.9, 0.8))


def test_import_search_of_a_scheduled_field_varies_its_start():
    data = changed("search", {"agent.net.optim_spec.lr__loguniform": [1e-4, 1e-3]}, "ppo_shared_decayed")
    assert convert(data, "x").data["search"]["space"] == {"algorithm.lr.start": {"loguniform": [1e-4, 1e-3]}}


def test_import_fills_variables_and_names_the_run_by_the_environment(tmp_path):
    text = as_json().replace('"ALE/Pong-v5"', '"${env}"').replace('"max_frame": 10000000', '"max_frame": ${frames}')
    (tmp_path / "slm.json").write_text(text)
    found = import_spec(tmp_path / "slm.json", "atari", {"env": "ALE/Breakout-v5", "frames": "4e6"})
    assert (found.name, found.data["env"]["id"]) == ("atari_breakout", "ALE/Breakout-v5")
    assert found.data["train"]["frames"] == 4_000_000
    assert import_spec(tmp_path / "slm.json", "ppo", {}).name == "ppo"  # which has no variables
    with pytest.raises(UsageError, match="-s frames="):
        import_spec(tmp_path / "slm.json", "atari", {"env": "ALE/Breakout-v5"})
    with pytest.raises(UsageError, match="no variable"):
        import_spec(tmp_path / "slm.json", "atari", {"environment": "x"})


@pytest.mark.parametrize("quote", ["", '"'])
def test_import_variable_is_a_number_as_it_is_documented(tmp_path, quote):
    frames = f"{quote}${{max_frame}}{quote}"
    (tmp_path / "slm.json").write_text(as_json().replace('"max_frame": 200000\n', f'"max_frame": {frames}\n'))
    for given_value in ("1e6", "1000000", "1.0e+6"):
        found = import_spec(tmp_path / "slm.json", "ppo", {"max_frame": given_value})
        assert found.data["train"]["frames"] == 1_000_000
    with pytest.raises(UsageError, match=r"env.max_frame: expected a whole number, got 'many'"):
        import_spec(tmp_path / "slm.json", "ppo", {"max_frame": "many"})


def test_import_yaml_with_anchors_gives_the_same_as_json(tmp_path):
    (tmp_path / "slm.yaml").write_text(
        "_widths: &widths [64, 64]\n_net: &net\n  type: MLPNet\n  hid_layers: [64, 64]\n"
        "base: &base\n"
        + "".join(f"  {line}\n" for line in yaml.safe_dump(SPECS["ppo"]).splitlines())
        + "other:\n  <<: *base\n  env: {name: Acrobot-v1, num_envs: 4, max_frame: 3e5}\n"
    )
    assert import_spec(tmp_path / "slm.yaml", "base").data == convert(SPECS["ppo"], "base").data
    assert import_spec(tmp_path / "slm.yaml", "other").data["env"]["id"] == "Acrobot-v1"


def test_import_of_what_cannot_be_read_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        import_spec(tmp_path / "none.json", "x")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(UsageError, match="not a file of SLM-Lab's specs"):
        import_spec(tmp_path / "list.json", "x")
    (tmp_path / "slm.json").write_text(as_json())
    with pytest.raises(UsageError, match="Did you mean 'a2c_gae'"):
        import_spec(tmp_path / "slm.json", "a2c_gea")
    with pytest.raises(UsageError, match="not valid here"):
        convert(changed("agent.algorithm.gamma", 2), "x")
    with pytest.raises(UsageError, match="HydraDQN"):
        convert(spec({"name": "HydraDQN"}, {}, net()), "x")
    with pytest.raises(UsageError, match="max_frame"):
        convert(spec(PPO, {}, net(), env={"name": "CartPole-v1"}), "x")


def refusal(importing: Callable[[], Imported]) -> str | None:
    """Why a spec was refused; None where it was imported, which is valid then."""
    try:
        found = importing()
    except UsageError as error:
        return str(error)
    load(found.data)
    return None


@given(st.data())
def test_import_any_spec_is_valid_here_or_refused_with_a_reason(data):
    """Values that SLM-Lab's specs have, in any combination."""
    spec_data = copy.deepcopy(SPECS[data.draw(st.sampled_from(sorted(SPECS)))])
    agent = spec_data["agent"]
    for block, key, values in (
        ("net", "type", ["MLPNet", "DuelingMLPNet", "ConvNet", "RecurrentNet", "HydraMLPNet"]),
        ("net", "update_type", ["replace", "polyak"]),
        ("net", "polyak_coef", [0, 0.005, 0.9, 1.0]),
        ("net", "shared", [True, False]),
        ("net", "critic_hid_layers", [[32], []]),
        ("net", "hid_layers", [[], [[[32], [32]], [64], []]]),
        ("net", "hid_layers_activation", ["selu", "relu", None]),
        ("net", "lr_scheduler_spec", [None, {"name": "LinearToMin", "frame": 1e5}]),
        ("net", "actor_optim_spec", [{"name": "GlobalRMSprop", "lr": 1e-3, "alpha": 0.99, "eps": 1e-5}]),
        ("algorithm", "training_frequency", [1, 3, 32.0]),
        ("algorithm", "time_horizon", [5, 7, 128]),
        ("algorithm", "minibatch_size", [4, 64, 4096]),
        ("algorithm", "training_start_step", [0, 32, 1e5]),
        ("memory", "name", ["OnPolicyReplay", "OnPolicyBatchReplay", "Replay", "PrioritizedReplay"]),
    ):
        if data.draw(st.booleans()):
            agent[block][key] = data.draw(st.sampled_from(values))
    spec_data["env"] |= {"num_envs": data.draw(st.sampled_from([1, 3, 16])), "max_frame": 1e5}
    reason = refusal(lambda: convert(spec_data, "x"))
    assert reason is None or "algorithm.tau: expected a number above 0" in reason  # SAC's targets would stand still


@pytest.mark.skipif("PALESTRA_SLM_LAB" not in os.environ, reason="PALESTRA_SLM_LAB names no folder of SLM-Lab's specs")
def test_import_every_spec_of_slm_lab_is_valid_here_or_refused_with_a_reason():
    """All specs of its `slm_lab/spec`: only algorithms without a counterpart are refused."""
    files = [file for file in Path(os.environ["PALESTRA_SLM_LAB"]).rglob("*") if file.suffix in (".json", ".yaml")]
    values = {"env": "ALE/Pong-v5", "max_frame": "1e6"}
    for file in files:
        text = file.read_text()
        given_values = {name: values.get(name, "1") for name in VARIABLE.findall(text)}
        data = read_text(VARIABLE.sub("1", text).replace("\t", " "), str(file)).data
        for name in [name for name, item in data.items() if isinstance(item, dict) and "agent" in item]:
            reason = refusal(lambda file=file, name=name, given=given_values: import_spec(file, name, given))
            assert reason is None or "has no counterpart here" in reason, (file, name)


def test_import_command_says_what_did_not_come_along_and_does_not_overwrite(scratch):
    data = changed("agent.algorithm.clip_val_loss", True)
    (scratch.path / "slm.json").write_text(as_json(mine=data))
    first = scratch.here("import", "slm-lab", "slm.json", "mine")
    assert first.returncode == 0
    assert "algorithm.clip_val_loss: SLM-Lab ignores this key" in first.stderr
    text = Path(scratch.path / "mine.yaml").read_text()
    assert "# agent.algorithm.clip_val_loss" in text
    checked = scratch.here("check", "mine.yaml")
    assert checked.returncode == 0, checked.stderr
    again = scratch.here("import", "slm-lab", "slm.json", "mine")
    assert again.returncode == 2
    assert "exists" in again.stderr
