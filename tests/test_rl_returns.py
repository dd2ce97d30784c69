"""Returns, GAE and V-trace against their definitions, with every mix of ends and dummy rows."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from palestra.rl.returns import discounted_returns, gae, lambda_returns, reverse_scan, vtrace

GAMMAS = st.sampled_from([0.0, 0.9, 1.0])
LAMBDAS = st.sampled_from([0.0, 0.5, 1.0])


@dataclass
class Block:
    """A random (T, N) block in float64; what must not be read is NaN."""

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor

    @property
    def ends(self) -> dict[str, Tensor]:
        return {"terminated": self.terminated, "truncated": self.truncated, "valid": self.valid}

    def rest_of_episode(self, t: int, i: int) -> list[int]:
        """The rows from t on that are steps of t's episode, within the block."""
        rows = [t]
        while True:
            t = rows[-1]
            if self.terminated[t, i] or self.truncated[t, i] or t + 1 == len(self.rewards) or not self.valid[t + 1, i]:
                return rows
            rows.append(t + 1)

    def bootstrap(self, t: int, i: int) -> float:
        return 0.0 if self.terminated[t, i] else self.next_values[t, i].item()

    def n_step(self, t: int, i: int, n: int, gamma: float) -> float:
        rows = self.rest_of_episode(t, i)[:n]
        rewards = sum(gamma**k * self.rewards[row, i].item() for k, row in enumerate(rows))
        return rewards + gamma ** len(rows) * self.bootstrap(rows[-1], i)

    def delta(self, t: int, i: int, gamma: float) -> float:
        return self.rewards[t, i].item() + gamma * self.bootstrap(t, i) - self.values[t, i].item()

    def each(self, definition) -> Tensor:
        """The definition at every valid row, 0 elsewhere."""
        out = torch.zeros_like(self.rewards)
        for t, i in self.valid.nonzero().tolist():
            out[t, i] = definition(t, i)
        return out


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    steps, envs = draw(st.integers(1, 13)), draw(st.integers(1, 3))
    kinds = draw(st.lists(st.sampled_from("----tTbx"), min_size=steps * envs, max_size=steps * envs))
    kind = np.array(kinds).reshape(steps, envs)
    terminated, truncated, valid = (
        torch.from_numpy(k) for k in ((kind == "t") | (kind == "b"), (kind == "T") | (kind == "b"), kind != "x")
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rewards, values, next_values = torch.from_numpy(rng.normal(size=(3, steps, envs)))
    # One critic: the successor's value is the next row's where the episode goes on, and a value of its own elsewhere.
    goes_on = ~(terminated | truncated)[:-1] & valid[1:]
    next_values[:-1] = torch.where(goes_on, values[1:], next_values[:-1])
    next_values[terminated] = torch.nan
    for x in (rewards, values, next_values):
        x[~valid] = torch.nan
    return Block(rewards, values, next_values, terminated, truncated, valid)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@given(blocks(), GAMMAS, LAMBDAS)
@settings(max_examples=80, deadline=None)
def test_gae_any_ends_equals_sum_of_deltas_and_forward_view(block: Block, gamma: float, lam: float):
    def sum_of_deltas(t: int, i: int) -> float:
        rows = block.rest_of_episode(t, i)
        return sum((gamma * lam) ** k * block.delta(row, i, gamma) for k, row in enumerate(rows))

    def forward_view(t: int, i: int) -> float:
        """(1-λ) Σ λ^{n-1} G^(n) + λ^{m-1} G^(m) (Sutton & Barto 2018, eq. 12.3)."""
        m = len(block.rest_of_episode(t, i))
        weights = [(1 - lam) * lam ** (n - 1) for n in range(1, m)] + [lam ** (m - 1)]
        return sum(w * block.n_step(t, i, n, gamma) for n, w in enumerate(weights, start=1))

    advantages, returns = gae(block.rewards, block.values, block.next_values, **block.ends, gamma=gamma, lam=lam)
    assert_close(advantages, block.each(sum_of_deltas))
    expected = block.each(forward_view)
    assert_close(returns, expected)
    assert_close(lambda_returns(block.rewards, block.next_values, **block.ends, gamma=gamma, lam=lam), expected)


@given(blocks(), GAMMAS)
@settings(max_examples=60, deadline=None)
def test_discounted_returns_any_ends_equal_definition(block: Block, gamma: float):
    discounted = discounted_returns(block.rewards, block.next_values, **block.ends, gamma=gamma)
    assert_close(discounted, block.each(lambda t, i: block.n_step(t, i, 99, gamma)))
    monte_carlo = discounted_returns(block.rewards, **block.ends, gamma=gamma)
    assert_close(
        monte_carlo,
        block.each(
            lambda t, i: sum(gamma**k * block.rewards[s, i].item() for k, s in enumerate(block.rest_of_episode(t, i)))
        ),
    )


@given(blocks(), GAMMAS, LAMBDAS, st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_vtrace_any_ends_equals_equation_one(block: Block, gamma: float, lam: float, rho_bar: float, c_bar: float):
    generator = torch.Generator().manual_seed(0)
    behavior, target = torch.randn((2, *block.rewards.shape), generator=generator, dtype=torch.float64)
    behavior[~block.valid] = torch.nan
    ratio = (target - behavior).exp()

    def vs(t: int, i: int) -> float:
        total, trace = block.values[t, i].item(), 1.0
        for row in block.rest_of_episode(t, i):
            total += trace * min(rho_bar, ratio[row, i].item()) * block.delta(row, i, gamma)
            trace *= gamma * lam * min(c_bar, ratio[row, i].item())
        return total

    def advantage(t: int, i: int) -> float:
        goes_on = len(block.rest_of_episode(t, i)) > 1
        next_vs = vs(t + 1, i) if goes_on else block.bootstrap(t, i)
        target = block.rewards[t, i].item() + gamma * next_vs
        return min(rho_bar, ratio[t, i].item()) * (target - block.values[t, i].item())

    actual_vs, actual_advantages = vtrace(
        behavior,
        target,
        block.rewards,
        block.values,
        block.next_values,
        **block.ends,
        gamma=gamma,
        lam=lam,
        rho_bar=rho_bar,
        c_bar=c_bar,
    )
    assert_close(actual_vs, block.each(vs))
    assert_close(actual_advantages, block.each(advantage))


@given(blocks(), GAMMAS)
@settings(max_examples=30, deadline=None)
def test_vtrace_on_policy_equals_lambda_one_returns(block: Block, gamma: float):
    logprobs = torch.zeros_like(block.rewards)
    vs, advantages = vtrace(
        logprobs, logprobs, block.rewards, block.values, block.next_values, **block.ends, gamma=gamma
    )
    expected_advantages, expected = gae(
        block.rewards, block.values, block.next_values, **block.ends, gamma=gamma, lam=1.0
    )
    assert_close(vs, expected)
    assert_close(advantages, expected_advantages)


@given(blocks(), GAMMAS, LAMBDAS)
@settings(max_examples=30, deadline=None)
def test_gae_dummy_rows_added_change_nothing_else(block: Block, gamma: float, lam: float):
    """A dummy row after every end (gymnasium's next-step autoreset), as one environment at a time sees it."""
    advantages, _ = gae(block.rewards, block.values, block.next_values, **block.ends, gamma=gamma, lam=lam)
    for i in range(block.rewards.shape[1]):
        ended = (block.terminated | block.truncated)[:, i]
        rows, real = [], []
        for t in range(len(ended)):
            rows.append(t)
            real.append(True)
            if ended[t]:
                rows.append(t)
                real.append(False)
        column = [x[rows, i : i + 1] for x in (block.rewards, block.values, block.next_values)]
        terminated, truncated = block.terminated[rows, i : i + 1], block.truncated[rows, i : i + 1]
        is_real = torch.tensor(real).unsqueeze(1)
        valid = block.valid[rows, i : i + 1] & is_real
        padded, _ = gae(
            *column, terminated=terminated & is_real, truncated=truncated & is_real, valid=valid, gamma=gamma, lam=lam
        )
        assert_close(padded[is_real], advantages[:, i])


def test_gae_packed_sequences_equal_each_alone():
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 1, 7, 4]
    rewards, values, next_values = torch.randn((3, sum(lengths), 1), generator=generator, dtype=torch.float64)
    ended = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    ended[torch.tensor(lengths).cumsum(0) - 1] = True
    none = torch.zeros_like(ended)
    packed, _ = gae(rewards, values, next_values, terminated=ended, truncated=none, gamma=1.0, lam=0.95)
    alone = [
        gae(r, v, n, terminated=e, truncated=torch.zeros_like(e), gamma=1.0, lam=0.95)[0]
        for r, v, n, e in zip(*(x.split(lengths) for x in (rewards, values, next_values, ended)), strict=True)
    ]
    assert_close(packed, torch.cat(alone))


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers).unsqueeze(1)


def test_gae_truncated_before_large_reward_does_not_leak():
    zeros, none = column(0, 0, 0), column(0, 0, 0).bool()
    advantages, _ = gae(
        column(0, 0, 100), zeros, zeros, terminated=none, truncated=column(1, 0, 0).bool(), gamma=0.99, lam=0.95
    )
    assert advantages[0, 0] == 0.0
    assert advantages[1, 0] == pytest.approx(0.99 * 0.95 * 100)


def test_gae_endless_reward_one_truncated_has_value_of_the_endless_chain():
    """Reward 1 for ever is worth 1 / (1 - γ) = 10 at γ = 0.9; cut at 5 steps and taken as an end it would be 4.1."""
    gamma, values = 0.9, torch.full((5, 1), 10.0)
    ends = {"terminated": column(0, 0, 0, 0, 0).bool(), "truncated": column(0, 0, 0, 0, 1).bool()}
    advantages, returns = gae(torch.ones(5, 1), values, values, **ends, gamma=gamma, lam=0.95)
    torch.testing.assert_close(advantages, torch.zeros(5, 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, values)
    mistaken = discounted_returns(
        torch.ones(5, 1), values, terminated=ends["truncated"], truncated=ends["terminated"], gamma=gamma
    )
    assert mistaken[0, 0] == pytest.approx(4.0951)


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(0.98, 0.95), (0.9, 0.0), (1.0, 1.0)])
def test_gae_constant_value_policy_has_geometric_advantages(terminal: bool, gamma: float, lam: float):
    """A critic that always says v: every δ but the last is r + γv - v, so advantages are geometric sums."""
    v, steps = 4.0, 30
    values = torch.full((steps, 1), v, dtype=torch.float64)
    last = torch.zeros(steps, 1, dtype=torch.bool)
    none = last.clone()
    last[-1] = True
    advantages, _ = gae(
        torch.ones_like(values),
        values,
        values,
        terminated=last if terminal else none,
        truncated=none if terminal else last,
        gamma=gamma,
        lam=lam,
    )
    inner, final = 1 + gamma * v - v, 1 + (0 if terminal else gamma * v) - v
    for t in range(steps):
        left = steps - 1 - t
        expected = sum((gamma * lam) ** k * inner for k in range(left)) + (gamma * lam) ** left * final
        assert advantages[t, 0].item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_gae_parallel_environments_are_independent():
    generator = torch.Generator().manual_seed(2)
    rewards, values, next_values = torch.randn((3, 20, 5), generator=generator)
    terminated, truncated = torch.rand((2, 20, 5), generator=generator) < 0.1
    order = torch.randperm(5, generator=generator)
    plain, _ = gae(rewards, values, next_values, terminated=terminated, truncated=truncated, gamma=0.99, lam=0.95)
    permuted, _ = gae(
        *(x[:, order] for x in (rewards, values, next_values)),
        terminated=terminated[:, order],
        truncated=truncated[:, order],
        gamma=0.99,
        lam=0.95,
    )
    assert torch.equal(permuted, plain[:, order])


def test_gae_low_precision_under_grad_gives_detached_float32():
    x = torch.randn(4, 2, dtype=torch.bfloat16, requires_grad=True)
    none = torch.zeros(4, 2, dtype=torch.bool)
    advantages, returns = gae(x, x, x, terminated=none, truncated=none, gamma=0.99, lam=0.95)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_gae_arguments_are_left_as_they_were():
    generator = torch.Generator().manual_seed(3)
    tensors = [*torch.randn((3, 6, 2), generator=generator), *(torch.rand((3, 6, 2), generator=generator) < 0.5)]
    before = [x.clone() for x in tensors]
    rewards, values, next_values, terminated, truncated, valid = tensors
    gae(rewards, values, next_values, terminated=terminated, truncated=truncated, valid=valid, gamma=0.9, lam=0.9)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("decay", [1.0, 0.99999, 0.999 * 0.95, 1e-30, 0.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 255, 256, 257, 4096])
def test_reverse_scan_long_float32_keeps_precision(decay: float, steps: int):
    generator = torch.Generator().manual_seed(steps)
    x = torch.randn((steps, 2), generator=generator)
    a = torch.full_like(x, decay)
    a[torch.rand((steps, 2), generator=generator) < 0.001] = 0.0
    expected, y = torch.empty(steps, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(steps)):
        y = x[t].double() + a[t].double() * y
        expected[t] = y
    scale = expected.abs().max()
    assert (reverse_scan(x, a).double() - expected).abs().max() <= 2e-6 * scale


def test_reverse_scan_gradient_equals_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x, a = torch.rand((2, 6, 2), generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(reverse_scan, (x.requires_grad_(), a.requires_grad_()))


def test_reverse_scan_long_block_costs_logarithmically_many_operations():
    y = reverse_scan(torch.zeros(4096, 1, requires_grad=True), torch.ones(4096, 1))
    operations, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in operations:
            operations.add(node)
            left.extend(parent for parent, _ in node.next_functions)
    assert len(operations) <= 6 * 12
