"""TQC: what is left of pooled quantiles, targets and values by hand, refusals."""

import numpy as np
import pytest
import torch
from actor_critic_probes import Aim, made
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.control.memory.replay import ReplayBatch
from palestra.rl.losses import quantile_loss, truncated
from palestra.spec.load import load
from palestra.spec.validate import SpecError

torch.set_num_threads(1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 30), st.data())
@settings(max_examples=50, deadline=None)
def test_truncated_are_the_lowest_of_all_critics_together(seed, critics, number, data):
    drop = data.draw(st.integers(0, number - 1))
    quantiles = np.random.default_rng(seed).normal(0, 3, (critics, 4, number))
    found = truncated(torch.from_numpy(quantiles), drop).numpy()
    expected = [sorted(quantiles[:, row].flatten())[: critics * number - critics * drop] for row in range(4)]
    assert np.array_equal(found, np.array(expected))


def test_targets_and_values_by_hand():
    tqc = made("tqc", lambda: Aim(lambda shown, action: 1.0), quantiles=3, drop=1, alpha=0.5)
    q = torch.tensor([[[1.0, 2.0, 9.0]], [[0.0, 3.0, 4.0]]])  # (2, 1, 3)
    logprobs, alpha = torch.tensor([2.0]), torch.tensor([0.5])
    # Of six quantiles the two highest, 4 and 9, are dropped, whichever critic they are of.
    assert tqc.next_value(q, logprobs, alpha).tolist() == [[-1.0, 0.0, 1.0, 2.0]]
    assert tqc.value(q, logprobs, alpha).tolist() == [pytest.approx(19 / 6 - 1)]
    obs = torch.zeros(1, 3)
    rewards, discounts = torch.tensor([10.0]), torch.tensor([0.5])
    batch = ReplayBatch(obs, torch.zeros(1, 1), rewards, obs, discounts, None, torch.zeros(1, dtype=torch.long))
    error, seen = tqc.critic_loss(q, batch, tqc.next_value(q, logprobs, alpha))
    targets = torch.tensor([[9.5, 10.0, 10.5, 11.0]])
    torch.testing.assert_close(error, quantile_loss(q[0], targets)[0] + quantile_loss(q[1], targets)[0])
    assert seen.tolist() == [pytest.approx(float(error)), pytest.approx(19 / 6)]


def test_more_dropped_quantiles_give_lower_targets():
    q = torch.randn(2, 16, 25, generator=torch.Generator().manual_seed(0))
    means = [float(truncated(q, drop).mean()) for drop in (0, 2, 5, 20)]
    assert means == sorted(means, reverse=True)
    assert means[0] == pytest.approx(float(q.mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"algorithm.drop": 25}, "expected less than quantiles = 25"),
        ({"net.recurrent": {}}, "tqc does not support it: use ppo, a2c, dqn or sac"),
    ],
)
def test_spec_that_does_not_fit_is_refused(fields, says):
    base = {"kind": "control", "name": "x", "env": {"id": "Pendulum-v1"}, "train": {"frames": 1000}}
    with pytest.raises(SpecError, match=says):
        load({**base, "algorithm": {"name": "tqc"}}, overrides=fields)


@pytest.mark.parametrize("name", ["sac", "tqc"])
def test_default_network_is_that_of_the_papers_and_every_field_given_stays(name):
    base = {"kind": "control", "name": "x", "env": {"id": "Pendulum-v1"}, "train": {"frames": 1000}}
    loaded = load({**base, "algorithm": {"name": name}})
    assert (loaded.spec.net.hidden, loaded.spec.net.activation) == ([256, 256], "relu")
    assert loaded.origin("net.hidden") == f"default for {name}"
    given = load({**base, "algorithm": {"name": name}, "net": {"hidden": [8]}}).spec.net
    assert (given.hidden, given.activation) == ([8], "relu")
    assert load({**base, "algorithm": {"name": "td3"}}).spec.net.hidden == [64, 64]
