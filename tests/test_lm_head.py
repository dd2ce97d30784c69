"""The fused head against the plain log-softmax: values, gradients, precision, and what it never holds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from palestra.lm import head
from palestra.lm.batch import Batch, score
from palestra.lm.head import chunk_rows, logits, token_logprobs, weighted_logprob
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

TOKENS, WIDTH, VOCAB = 21, 12, 37


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the matrix and targets; logits have a deviation of about 3."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    unembed = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), unembed.to(dtype).requires_grad_(), targets


def naive(hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ unembed.t() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def with_gradients(function, hidden: Tensor, unembed: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    """Both results, and the gradients of a sum that weights every token's results differently."""
    logprobs, entropy = function(hidden, unembed, targets, temperature)
    weights = torch.linspace(-1, 2, len(hidden)).to(logprobs)
    total = (weights * logprobs).sum() + (weights.flip(0) * entropy).sum()
    return [logprobs, entropy, *torch.autograd.grad(total, [hidden, unembed])]


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation gave."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return out


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.sampled_from([0.3, 1.0, 2.5]), st.integers(1, 30 * VOCAB))
def test_token_logprobs_of_any_chunk_size_equal_the_plain_ones_with_gradients(tokens, temperature, elements):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_ELEMENTS", elements)
        found = with_gradients(token_logprobs, *inputs(tokens=tokens), temperature)
    expected = with_gradients(naive, *inputs(tokens=tokens), temperature)

    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("entropy", [True, False])
def test_token_logprobs_pass_gradcheck(entropy, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 4 * VOCAB)
    hidden, unembed, targets = inputs(tokens=9)

    def results(h: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return token_logprobs(h, u, targets, 0.8, entropy=entropy)[: 1 + entropy]

    assert torch.autograd.gradcheck(results, (hidden, unembed), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.integers(1, 30 * VOCAB), st.sampled_from([(True, True), (True, False), (False, True)]))
def test_weighted_logprob_and_its_gradients_are_those_of_the_plain_sum(tokens, elements, wanted):
    hidden, unembed, targets = inputs(tokens=tokens)
    asked = [t for t, want in zip((hidden, unembed), wanted, strict=True) if want]
    for tensor, want in zip((hidden, unembed), wanted, strict=True):
        tensor.requires_grad_(want)
    weights = torch.linspace(-1, 2, tokens, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_ELEMENTS", elements)
        total = weighted_logprob(hidden, unembed, targets, weights)
        found = [total, *torch.autograd.grad(total / 3, asked)]
    plain = (naive(hidden, unembed, targets, 1.0)[0] * weights).sum()
    for mine, theirs in zip(found, [plain, *torch.autograd.grad(plain / 3, asked)], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(weighted_logprob(hidden, unembed, targets, weights), plain.detach())


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_token_logprobs_in_fp32_are_as_near_to_float64_as_the_plain_ones(rows, monkeypatch):
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", rows * VOCAB)
    exact = with_gradients(naive, *inputs(), 0.7)
    plain = with_gradients(naive, *inputs(torch.float32), 0.7)
    fused = with_gradients(token_logprobs, *inputs(torch.float32), 0.7)

    for truth, theirs, mine in zip(exact, plain, fused, strict=True):
        assert mine.dtype == torch.float32
        error, their_error = ((x.double() - truth).abs().max() / truth.abs().max() for x in (mine, theirs))
        assert error <= max(2 * their_error, 1e-6)


def test_token_logprobs_of_bf16_states_sum_in_fp32_into_the_fp32_matrix(monkeypatch):
    """Many tokens in small chunks: a sum kept in bf16 would lose most of them."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 8 * VOCAB)
    hidden, unembed, targets = inputs(torch.float32, tokens=3000)
    half = hidden.detach().bfloat16().requires_grad_()

    logprobs, entropy = token_logprobs(half, unembed, targets)
    (logprobs.sum() + entropy.sum()).backward()

    rounded = [half.detach().double(), unembed.detach().bfloat16().double()]
    exact = with_sums(*(t.requires_grad_() for t in rounded), targets)
    assert (logprobs.dtype, entropy.dtype, half.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert unembed.grad.dtype == torch.float32
    assert (logprobs - exact[0]).abs().max() < 0.05  # the CPU rounds logits of up to 15 to bf16
    relative = (unembed.grad - exact[3]).norm() / exact[3].norm()
    assert relative < 4e-3, relative


def with_sums(hidden: Tensor, unembed: Tensor, targets: Tensor) -> list[Tensor]:
    logprobs, entropy = naive(hidden, unembed, targets, 1.0)
    return [logprobs, entropy, *torch.autograd.grad(logprobs.sum() + entropy.sum(), [hidden, unembed])]


def test_token_logprobs_of_peaked_distributions_stay_finite():
    hidden = torch.eye(2).mul(1e4).requires_grad_()
    unembed = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], requires_grad=True)

    logprobs, entropy = token_logprobs(hidden, unembed, torch.tensor([0, 2]))
    (logprobs.sum() + entropy.sum()).backward()

    assert logprobs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.isfinite().all()
    assert unembed.grad.isfinite().all()


def test_token_logprobs_without_entropy_give_zeros_for_it():
    hidden, unembed, targets = inputs()

    logprobs, entropy = token_logprobs(hidden, unembed, targets, entropy=False)

    assert not entropy.any()
    assert not entropy.requires_grad
    torch.testing.assert_close(logprobs, token_logprobs(hidden, unembed, targets)[0], rtol=0, atol=0)


@pytest.mark.parametrize("used", [0, 1])
def test_token_logprobs_of_which_one_result_is_used_give_its_gradient(used):
    found, expected = (
        torch.autograd.grad(function(*tensors, 0.8)[used].sum(), tensors[:2])
        for function, tensors in ((token_logprobs, inputs()), (naive, inputs()))
    )

    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("frozen", ["hidden", "unembed"])
def test_token_logprobs_give_no_gradient_to_what_is_frozen(frozen):
    hidden, unembed, targets = inputs()
    expected = torch.autograd.grad(token_logprobs(hidden, unembed, targets)[0].sum(), [hidden, unembed])
    (hidden if frozen == "hidden" else unembed).requires_grad_(False)

    token_logprobs(hidden, unembed, targets)[0].sum().backward()

    assert (hidden.grad is None) == (frozen == "hidden")
    assert (unembed.grad is None) == (frozen == "unembed")
    torch.testing.assert_close(
        unembed.grad if frozen == "hidden" else hidden.grad, expected[1 if frozen == "hidden" else 0]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_step_never_holds_logits_of_all_tokens(dtype, monkeypatch):
    vocab, tokens = 2048, 96
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 8 * vocab)
    model = Transformer(Shape(layers=1, width=16, heads=2, mlp=16, context=tokens, vocab=vocab), dtype)
    model.initialize(torch.Generator().manual_seed(0))
    batch = Batch.pack([list(range(tokens // 2))] * 2)

    with Largest() as largest:
        scored = score(model, batch)
        (scored.logprobs.sum() + scored.entropy.sum()).backward()

    # The largest are the embedding and its gradient (V · D); all logits would be T · V.
    assert largest.elements == vocab * 16
    assert chunk_rows(vocab, torch.device("cpu")) == 8


def test_largest_tensor_of_the_plain_head_is_found():
    """The measure of the test above can see what it looks for, in the backward pass too."""
    hidden, unembed, targets = inputs()

    with Largest() as forward_pass:
        logprobs, _ = naive(hidden, unembed, targets, 1.0)
    with Largest() as backward_pass:
        logprobs.sum().backward()

    assert forward_pass.elements == backward_pass.elements == TOKENS * VOCAB


def test_logits_are_fp32_for_half_precision_and_keep_what_is_wider():
    hidden, unembed, _ = inputs()

    assert logits(hidden.bfloat16(), unembed).dtype == torch.float32
    assert logits(hidden.float(), unembed).dtype == torch.float32
    torch.testing.assert_close(logits(hidden, unembed), hidden @ unembed.t(), rtol=0, atol=0)
