"""The transformer over packed sequences: attention, rotary positions, batches, gradients that no packing changes."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_cases import SHAPE, VARIANTS, gradients, make, sequences
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from palestra.lm.attention import PackedAttention
from palestra.lm.batch import Batch, forward, score
from palestra.lm.layers import RMSNorm, frequencies, rotate
from palestra.lm.model import Transformer
from palestra.lm.ranks import Ranks
from palestra.spec.shape import RopeScaling

LENGTHS = [7, 1, 12, 8, 30, 9, 2]


def brute_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """Attention token by token, in float64."""
    out, start, share = torch.zeros_like(q), 0, q.shape[1] // k.shape[1]
    for length in lengths:
        for t in range(start, start + length):
            first = start if window is None else max(start, t - window + 1)
            for head in range(q.shape[1]):
                scores = k[first : t + 1, head // share] @ q[t, head] / math.sqrt(q.shape[2])
                out[t, head] = scores.softmax(0) @ v[first : t + 1, head // share]
        start += length
    return out


def micro_batches(batch: Batch, max_tokens: int, group: int = 1) -> list[Batch]:
    return [part for part, _ in Ranks().micro_batches(batch, max_tokens, group)]


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Equal to the tolerance: the norm of the difference over the norm of each tensor."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error <= tolerance, (name, error)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=7),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([None, 1, 3, 8, 30]),
)
def test_attention_of_any_mix_of_lengths_equals_brute_force(lengths, heads, window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), h, 6, dtype=torch.float64) for h in (heads[0], heads[1], heads[1]))

    found = PackedAttention(bounds(lengths), list(lengths))(0, q, k, v, window)

    torch.testing.assert_close(found, brute_attention(q, k, v, lengths, window), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_gradients_equal_brute_force(window):
    lengths = [5, 11, 3, 6, 11]
    torch.manual_seed(0)
    inputs = [torch.randn(sum(lengths), h, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    weights = torch.randn(sum(lengths), 4, 4, dtype=torch.float64)

    found = torch.autograd.grad((PackedAttention(bounds(lengths), lengths)(0, *inputs, window) * weights).sum(), inputs)

    # The brute force writes into a tensor; its gradients by differences of the output along random directions.
    for tensor, gradient in zip(inputs, found, strict=True):
        direction = torch.randn_like(tensor)
        ends = []
        for step in (1e-5, -1e-5):
            moved = [(t + step * direction if t is tensor else t).detach() for t in inputs]
            ends.append((brute_attention(*moved, lengths, window) * weights).sum())
        torch.testing.assert_close((gradient * direction).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-7, atol=1e-8)


def test_attention_blocks_hold_little_padding():
    torch.manual_seed(0)
    lengths = torch.randint(1, 400, (60,)).tolist()

    blocks = PackedAttention(bounds(lengths), lengths)._buckets

    assert sum(block.numel() for block in blocks) <= sum(lengths) * 4 / 3


@pytest.mark.parametrize(
    ("scaling", "theirs"),
    [
        (None, {"rope_type": "default"}),
        (RopeScaling(type="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            RopeScaling(type="llama3", factor=8.0, original_context=256, low=1.0, high=4.0),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 256,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        ),
        (
            RopeScaling(type="yarn", factor=4.0, original_context=256),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (
            RopeScaling(type="yarn", factor=16.0, original_context=64, low=2.0, high=9.0, attention_factor=1.3),
            {
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 64,
                "beta_slow": 2.0,
                "beta_fast": 9.0,
                "attention_factor": 1.3,
            },
        ),
        (  # both ends of the ramp lie before the first dimension
            RopeScaling(type="yarn", factor=4.0, original_context=8, low=2.0, high=16.0, truncate=False),
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "beta_slow": 2.0,
                "beta_fast": 16.0,
                "truncate": False,
            },
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_rope_frequencies_equal_those_of_transformers(scaling, theirs, dim):
    shape = SHAPE.model_copy(update={"head_dim": dim, "rope_theta": 5e5, "rope_scaling": scaling})
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 5e5, **theirs},
    )

    found, factor = frequencies(shape)

    if scaling is None:
        expected, expected_factor = 5e5 ** -(torch.arange(0, dim, 2) / dim), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_rotate_turns_each_pair_of_halves_by_its_angle():
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)

    found = rotate(x, angles.cos(), angles.sin())

    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], -1))


def test_rotation_of_far_positions_stays_exact_in_half_precision():
    """Angles of position 100,000 need FP32 even where the model computes in bf16."""
    model = Transformer(SHAPE, torch.bfloat16).to(torch.bfloat16)
    cos, _ = model.rotation(torch.tensor([100_000]))

    expected = (100_000 * 10_000 ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)).cos()
    torch.testing.assert_close(cos[0].double(), expected, rtol=0, atol=0.01)


def test_rms_norm_has_root_mean_square_one_times_its_weight():
    torch.manual_seed(0)
    norm, x = RMSNorm(16, 1e-6), torch.randn(4, 16) * 5

    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(4), rtol=1e-5, atol=0)
    norm.weight.data.fill_(3.0)
    torch.testing.assert_close(norm(x), 3 * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt())


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_equal_one_by_one_with_their_gradients(variant):
    model, texts = make(VARIANTS[variant]), sequences(LENGTHS)
    packed, alone = Batch.pack(texts), [Batch.pack([text]) for text in texts]

    found, expected = score(model, packed), [score(model, batch) for batch in alone]
    assert_same(
        {"hidden": found.hidden, "logprobs": found.logprobs},
        {
            "hidden": torch.cat([e.hidden for e in expected]),
            "logprobs": torch.cat([e.logprobs for e in expected]),
        },
        1e-6,
    )
    assert_same(gradients(model, [packed]), gradients(model, alone), 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_sequences_in_double_precision_equal_one_by_one_to_rounding(variant):
    """Far below FP32's rounding: nothing but rounding differs between packings."""
    model, texts = make(VARIANTS[variant], torch.float64).double(), sequences(LENGTHS)

    packed, alone = Batch.pack(texts), [Batch.pack([text]) for text in texts]

    found = score(model, packed).logprobs
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.cat([score(model, b).logprobs for b in alone]), rtol=0, atol=1e-12)
    assert_same(gradients(model, [packed]), gradients(model, alone), 1e-12)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 120), st.integers(0, 1000))
def test_gradients_do_not_depend_on_the_split_into_micro_batches(lengths, max_tokens, seed):
    model, batch = make(VARIANTS["qwen2"]), Batch.pack(sequences(lengths, seed))

    assert_same(gradients(model, micro_batches(batch, max_tokens)), gradients(model, [batch]), 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_changing_one_sequence_leaves_the_others_equal_to_the_bit(variant):
    model, texts = make(VARIANTS[variant]), sequences(LENGTHS)
    changed = [*texts[:2], [(token + 1) % 50 for token in texts[2]], *texts[3:]]
    start = sum(LENGTHS[:2])

    before, after = (forward(model, Batch.pack(t)).hidden for t in (texts, changed))

    others = torch.ones(len(before), dtype=torch.bool)
    others[start : start + LENGTHS[2]] = False
    assert torch.equal(before[others], after[others])
    assert (before[~others] != after[~others]).any(-1).all()


def test_changing_a_token_leaves_those_before_it_and_those_past_the_window():
    model = make(SHAPE.model_copy(update={"window": 4, "layers": 2}))
    text = sequences([30])[0]
    changed = [*text[:10], (text[10] + 1) % 50, *text[11:]]

    before, after = (forward(model, Batch.pack([t])).hidden for t in (text, changed))

    # Two layers of window 4 carry a token 2 · 3 places on.
    assert (before != after).any(-1).nonzero()[:, 0].tolist() == list(range(10, 17))


def test_attention_is_told_its_layer_and_that_layers_window():
    model, batch, seen = make(VARIANTS["qwen2"]), Batch.pack(sequences([9])), []
    packed = PackedAttention(batch.cu_seqlens, batch.lengths)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        seen.append((layer, window))
        return packed(layer, q, k, v, window)

    hidden = model(batch.tokens, batch.positions, attend).hidden

    assert seen == [(0, None), (1, 5), (2, 5)]
    assert torch.equal(hidden, forward(model, batch).hidden)


@pytest.mark.parametrize("variant", ["llama", "experts"])
def test_activation_checkpointing_gives_the_same_gradients(variant):
    model, batch = make(VARIANTS[variant]), Batch.pack(sequences(LENGTHS))
    expected = gradients(model, [batch])
    model.checkpointing = lambda layer: layer != 1

    assert_same(gradients(model, [batch]), expected, 0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_arithmetic_keeps_master_weights_and_gradients_in_fp32(variant):
    model, half = make(VARIANTS[variant]), make(VARIANTS[variant], torch.bfloat16)
    batch = Batch.pack(sequences(LENGTHS))

    found, expected = score(half, batch), score(model, batch)

    assert found.hidden.dtype == torch.bfloat16
    assert found.logprobs.dtype == torch.float32
    assert {g.dtype for g in gradients(half, [batch]).values()} == {torch.float32}
    gap = (found.logprobs - expected.logprobs).abs()
    assert gap.mean() < 0.01
    assert gap.max() < 0.1  # a token may go to another expert


def test_initialise_with_the_same_seed_gives_the_same_weights_of_the_stated_size():
    shape = SHAPE.model_copy(update={"width": 128, "mlp": 256, "layers": 8})
    models = [Transformer(shape) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.initialize(torch.Generator().manual_seed(seed))

    first, again, other = (m.state_dict() for m in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed"], other["embed"])
    assert first["layers.0.attn.qkv.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert first["layers.0.mlp.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert (first["norm.weight"] == 1).all()


def test_score_equals_the_log_softmax_at_the_place_before():
    model, texts = make(VARIANTS["qwen2"]), sequences([6, 3, 9])
    masks = [[1.0, 0, 1, 1, 0, 1], [0, 0, 0.5], [1] * 9]
    batch = Batch.pack(texts, masks)

    scored = score(model, batch, temperature=0.7)

    for i, text in enumerate(texts):
        start = sum(map(len, texts[:i]))
        hidden = forward(model, Batch.pack([text])).hidden
        log_p = (hidden @ model.unembed.t() / 0.7).log_softmax(-1)
        for t in range(len(text)):
            asked = t > 0 and masks[i][t] != 0
            expected = log_p[t - 1, text[t]] if asked else torch.tensor(0.0)
            entropy = -(log_p[t - 1].exp() * log_p[t - 1]).sum() if asked else torch.tensor(0.0)
            torch.testing.assert_close(scored.logprobs[start + t], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(scored.entropy[start + t], entropy, rtol=1e-4, atol=1e-5)


def test_score_of_a_batch_that_asks_nothing_is_zero_and_has_a_gradient():
    model = make(SHAPE)
    batch = Batch.pack(sequences([1, 1]))

    scored = score(model, batch)
    scored.logprobs.sum().backward()

    assert scored.logprobs.tolist() == [0.0, 0.0]
    assert not model.embed.grad.any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=10), st.integers(1, 40), st.sampled_from([1, 2]))
def test_split_of_a_batch_holds_every_sequence_once_with_all_that_belongs_to_it(lengths, max_tokens, group):
    lengths = lengths * group
    texts = sequences(lengths)
    masks = [[float(i + 1)] * n for i, n in enumerate(lengths)]
    batch = Batch.pack(texts, masks, {"advantage": masks}, {"reward": list(range(len(texts)))})

    parts = micro_batches(batch, max_tokens, group)

    seen = []
    for part in parts:
        assert sum(part.lengths) <= max(max_tokens, max(batch.group_sizes(group)))
        for row, start in enumerate(part.cu_seqlens[:-1].tolist()):
            place = slice(start, start + part.lengths[row])
            number = int(part.per_sequence["reward"][row])
            assert part.tokens[place].tolist() == texts[number]
            assert part.per_token["advantage"][place].tolist() == masks[number]
            assert part.loss_mask[place].tolist() == [0.0, *masks[number][1:]]
            seen.append(number)
    assert sorted(seen) == list(range(len(texts)))
    firsts = [number for number in seen if number % group == 0]
    assert all(seen[seen.index(n) : seen.index(n) + group] == list(range(n, n + group)) for n in firsts)


def test_batch_says_where_sequences_and_tokens_are():
    batch = Batch.pack([[5, 6, 7], [8], [9, 10]])

    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert batch.token_index([2, 0]).tolist() == [4, 5, 0, 1, 2]
    assert len(batch) == 3


def test_select_takes_sequences_in_the_order_asked():
    batch = Batch.pack([[5, 6, 7], [8], [9, 10]], per_sequence={"reward": [0.1, 0.2, 0.3]})

    chosen = batch.select([2, 0])

    assert chosen.tokens.tolist() == [9, 10, 5, 6, 7]
    assert chosen.lengths == [2, 3]
    torch.testing.assert_close(chosen.per_sequence["reward"], torch.tensor([0.3, 0.1]))


def test_pack_leaves_what_it_is_given_as_it_is():
    mask = torch.ones(3).numpy()

    Batch.pack([[1, 2, 3]], [mask])

    assert mask.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": []}, "at least one token"),
        ({"sequences": [[1], []]}, "at least one token"),
        ({"sequences": [[1, 2]], "loss_masks": [[1.0]]}, "one value a token"),
        ({"sequences": [[1, 2]], "per_token": {"advantage": [[1.0, 2.0], [3.0]]}}, "one value a token"),
        ({"sequences": [[1, 2]], "per_sequence": {"reward": [1.0, 2.0]}}, "one value a sequence"),
    ],
)
def test_pack_of_what_does_not_fit_says_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        Batch.pack(**arguments)


def test_split_into_groups_that_do_not_come_out_even_says_so():
    with pytest.raises(ValueError, match="do not divide into groups of 2"):
        micro_batches(Batch.pack([[1], [2], [3]]), 10, group=2)
