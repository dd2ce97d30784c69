"""Composites of a spec: the golden counts of a block, what a spec changes of one, what it is told when it cannot."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.data.mixture import Mixture
from palestra.errors import UsageError
from palestra.lm.datasets import Data, mixture_of
from palestra.spec.kinds.lm import PretrainData, PretrainSpec
from palestra.spec.load import load
from palestra.spec.mixture import COMPOSITES, CompositeSpec

NAME = "nemotron_dclm_fineweb_10b"
GOLDEN = {  # of 2048 examples
    "dclm_baseline": 953,
    "nemotron_medium": 258,
    "nemotron_hq_synth": 208,
    "fineweb_edu_10b": 204,
    "nemotron_medium_low": 117,
    "nemotron_hq_actual": 69,
    "nemotron_medium_high": 63,
    "starcoder": 62,
    "nemotron_low_actual": 53,
    "nemotron_low_synth": 48,
    "proofpile_2": 13,
}


def spec(composite: dict[str, Any], sources: list[str], *overrides: str, **weights: float) -> PretrainSpec:
    train = {name: {"path": f"{name}.jsonl", "weight": weights.get(name, 1.0)} for name in sources}
    given = {
        "kind": "pretrain",
        "name": "mixed",
        "model": {"tokenizer": "characters", "shape": {"layers": 1, "width": 32, "heads": 2, "mlp": 64, "context": 16}},
        "data": {"train": train, "context": 16, "composite": composite},
        "train": {"steps": 10, "batch": 16},
    }
    loaded = load(given, overrides=overrides)
    assert isinstance(loaded.spec, PretrainSpec)
    assert load(loaded.spec).spec == loaded.spec
    return loaded.spec


def block_of(data: PretrainData, block: int) -> Counter[str]:
    """What a block of the mixture that a run trains on holds."""
    names = data.trained
    found = Data({name: range(50_000) for name in names}, {}, {name: data.weights[name] for name in names}, {})
    mixture = mixture_of(found, data, batch=16, steps=10, seed=3)
    components, _ = mixture.lookup(np.arange(2048 * block, 2048 * (block + 1)))
    return Counter(mixture.names[component] for component in components)


@pytest.mark.parametrize("block", [0, 1, 777])
def test_composite_that_ships_gives_the_golden_counts_in_every_block(block):
    assert block_of(spec({"base": NAME}, list(GOLDEN)).data, block) == GOLDEN


def test_composite_of_raw_sizes_gives_a_small_part_its_one_example():
    sizes = {name: size for group in ("nemotron_cc", "dclm") for name, size in COMPOSITES[NAME][group][1].items()}
    own = {"groups": {"all": {"share": 1, "parts": {**sizes, "fineweb_edu_10b": 0.01}}}}
    assert block_of(spec(own, list(GOLDEN)).data, 5)["fineweb_edu_10b"] == 1


def test_composite_changed_by_overrides_keeps_what_is_not_named():
    weights = spec(
        {"base": NAME},
        list(GOLDEN),
        "data.composite.groups.dclm.share=0.3",
        "data.composite.groups.fineweb_edu.share=0.3",
        "data.composite.groups.dclm.parts.starcoder=0",
    ).data.weights
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["fineweb_edu_10b"] == pytest.approx(0.3)
    assert weights["starcoder"] == 0
    assert weights["dclm_baseline"] == pytest.approx(0.3 * 3.8 / 3.855)
    assert sum(w for name, w in weights.items() if name.startswith("nemotron")) == pytest.approx(0.4)


def test_composite_with_weights_of_sources_multiplies_and_zero_only_evaluates():
    data = spec({"base": NAME}, [*GOLDEN, "other"], fineweb_edu_10b=2.0, starcoder=0.0, other=0.0).data
    assert data.weights["fineweb_edu_10b"] == pytest.approx(0.2)
    assert set(data.train) - set(data.trained) == {"starcoder", "other"}


def test_sources_without_a_composite_have_their_own_weights():
    data = PretrainData.model_validate({"train": {"a": {"path": "a"}, "b": {"path": "b", "weight": 3.0}}, "context": 8})
    assert data.weights == {"a": 1.0, "b": 3.0}


@given(st.data())
def test_composite_of_any_groups_has_their_shares(data):
    shares = data.draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=4))
    groups: dict[str, dict[str, Any]] = {}
    for number, share in enumerate(shares):
        parts = data.draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=4))
        groups[f"g{number}"] = {"share": share, "parts": {f"g{number}p{i}": weight for i, weight in enumerate(parts)}}
    composite = CompositeSpec.model_validate({"groups": groups})
    assert composite.all_conflicts() == []
    weights = composite.weights()
    for group in groups.values():
        theirs = {part: weights[part] for part in group["parts"]}
        assert sum(theirs.values()) == pytest.approx(group["share"] / sum(shares))
        scale = sum(theirs.values()) / sum(group["parts"].values())
        assert theirs == pytest.approx({part: weight * scale for part, weight in group["parts"].items()})
    Mixture({name: range(10) for name in weights}, weights, seed=0, block_size=2**40)


@pytest.mark.parametrize(
    ("composite", "sources", "told"),
    [
        ({"base": "pile"}, ["a"], f"data.composite.base.*{NAME}"),
        ({"base": NAME}, ["starcoder"], "expected sources for nemotron_hq_actual, "),
        ({"groups": {"g": {"share": 1.0, "parts": {"a": 1.0}}}}, ["a", "b"], "data.train.b.*part of data.composite"),
        ({"groups": {"g": {"parts": {"a": 1.0}}}}, ["a"], "data.composite.groups.g.share"),
        ({"groups": {"g": {"share": 1.0, "parts": {"a": 0.0}}}}, ["a"], "data.composite.groups.g.parts"),
        ({"groups": {"g": {"share": 0.0, "parts": {"a": 1.0}}}}, ["a"], "at least one share above 0"),
        (
            {"groups": {g: {"share": 1.0, "parts": {"a": 1.0}} for g in ("g", "h")}},
            ["a"],
            "groups.h.parts.a.*the group 'g' does not have",
        ),
    ],
)
def test_composite_that_does_not_fit_is_refused_with_its_place(composite, sources, told):
    with pytest.raises(UsageError, match=f"(?s){told}"):
        spec(composite, sources)
