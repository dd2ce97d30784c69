"""PPO's losses and the KL estimators: tables by hand, exact enumeration, gradients, masks, one compiled graph."""

import math

import pytest
import torch
from torch import Tensor

from palestra.rl import kl
from palestra.rl.distributions import Categorical
from palestra.rl.losses import explained_variance, masked_mean, ppo_policy_terms, value_loss

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def categorical_kl(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """KL(p‖q) by its definition."""
    log_p, log_q = logits_p.log_softmax(-1), logits_q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (0.5, 1.0, -0.5, True),
        (1.0, 1.0, -1.0, True),
        (1.5, 1.0, -1.2, False),
        (0.5, -1.0, 0.8, False),
        (1.0, -1.0, 1.0, True),
        (1.5, -1.0, 1.5, True),
    ],
)
def test_ppo_policy_terms_one_element_equals_table(ratio: float, advantage: float, loss: float, has_gradient: bool):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    terms = ppo_policy_terms(logprobs, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    # d(-r·A) / d log π = -r·A
    assert logprobs.grad.item() == pytest.approx(-ratio * advantage if has_gradient else 0.0)
    assert terms.clipped.item() == (ratio != 1.0)
    assert terms.approx_kl.item() == pytest.approx(ratio - 1 - math.log(ratio))
    assert not any(x.requires_grad for x in terms[1:])


@pytest.mark.parametrize(("ratio", "clipped"), [(0.75, True), (0.85, False), (1.25, False), (1.3, True)])
def test_ppo_policy_terms_asymmetric_clip_uses_each_bound(ratio: float, clipped: bool):
    """DAPO's clip-higher: 0.2 below, 0.28 above."""
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    advantage = torch.tensor([1.0 if ratio > 1 else -1.0])
    terms = ppo_policy_terms(logprobs, torch.zeros(1), advantage, clip_low=0.2, clip_high=0.28)
    terms.loss.sum().backward()
    assert terms.clipped.item() == clipped
    assert (logprobs.grad.item() == 0.0) == clipped


def test_ppo_policy_terms_same_policy_has_ratio_exactly_one():
    logits = torch.randn((64, 5), generator=torch.Generator().manual_seed(0))
    logprobs = Categorical(logits).log_prob(torch.arange(64) % 5)
    terms = ppo_policy_terms(logprobs, logprobs.clone(), torch.randn(64), **CLIP)
    assert (terms.ratio == 1.0).all()
    assert (terms.approx_kl == 0.0).all()
    assert not terms.clipped.any()


def test_ppo_policy_terms_gradient_on_policy_equals_policy_gradient():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn((8, 4), generator=generator, dtype=torch.float64, requires_grad=True)
    actions = torch.randint(4, (8,), generator=generator)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    logprobs = Categorical(logits).log_prob(actions)
    (clipped,) = torch.autograd.grad(
        ppo_policy_terms(logprobs, logprobs.detach(), advantages, **CLIP).loss.mean(), logits, retain_graph=True
    )
    (plain,) = torch.autograd.grad(-(logprobs * advantages).mean(), logits)
    torch.testing.assert_close(clipped, plain)


def random_terms(shape: tuple[int, ...], seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
    return logprobs, old, advantages


def test_ppo_policy_terms_padding_and_order_change_nothing():
    logprobs, old, advantages = random_terms((10,))
    plain = ppo_policy_terms(logprobs, old, advantages, **CLIP)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    garbage = torch.tensor([torch.nan, torch.inf, 1e30], dtype=torch.float64)
    padded = [torch.cat((x[order], garbage)) for x in (logprobs, old, advantages)]
    padded[0].requires_grad_()
    mask = torch.arange(13) < 10
    masked = ppo_policy_terms(*padded, **CLIP, mask=mask)
    for a, b in zip(plain, masked, strict=True):
        torch.testing.assert_close(a[order], b[:10])
    masked_mean(masked.loss, mask).backward()
    assert torch.equal(padded[0].grad[10:], torch.zeros(3, dtype=torch.float64))
    assert padded[0].grad.isfinite().all()


def test_ppo_policy_terms_micro_batches_sums_add_up_to_whole_batch():
    logprobs, old, advantages = random_terms((12,))
    mask = torch.arange(12) % 3 > 0

    def loss_sum(part: slice) -> Tensor:
        terms = ppo_policy_terms(logprobs[part], old[part], advantages[part], **CLIP, mask=mask[part])
        return terms.loss.sum()

    in_parts = (loss_sum(slice(0, 5)) + loss_sum(slice(5, 6)) + loss_sum(slice(6, 12))) / mask.sum()
    whole = ppo_policy_terms(logprobs, old, advantages, **CLIP, mask=mask)
    torch.testing.assert_close(in_parts, masked_mean(whole.loss, mask))


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_ppo_policy_terms_extreme_ratio_stays_finite(log_ratio: float, advantage: float):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    terms = ppo_policy_terms(logprobs, torch.zeros(1), torch.tensor([advantage]), **CLIP)
    terms.loss.sum().backward()
    assert terms.loss.isfinite().all()
    assert terms.approx_kl.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_ppo_policy_terms_tensor_clip_equals_float_clip():
    inputs = random_terms((50,))
    by_float = ppo_policy_terms(*inputs, clip_low=0.1, clip_high=0.3)
    by_tensor = ppo_policy_terms(
        *inputs, clip_low=torch.tensor(0.1, dtype=torch.float64), clip_high=torch.tensor(0.3, dtype=torch.float64)
    )
    for a, b in zip(by_float, by_tensor, strict=True):
        torch.testing.assert_close(a, b)


def test_masked_mean_nothing_left_is_zero():
    assert masked_mean(torch.tensor([torch.nan, 1.0]), torch.tensor([False, False])) == 0.0


@pytest.mark.parametrize(
    ("value", "old", "expected", "gradient"),
    [
        (3.0, 1.0, 4.0, 4.0),  # (3-1)² = 4 beats the clipped (1.5-1)²: V moved away and is pulled back
        (1.5, 3.0, 2.25, 0.0),  # V moved towards the return by more than the clip allows: (2.5-1)², no gradient
        (1.4, 1.5, 0.16, 0.8),  # within the clip: both are (1.4-1)²
    ],
)
def test_value_loss_clipped_equals_table(value: float, old: float, expected: float, gradient: float):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    loss = value_loss(values, torch.ones(1), torch.tensor([old], dtype=torch.float64), 0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert values.grad.item() == pytest.approx(gradient)


def test_value_loss_unclipped_is_squared_error_with_far_gradient():
    values = torch.tensor([1000.0], requires_grad=True)
    loss = value_loss(values, torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == 1_000_000.0
    assert values.grad.item() == 2000.0


def test_value_loss_clip_without_old_values_raises():
    with pytest.raises(ValueError, match="old values"):
        value_loss(torch.zeros(1), torch.zeros(1), clip=0.2)


def two_policies() -> tuple[Tensor, Tensor]:
    logits_p, logits_q = torch.randn((2, 6), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return logits_p.requires_grad_(), 3.0 * logits_q


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3])
def test_kl_estimator_expected_over_all_actions_is_exact(estimator):
    logits_p, logits_q = two_policies()
    log_p, log_q = torch.log_softmax(logits_p, -1), torch.log_softmax(logits_q, -1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits_p), torch.distributions.Categorical(logits=logits_q)
    )
    torch.testing.assert_close((log_p.exp() * estimator(log_p, log_q)).sum(), exact)
    torch.testing.assert_close(categorical_kl(logits_p, logits_q), exact)
    # The direction matters: KL(q‖p) is another number.
    assert abs(categorical_kl(logits_q, logits_p) - exact) > 0.1


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        (kl.k1, lambda p, q: 0.0 * p.sum()),
        (kl.k2, lambda p, q: categorical_kl(p, q)),
        (kl.k3, lambda p, q: categorical_kl(q, p)),
    ],
)
def test_kl_estimator_expected_gradient_is_as_documented(estimator, divergence):
    logits_p, logits_q = two_policies()
    log_p, log_q = torch.log_softmax(logits_p, -1), torch.log_softmax(logits_q, -1)
    (actual,) = torch.autograd.grad((log_p.detach().exp() * estimator(log_p, log_q)).sum(), logits_p)
    (expected,) = torch.autograd.grad(divergence(logits_p, logits_q), logits_p)
    torch.testing.assert_close(actual, expected)


def test_kl_estimators_hand_numbers_and_direction():
    """log p - log q = ±0.5: k1 = ±0.5, k2 = 0.125, k3 = e^∓0.5 - 1 ± 0.5."""
    log_p, log_q = torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0])
    torch.testing.assert_close(kl.k1(log_p, log_q), torch.tensor([0.5, -0.5]))
    torch.testing.assert_close(kl.k2(log_p, log_q), torch.tensor([0.125, 0.125]))
    torch.testing.assert_close(kl.k3(log_p, log_q), torch.tensor([0.1065307, 0.1487213]))


def test_binary_kl_equals_that_of_two_outcomes_and_is_finite_for_a_certain_token():
    p, q = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64), torch.tensor([0.3, 0.5, 0.1], dtype=torch.float64)
    expected = categorical_kl(torch.stack((p, 1 - p), -1).log(), torch.stack((q, 1 - q), -1).log())
    torch.testing.assert_close(kl.binary_kl(p.log(), q.log()), expected)
    certain = kl.binary_kl(torch.tensor([0.0, -1.0, 0.0]), torch.tensor([-1.0, 0.0, 0.0]))
    assert torch.isfinite(certain).all()
    assert certain[2] == 0


def test_k3_any_log_ratio_is_never_negative():
    x = torch.cat((torch.logspace(-20, 1.9, 100_000), torch.zeros(1)))
    for sign in (-1, 1):
        assert (kl.k3(torch.zeros_like(x), sign * x) >= 0).all()


def test_k3_small_log_ratio_keeps_its_digits():
    x = torch.tensor([1e-3, -1e-3])
    torch.testing.assert_close(kl.k3(torch.zeros(2), x), torch.tensor([5.001667e-7, 4.998334e-7]), rtol=2e-3, atol=0)


def test_k3_huge_log_ratio_clamped_is_finite_and_unclamped_is_not_hidden():
    log_q = torch.tensor([200.0], requires_grad=True)
    assert kl.k3(torch.zeros(1), log_q).isinf().all()
    clamped = kl.k3(torch.zeros(1), log_q, clamp=20.0)
    clamped.sum().backward()
    assert clamped.item() == pytest.approx(math.exp(20) - 21)
    assert log_q.grad.item() == 0.0
    assert kl.k1(torch.zeros(1), torch.tensor([-1e4]), clamp=20.0).item() == 20.0


def whole_loss(logits: Tensor, values: Tensor, batch: tuple[Tensor, ...], clip: Tensor) -> Tensor:
    actions, old_logprobs, advantages, returns = batch
    policy = Categorical(logits)
    terms = ppo_policy_terms(policy.log_prob(actions), old_logprobs, advantages, clip_low=clip, clip_high=clip)
    return terms.loss.mean() + 0.5 * value_loss(values, returns, returns, clip).mean() - 0.01 * policy.entropy().mean()


@pytest.mark.slow
def test_losses_compiled_are_one_graph_that_a_new_clip_does_not_rebuild():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn((64, 3), generator=generator)
    values, old, advantages, returns = torch.randn((4, 64), generator=generator)
    batch = (torch.randint(3, (64,), generator=generator), old, advantages, returns)
    compiled = torch.compile(whole_loss, fullgraph=True)
    gradients = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for function in (whole_loss, compiled):
            for clip in (0.2, 0.1):
                leaf = logits.clone().requires_grad_()
                loss = function(leaf, values, batch, torch.tensor(clip))
                loss.backward()
                gradients.append((loss.detach(), leaf.grad))
    for eager, graph in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(eager, graph)
    assert gradients[2][0] != gradients[3][0]


def test_explained_variance_of_perfect_constant_and_masked_values():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    assert explained_variance(returns + 5, returns) == 1.0
    assert explained_variance(torch.zeros_like(returns), returns) == 0.0
    assert explained_variance(returns, torch.ones_like(returns)) == 0.0
    assert explained_variance(-returns, returns) == -3.0
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0], dtype=torch.float64), returns, mask) == 1.0
