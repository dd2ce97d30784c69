"""Stats: sums and denominators add up over micro-batches and ranks."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.track.stats import Stats

ELEMENTS = st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans(), st.floats(0.01, 10.0)), min_size=1, max_size=40)
FORMS = st.lists(st.sampled_from(["numpy", "torch", "list"]), min_size=6, max_size=6)


def record(stats: Stats, part: list[tuple[float, bool, float]], form: str) -> None:
    columns = [list(column) for column in zip(*part, strict=True)] if part else [[], [], []]
    if form == "numpy":
        values, mask, weight = (np.array(c) for c in columns)
    elif form == "torch":
        values, weight = (torch.tensor(columns[i], dtype=torch.float64) for i in (0, 2))
        mask = torch.tensor(columns[1], dtype=torch.bool)
    else:
        values, mask, weight = columns
    with stats.scope("ppo"):
        stats.mean("plain", values)
        stats.mean("masked", values, mask=mask)
        stats.mean("weighted", values, mask=mask, weight=weight)
        stats.sum("sum", values, mask=mask)
        stats.min("min", values, mask=mask)
        stats.max("max", values)


@given(
    elements=ELEMENTS,
    cuts=st.lists(st.integers(0, 40), max_size=5),
    ranks=st.integers(1, 3),
    forms=FORMS,
)
def test_export_any_split_into_batches_and_ranks_equals_one_batch(elements, cuts, ranks, forms):
    bounds = [0, *sorted(min(c, len(elements)) for c in cuts), len(elements)]
    parts = [elements[a:b] for a, b in itertools.pairwise(bounds)]
    stats = [Stats() for _ in range(ranks)]
    for i, part in enumerate(parts):
        record(stats[i % ranks], part, forms[i % len(forms)])
    got = Stats.merge([s.state() for s in stats]).export()

    kept = [(x, w) for x, keep, w in elements if keep]
    want = {
        "ppo/plain": math.fsum(x for x, _, _ in elements) / len(elements),
        "ppo/sum": math.fsum(x for x, _ in kept),
        "ppo/max": max(x for x, _, _ in elements),
    }
    if kept:
        want["ppo/masked"] = want["ppo/sum"] / len(kept)
        want["ppo/weighted"] = math.fsum(x * w for x, w in kept) / math.fsum(w for _, w in kept)
        want["ppo/min"] = min(x for x, _ in kept)
    else:
        del want["ppo/sum"]
    scale = max(abs(x) for x, _, _ in elements) + 1.0
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key] == pytest.approx(value, rel=1e-12, abs=1e-11 * scale), key


def test_mean_unequal_micro_batches_is_not_the_mean_of_means():
    stats = Stats()
    stats.mean("x", np.array([1.0, 1.0, 1.0]))
    stats.mean("x", 5.0)
    assert stats.export() == {"x": 2.0}


def test_mean_of_a_mean_with_its_denominator_equals_elements():
    stats = Stats()
    stats.mean("loss", torch.tensor(2.0), weight=3)
    stats.mean("loss", 6.0, weight=torch.tensor(1))
    assert stats.export() == {"loss": 3.0}


@pytest.mark.parametrize("wrap", [np.array, torch.tensor])
def test_mean_masked_nan_does_not_leak(wrap):
    stats = Stats()
    stats.mean("x", wrap([1.0, float("nan"), 3.0]), mask=wrap([True, False, True]))
    stats.min("low", wrap([1.0, float("nan"), 3.0]), mask=wrap([True, False, True]))
    assert stats.export() == {"x": 2.0, "low": 1.0}


@pytest.mark.parametrize("wrap", [np.array, torch.tensor])
def test_mean_mask_over_time_broadcasts_over_features(wrap):
    stats = Stats()
    stats.mean("x", wrap([[1.0, 2.0], [100.0, 100.0]]), mask=wrap([[True], [False]]))
    assert stats.export() == {"x": 1.5}


@pytest.mark.parametrize("wrap", [np.array, torch.tensor])
def test_extremes_nan_among_kept_elements_is_shown(wrap):
    stats = Stats()
    for values in ([1.0], [float("nan"), 2.0], [0.0]):
        stats.min("low", wrap(values))
        stats.max("high", wrap(values))
    assert all(math.isnan(value) for value in stats.export().values())


def test_export_nothing_recorded_key_absent_and_reset():
    stats = Stats()
    stats.mean("x", np.zeros(3), mask=np.zeros(3, dtype=bool))
    stats.max("y", torch.zeros(0))
    stats.sum("z", 1.0)
    assert stats.export() == {"z": 1.0}
    assert stats.export() == {}


def test_last_tensor_changed_in_place_afterwards_keeps_recorded_value():
    stats, lr = Stats(), torch.tensor(0.5, dtype=torch.float64)
    stats.last("lr", 9.0)
    stats.last("lr", lr)
    lr.zero_()
    assert stats.export() == {"lr": 0.5}


def test_mean_of_parameter_with_gradient_keeps_no_graph():
    stats, weight = Stats(), torch.nn.Parameter(torch.ones(3))
    stats.mean("w", weight)
    assert not stats._entries["w"].value.requires_grad
    assert stats.export() == {"w": 1.0}


def test_timer_inside_scope_adds_seconds_under_time_and_takes_slowest_rank():
    ranks = [Stats(), Stats()]
    for stats in ranks:
        with stats.scope("ppo"):
            for _ in range(2):
                with stats.timer("learn"):
                    pass
    states = [stats.state() for stats in ranks]
    slowest = max(state["time/ppo/learn"][1] for state in states)
    assert Stats.merge(states).export() == {"time/ppo/learn": slowest}
    assert slowest > 0


def test_scope_left_by_exception_is_closed():
    stats = Stats()
    with pytest.raises(KeyError), stats.scope("a"):
        raise KeyError
    stats.sum("x", 1)
    assert list(stats.export()) == ["x"]


def test_key_recorded_two_ways_is_refused_naming_it():
    stats = Stats()
    stats.mean("ratio", 1.0)
    with pytest.raises(ValueError, match=r"'ratio' is recorded as max but was mean"):
        stats.max("ratio", 1.0)


def test_state_taking_it_changes_nothing():
    stats = Stats()
    stats.mean("x", torch.tensor([1.0, 2.0]))
    assert stats.state() == stats.state() == {"x": ("mean", 3.0, 2.0)}
    assert stats.export() == {"x": 1.5}


def test_module_numpy_only_does_not_import_torch():
    code = """
import sys
from palestra.track.stats import Stats
stats = Stats()
stats.mean("x", [1, 2])
assert stats.export() == {"x": 1.5}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recording_never_reads_a_tensor():
    stats, values = Stats(), torch.ones(4, device="meta")  # tensors without data: reading one raises
    mask = torch.ones(4, dtype=torch.bool, device="meta")
    for _ in range(2):
        stats.mean("mean", values, mask=mask, weight=2.0)
        stats.sum("sum", values)
        stats.min("min", values, mask=mask)
        stats.max("max", values)
        stats.max("max", 1.0)
        stats.last("last", values[0])
    with pytest.raises(NotImplementedError):
        stats.export()
