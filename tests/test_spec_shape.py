"""Counts of parameters against real models, counts of operations against published ones, and what does not fit."""

import pytest
from pydantic import ValidationError

from palestra.lm.model import Transformer
from palestra.spec.shape import BEYOND_LLAMA, MoESpec, RopeScaling, Shape

SMALL = Shape(layers=3, width=24, heads=4, kv_heads=2, mlp=40, context=32, vocab=50)
EXPERTS = MoESpec(experts=6, active=2, mlp=10)


def llama(width: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int, **changes) -> Shape:
    """A shape of the published runs: Llama 3's vocabulary, a head of its own."""
    return Shape(
        width=width,
        mlp=mlp,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        context=context,
        vocab=128256,
        tied=False,
        **changes,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False},
        {"kv_heads": None},
        {"head_dim": 10},
        {"attention_bias": True},
        {"qk_norm": "head"},
        {"qk_norm": "full", "head_dim": 10},
        {"norm_order": "post"},
        {"norm_order": "both"},
        {"moe": EXPERTS},
        {"moe": EXPERTS.model_copy(update={"gated_shared": 7})},
        {"moe": EXPERTS.model_copy(update={"shared": 2, "bias_rate": 0.1, "activation": "bilinear"}), "tied": False},
    ],
    ids=str,
)
def test_parameters_of_every_variant_equal_the_models(changes):
    shape = SMALL.model_copy(update=changes)

    assert shape.parameters() == sum(p.numel() for p in Transformer(shape).parameters())


def test_active_parameters_leave_out_the_experts_not_chosen():
    shape = SMALL.model_copy(update={"moe": EXPERTS})

    idle = SMALL.layers * (EXPERTS.experts - EXPERTS.active) * 3 * SMALL.width * EXPERTS.mlp
    assert shape.parameters() - shape.parameters(active=True) == idle
    assert SMALL.parameters(active=True) == SMALL.parameters()


def test_parameters_of_smollm2_135m_are_134515008():
    shape = Shape(layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=8192, vocab=49152)

    assert shape.parameters() == 134_515_008


# Marin's speedruns: model, batch, steps and `model_flops` as the `speedrun_results.json` of each gives them (those of
# moe_300m to six digits).
@pytest.mark.parametrize(
    ("shape", "batch", "steps", "published"),
    [
        pytest.param(llama(512, 1792, 6, 8, 8, 4096), 128, 4959, 1.777337490915459e18, id="adamw_130m"),
        pytest.param(llama(256, 896, 8, 4, 4, 1024), 512, 6000, 8.43291058765824e17, id="llama_75m"),
        pytest.param(llama(2048, 7168, 16, 16, 8, 4096), 256, 22888, 2.071634014279733e20, id="muonh_qwen3_1_2b"),
        pytest.param(llama(512, 1792, 6, 8, 8, 4096), 128, 5940, 2.1289341996446515e18, id="attn_gate_130m"),
        pytest.param(
            llama(768, 768, 12, 12, 12, 1024, moe=MoESpec(experts=32, active=4, mlp=768)),
            1024,
            3000,
            4.36257e18,
            id="moe_300m",
        ),
    ],
)
def test_flops_of_published_runs_equal_to_six_digits(shape, batch, steps, published):
    flops = 3 * shape.flops_per_token(shape.context) * batch * steps * shape.context

    assert f"{flops:.5e}" == f"{published:.5e}"


# OLMoE-like sizes of Marin's sweep: active and total parameters, and FLOPs of 20 tokens an active parameter at 4,096.
@pytest.mark.parametrize(
    ("shape", "batch", "active", "total", "steps", "flops"),
    [
        (
            llama(768, 1, 8, 6, 3, 4096, moe=MoESpec(experts=8, active=1, mlp=384)),
            64,
            "2.183e+08",
            "2.678e+08",
            16_654,
            "4.46e+18",
        ),
        (
            llama(2048, 1, 16, 16, 8, 4096, moe=MoESpec(experts=64, active=8, mlp=1024)),
            64,
            "1.534e+09",
            "7.171e+09",
            117_045,
            "2.84e+20",
        ),
    ],
    ids=["olmoe_s", "olmoe_1b7b"],
)
def test_active_parameters_of_a_published_sweep_give_its_steps_and_flops(shape, batch, active, total, steps, flops):
    counted = shape.parameters(active=True)

    assert (f"{counted:.3e}", f"{shape.parameters():.3e}") == (active, total)
    assert 20 * counted // (batch * shape.context) == steps
    assert f"{3 * shape.flops_per_token(4096) * batch * steps * 4096:.2e}" == flops


def test_flops_of_matrices_are_two_a_weight_and_grow_with_the_context():
    """Without scores every active weight but the embedding costs two operations."""
    shape = SMALL.model_copy(update={"tied": False, "moe": EXPERTS})
    norms_and_embedding = shape.width * (2 * shape.layers + 1 + 50)

    assert shape.flops_per_token(0) == 2 * (shape.parameters(active=True) - norms_and_embedding)
    assert shape.flops_per_token(10) - shape.flops_per_token(0) == shape.layers * 10 * (4 * 24 + 3 * 4)


def test_shape_without_vocabulary_counts_nothing():
    with pytest.raises(ValueError, match="vocabulary"):
        SMALL.model_copy(update={"vocab": None}).parameters()
    with pytest.raises(ValueError, match="vocab"):
        Transformer(SMALL.model_copy(update={"vocab": None}))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"heads": 5, "kv_heads": 5}, ("heads",)),
        ({"kv_heads": 3}, ("kv_heads",)),
        ({"head_dim": 7}, ("head_dim",)),
        ({"moe": MoESpec(experts=2, active=3, mlp=8)}, ("moe", "active")),
        ({"rope_scaling": RopeScaling(type="llama3", factor=2.0, low=4.0)}, ("rope_scaling", "low")),
        ({"rope_scaling": RopeScaling(type="linear", factor=2.0, low=2.0)}, ("rope_scaling", "low")),
        (
            {"rope_scaling": RopeScaling(type="llama3", factor=2.0, attention_factor=1.0)},
            ("rope_scaling", "attention_factor"),
        ),
        ({"window_from": 1}, ("window_from",)),
        ({"local_rope_theta": 1e4}, ("local_rope_theta",)),
        ({"moe": EXPERTS, "activation": "geglu"}, ("activation",)),
        ({"moe": MoESpec(experts=2, active=1, mlp=8, shared=1, gated_shared=8)}, ("moe", "gated_shared")),
        ({"full_layers": [1]}, ("full_layers",)),
        ({"window": 8, "full_layers": [3]}, ("full_layers",)),
        ({"nope_layers": [3]}, ("nope_layers",)),
        ({"mlp": None}, ("mlp",)),
    ],
    ids=str,
)
def test_problems_of_fields_that_do_not_fit_are_named(changes, path):
    assert [conflict.path for conflict in SMALL.model_copy(update=changes).all_conflicts()] == [path]
    assert SMALL.all_conflicts() == []
    assert SMALL.model_copy(update={"mlp": None, "moe": EXPERTS}).all_conflicts() == []


def test_rope_scaling_of_yarn_has_its_own_fast_end():
    assert RopeScaling(type="yarn", factor=4.0).high == 32
    assert RopeScaling(type="yarn", factor=4.0, high=8.0).high == 8
    assert RopeScaling(type="llama3", factor=4.0).high == 4


def test_window_applies_from_its_first_layer():
    shape = SMALL.model_copy(update={"window": 8, "window_from": 2})

    assert [shape.window_of(layer) for layer in range(3)] == [None, None, 8]
    shape = SMALL.model_copy(update={"window": 8, "full_layers": [1]})
    assert [shape.window_of(layer) for layer in range(3)] == [8, None, 8]


def test_plain_data_of_a_shape_has_later_fields_only_where_they_are_set():
    data = Shape.model_validate(SMALL.model_dump() | {"nope_layers": [1]}).model_dump()
    assert data == SMALL.model_dump() | {"nope_layers": [1]}
    assert not {"full_layers", *BEYOND_LLAMA} & SMALL.model_dump().keys()
    assert Shape.model_validate(data).beyond_llama == ["nope_layers"]


def test_unknown_field_of_a_shape_is_refused():
    with pytest.raises(ValidationError, match="widht"):
        Shape(layers=1, widht=8, heads=1, mlp=8, context=8)
