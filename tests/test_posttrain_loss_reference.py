"""Every preset against its paper's formula in plain loops: the loss, its gradient, and any split into parts."""

import numpy as np
import pytest
import torch
from conftest import fast_only
from posttrain_cases import MAX_NEW_TOKENS, algorithm, random_case
from posttrain_reference import VARIANTS, reference_loss, rows_of

from palestra.posttrain.batch import denominator
from palestra.posttrain.loss import token_losses
from palestra.spec.algorithm import PRESETS

SEEDS = range(4)
ALL = [*PRESETS, *VARIANTS]


def made(name):
    return algorithm(**VARIANTS[name][0]) if name in VARIANTS else algorithm(name)


def batch_loss(spec, batch, now, entropy):
    losses = token_losses(spec, batch, now, entropy).losses
    return (batch.per_token["weights"] * losses).sum() / denominator(batch, spec, MAX_NEW_TOKENS)


@pytest.mark.parametrize("seed", fast_only(SEEDS, 0))
@pytest.mark.parametrize("preset", ALL)
def test_loss_of_random_batch_equals_the_papers_formula(preset, seed):
    spec = made(preset)
    case = random_case(spec, seed)
    now = case.now.clone().requires_grad_()
    loss = batch_loss(spec, case.batch, now, case.entropy)
    loss.backward()

    rows, held = rows_of(case.groups), case.now.numpy()
    parts = {"anchor": case.anchor.numpy(), "reference": case.reference.numpy(), "values": case.values.numpy()}

    def formula(logprobs):
        return reference_loss(preset, rows, logprobs, held, **parts, max_new_tokens=MAX_NEW_TOKENS)

    assert loss.item() == pytest.approx(formula(held), rel=1e-9, abs=1e-12)
    assert loss.item() != 0.0
    slopes = np.zeros(len(held))
    for place in (i for row in rows for i in row.at):
        up, down = held.copy(), held.copy()
        up[place] += 1e-6
        down[place] -= 1e-6
        slopes[place] = (formula(up) - formula(down)) / 2e-6
    np.testing.assert_allclose(now.grad.numpy(), slopes, rtol=1e-5, atol=1e-8)
    assert np.abs(slopes).max() > 1e-4


@pytest.mark.parametrize("preset", ALL)
def test_loss_of_parts_with_the_whole_denominator_adds_up_to_the_whole(preset):
    """Means of micro-batches are the field's most copied bug: sums over any split of the answers must agree."""
    spec = made(preset)
    case = random_case(spec, 11)
    batch, order = case.batch, np.random.default_rng(0).permutation(len(case.batch)).tolist()
    whole = torch.zeros_like(case.now)
    for parts in (1, 2, 5, len(batch)):
        now = case.now.clone().requires_grad_()
        for chosen in np.array_split(order, parts):
            index = batch.token_index(chosen.tolist())
            part = batch.select(chosen.tolist())
            losses = token_losses(spec, part, now[index], case.entropy[index]).losses
            total = (part.per_token["weights"] * losses).sum() / denominator(batch, spec, MAX_NEW_TOKENS)
            total.backward()
        if parts == 1:
            whole = now.grad
        assert now.grad is not None
        torch.testing.assert_close(now.grad, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("preset", ALL)
def test_loss_of_own_tokens_has_ratio_one_and_the_gradient_of_the_policy(preset):
    """On-policy every trust region is open: the gradient is that of -A·log π."""
    spec = made(preset)
    if spec.kl.where == "loss":
        spec = spec.model_copy(update={"kl": algorithm(preset, kl={"where": "none"}).kl})
    case = random_case(spec, 3, spread=0.0)
    now = case.batch.per_token["behavior"].clone().requires_grad_()
    found = token_losses(spec, case.batch, now, case.entropy)
    (case.batch.per_token["weights"] * found.losses).sum().backward()
    expected = -case.batch.per_token["weights"] * case.batch.per_token["advantages"]
    torch.testing.assert_close(now.grad, expected)
    sums = {name: values.sum().item() for name, values in found.terms.items()}
    assert sums["ratio"] == sums["weight"] == sums["weight_squared"] == sums["tokens"] > 0
    assert sums["kl_behaviour"] == sums["clipped_low"] == sums["clipped_high"] == sums["masked"] == 0.0


@pytest.mark.parametrize("preset", ALL)
def test_loss_does_not_read_what_is_not_trained(preset):
    """Prompts, tools, answers that were left out: whatever stands there, nothing changes, not even with NaN."""
    spec = made(preset)
    case = random_case(spec, 5)
    trained = case.batch.loss_mask > 0
    now = case.now.clone().requires_grad_()
    batch_loss(spec, case.batch, now, case.entropy).backward()
    junk = torch.where(trained, case.now, torch.nan).requires_grad_()
    loss = batch_loss(spec, case.batch, junk, torch.where(trained, case.entropy, torch.nan))
    loss.backward()
    torch.testing.assert_close(junk.grad, now.grad)
    assert junk.grad[~trained].abs().sum() == 0
