"""SLM-Lab's specs as ours: valid, with the same numbers, and with a word on every key that did not come along."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from slm_lab_specs import PPO, SPECS, as_json, net, schedule, spec

from palestra.errors import UsageError
from palestra.migrate.slm_lab import convert, import_spec
from palestra.spec.kinds.control import ControlSpec
from palestra.spec.load import load
from palestra.spec.schedule import Schedule


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
    assert ours.algorithm == shipped.algorithm
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
    """Every 8 vector steps of 4 environments, 4 batches of 2 updates each: 8 updates for 32 frames."""
    ours = loaded("dqn")
    assert ours.algorithm.replay_ratio == 0.25
    assert ours.algorithm.updates_at_once(4) == 8
    assert (ours.algorithm.update_every, ours.algorithm.start, ours.algorithm.batch) == (8, 64, 32)
    assert ours.algorithm.target_every == 50  # of 200 frames
    assert ours.algorithm.buffer == 10_000


def test_import_variants_of_dqn_differ_where_slm_lab_says_they_do():
    assert (loaded("vanilla_dqn").algorithm.tau, loaded("vanilla_dqn").algorithm.double) == (1.0, False)
    best = loaded("ddqn_per_dueling").algorithm
    assert (best.double, best.dueling, best.tau) == (True, True, 0.01)
    assert (best.prioritised.alpha, best.prioritised.eps) == (0.6, 0.0001)
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
    assert loaded("torch_arc").net.hidden == [48, 24]
    assert loaded("torch_arc").net.activation == "relu"
    atari = loaded("atari")
    assert (atari.net.trunk, atari.net.hidden, atari.env.clip_reward) == ("nature", [512], 1.0)
    assert atari.env.kwargs == {"life_loss_info": True}
    mujoco = loaded("mujoco")
    assert (mujoco.env.normalise_obs, mujoco.env.clip_reward, mujoco.net.log_std) == (True, 10.0, -0.5)


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


def test_import_yaml_with_anchors_gives_the_same_as_json(tmp_path):
    (tmp_path / "slm.yaml").write_text(
        "_net: &net\n  type: MLPNet\n  hid_layers: [64, 64]\n"
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
    with pytest.raises(UsageError, match="HydraDQN"):
        convert(spec({"name": "HydraDQN"}, {}, net()), "x")
    with pytest.raises(UsageError, match="max_frame"):
        convert(spec(PPO, {}, net(), env={"name": "CartPole-v1"}), "x")


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
