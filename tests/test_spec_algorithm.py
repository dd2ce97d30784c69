"""Algorithms as data: what presets resolve to, what overrides do to them, and what does not fit together."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from palestra.spec.algorithm import PRESETS, AlgorithmSpec, ClipSpec
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.spec.validate import locate

POSTTRAIN = {
    "kind": "posttrain",
    "name": "x",
    "model": {"init": "runs/x"},
    "tasks": {"train": [{"task": "arithmetic"}]},
    "train": {"steps": 4},
}


def reasons(**changes) -> dict[str, str]:
    found = AlgorithmSpec.model_validate(changes).all_conflicts()
    return {".".join(map(str, path)): reason for path, reason in found}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_alone_fits_together_and_resolves_to_itself(preset):
    spec = AlgorithmSpec(preset=preset)
    assert spec.all_conflicts() == []
    resolved = spec.model_dump(mode="json")
    assert set(resolved) == set(AlgorithmSpec.model_fields)  # every value is there to be read
    assert AlgorithmSpec.model_validate(resolved) == spec


def test_presets_every_two_differ():
    resolved = [AlgorithmSpec(preset=preset).model_dump(exclude={"preset"}) for preset in PRESETS]
    assert all(a != b for i, a in enumerate(resolved) for b in resolved[:i])


def test_preset_unknown_raises():
    with pytest.raises(ValidationError, match="preset"):
        AlgorithmSpec.model_validate({"preset": "grop"})
    with pytest.raises(ValidationError, match="preset"):
        AlgorithmSpec.model_validate({"preset": ["grpo"]})
    with pytest.raises(ValidationError, match="preset"):
        AlgorithmSpec.model_validate({})


def test_override_of_one_key_keeps_the_rest_of_its_mapping():
    spec = AlgorithmSpec.model_validate({"preset": "dapo", "trust": {"high": 0.5}})
    assert spec.trust == ClipSpec(type="clip", low=0.2, high=0.5)
    assert spec.truncated == AlgorithmSpec(preset="dapo").truncated


def test_override_with_another_type_replaces_the_mapping():
    spec = AlgorithmSpec.model_validate({"preset": "dapo", "trust": {"type": "tv_mask"}})
    assert spec.trust.model_dump() == {"type": "tv_mask", "threshold": 0.2}


def test_override_with_a_model_is_taken_as_it_is():
    trust = ClipSpec(type="clip", low=0.1, high=0.3, dual=3.0)
    assert AlgorithmSpec(preset="gspo", trust=trust).trust == trust


def test_override_with_a_key_of_another_type_names_it():
    data = {"preset": "grpo", "trust": {"threshold": 0.1}}
    with pytest.raises(ValidationError) as caught:
        AlgorithmSpec.model_validate(data)
    (error,) = caught.value.errors()
    assert error["type"] == "extra_forbidden"
    assert locate(AlgorithmSpec, data, error["loc"], absent=False).path == ("trust", "threshold")


def test_override_out_of_range_is_found_where_it_was_written():
    """The tag of the union comes from the preset: it is not in what the user wrote."""
    data = {"preset": "grpo", "trust": {"high": -1.0}}
    with pytest.raises(ValidationError) as caught:
        AlgorithmSpec.model_validate(data)
    (error,) = caught.value.errors()
    assert locate(AlgorithmSpec, data, error["loc"], absent=False).path == ("trust", "high")


def test_override_leaves_the_presets_alone():
    before = AlgorithmSpec(preset="dapo")
    AlgorithmSpec.model_validate({"preset": "dapo", "trust": {"high": 0.9}, "filters": {"zero_variance": False}})
    assert AlgorithmSpec(preset="dapo") == before


@given(st.sampled_from(sorted(PRESETS)), st.floats(0, 5), st.floats(0, 5))
def test_override_given_twice_is_given_once(preset, entropy, coefficient):
    given_ = {"preset": preset, "entropy": entropy, "kl": {"where": "loss", "coefficient": coefficient}}
    once = AlgorithmSpec.model_validate(given_)
    assert AlgorithmSpec.model_validate(once.model_dump(mode="json")) == once
    assert once.entropy == entropy
    assert once.kl.coefficient == coefficient


def test_kl_switched_off_forgets_the_presets_coefficient():
    spec = AlgorithmSpec.model_validate({"preset": "grpo", "kl": {"where": "none"}})
    assert spec.all_conflicts() == []
    assert spec.kl.coefficient == 0.0
    assert not spec.needs_reference


def test_kl_coefficient_without_where_is_a_problem():
    """AReaL: a coefficient of 0.1 without a reference rewarded every token by -0.1·logp."""
    assert "where: loss" in reasons(preset="dapo", kl={"coefficient": 0.1})["kl.coefficient"]


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_without_coefficient_is_a_problem(where):
    assert list(reasons(preset="dapo", kl={"where": where, "estimator": "k2"})) == ["kl.coefficient"]


def test_kl_k1_in_the_loss_is_a_problem_and_in_the_reward_is_not():
    assert list(reasons(preset="grpo", kl={"estimator": "k1"})) == ["kl.estimator"]
    assert reasons(preset="grpo", kl={"where": "reward", "estimator": "k1"}) == {}


def test_correction_with_anchor_behavior_is_a_problem():
    assert list(reasons(preset="grpo", correction={"type": "mask"})) == ["correction"]


def test_anchor_recomputed_brings_behavior_weights_unless_told_otherwise():
    """AReaL: a decoupled loss without its rejection setting had no behavior weights at all, and nobody was told."""
    spec = AlgorithmSpec.model_validate({"preset": "grpo", "anchor": "recomputed"})
    assert spec.correction.model_dump() == {"type": "truncate", "high": 2.0, "level": "token"}
    assert spec.needs_anchor
    assert spec.all_conflicts() == []
    told = AlgorithmSpec.model_validate({"preset": "grpo", "anchor": "recomputed", "correction": {"type": "none"}})
    assert told.correction.type == "none"


@pytest.mark.parametrize("aggregation", ["token", "prompt", "constant"])
def test_ratio_sequence_with_another_aggregation_is_a_problem(aggregation):
    assert list(reasons(preset="gspo", aggregation=aggregation)) == ["aggregation"]


@pytest.mark.parametrize("trust", ["tv_mask", "m2_mask"])
def test_ratio_sequence_with_a_mask_of_tokens_is_a_problem(trust):
    assert list(reasons(preset="gspo", trust={"type": trust})) == ["ratio"]


@pytest.mark.parametrize(
    ("baseline", "scale"),
    [("batch", "group_std"), ("batch", "advantage_std"), ("critic", "group_std"), ("none", "batch_std")],
)
def test_scale_that_the_baseline_does_not_have_is_a_problem(baseline, scale):
    assert list(reasons(preset="dr_grpo", baseline=baseline, scale=scale)) == ["scale"]


def test_critic_belongs_to_its_baseline():
    assert list(reasons(preset="grpo", critic={"gamma": 0.9})) == ["critic"]
    assert list(reasons(preset="ppo", critic=None)) == ["critic"]
    assert AlgorithmSpec.model_validate({"preset": "dr_grpo", "baseline": "critic"}).critic is not None
    assert AlgorithmSpec.model_validate({"preset": "ppo", "baseline": "group"}).critic is None


def test_filters_bounds_the_wrong_way_round_are_a_problem():
    assert list(reasons(preset="grpo", filters={"min_tokens": 9, "max_tokens": 8})) == ["filters.min_tokens"]


@pytest.mark.parametrize(
    ("preset", "changes", "needs"),
    [
        ("grpo", {}, True),
        ("rloo", {}, True),
        ("reinforce_pp", {}, False),
        ("ppo", {}, False),
        ("reinforce_pp", {"filters": {"zero_variance": True}}, True),  # every group of one would be left out
    ],
)
def test_needs_group_says_whether_answers_are_compared(preset, changes, needs):
    assert AlgorithmSpec.model_validate({"preset": preset, **changes}).needs_group is needs


def test_needs_anchor_and_reference_are_asked_for_by_few():
    assert [p for p in PRESETS if AlgorithmSpec(preset=p).needs_anchor] == ["m2po"]
    assert [p for p in PRESETS if AlgorithmSpec(preset=p).needs_reference] == ["grpo", "reinforce_pp"]


def test_posttrain_spec_reports_the_algorithms_problems():
    with pytest.raises(ValidationError, match=r"algorithm\.kl\.coefficient"):
        PosttrainSpec.model_validate({**POSTTRAIN, "algorithm": {"preset": "dapo", "kl": {"coefficient": 0.1}}})


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_rollout_that_would_draw_from_less_than_the_policy_is_refused(key):
    """TRL: with top-k 50 the ratio, and with it the gradient, was a sixth of what it should be."""
    data = {**POSTTRAIN, "algorithm": {"preset": "grpo"}, "rollout": {key: 0.9}}
    with pytest.raises(ValidationError, match=key):
        PosttrainSpec.model_validate(data)


def test_import_needs_no_torch():
    code = "import sys, palestra.spec.algorithm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
