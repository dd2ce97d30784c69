"""LoRA: what is trained, merging and unmerging, adapters alone, PEFT's folders; and the scalar head."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from palestra.errors import PalestraError, UsageError
from palestra.lm.batch import Batch, forward, score
from palestra.lm.lora import (
    LoraLinear,
    adapter_state,
    add_lora,
    frozen_copy,
    load_adapter_state,
    load_peft,
    merged_weights,
    save_peft,
)
from palestra.lm.model import Transformer
from palestra.lm.scorer import ScalarModel
from palestra.spec.lm import LoraSpec
from palestra.spec.shape import MoESpec, Shape

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, mlp=48, context=32, vocab=40, attention_bias=True)
EXPERTS = SHAPE.model_copy(update={"moe": MoESpec(experts=4, active=2, mlp=16, shared=1, bias_rate=0.1)})
SPEC = LoraSpec(rank=3, alpha=6.0)
BATCH = Batch.pack([[1, 2, 3, 4, 5, 6], [7, 8, 9], list(range(20))])


def make(shape: Shape = SHAPE, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(shape, dtype)
    model.initialize(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if name.endswith("norm.weight") else 3)
    return model


def adapted(shape: Shape = SHAPE, spec: LoraSpec = SPEC, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model whose adapters have been trained, so that B is no longer zero."""
    model = make(shape, dtype)
    add_lora(model, spec, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    load_adapter_state(
        model, {name: torch.randn(t.shape, generator=generator) * 0.2 for name, t in adapter_state(model).items()}
    )
    return model


def logprobs(model: Transformer) -> Tensor:
    with torch.no_grad():
        return score(model, BATCH).logprobs


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_new_adapters_change_nothing_and_train_alone(shape):
    model, plain = make(shape), make(shape)
    add_lora(model, SPEC, torch.Generator().manual_seed(1))

    assert torch.equal(logprobs(model), logprobs(plain))
    score(model, BATCH).logprobs.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_state(model))
    assert all(p.grad.any() for name, p in model.named_parameters() if ".lora_b." in name)


def test_adapters_of_a_seed_are_the_same_and_of_parts_their_own():
    one, same, other = (make() for _ in range(3))
    for model, seed in ((one, 1), (same, 1), (other, 2)):
        add_lora(model, SPEC, torch.Generator().manual_seed(seed))
    state = adapter_state(one)

    assert all(torch.equal(t, adapter_state(same)[name]) for name, t in state.items())
    name = "layers.0.attn.qkv.lora_a.q_proj"
    assert not torch.equal(state[name], adapter_state(other)[name])
    assert not torch.equal(state[name], state["layers.0.attn.qkv.lora_a.k_proj"])
    assert state[name].shape == (3, 32)
    assert state["layers.1.attn.qkv.lora_b.v_proj"].shape == (16, 3)
    assert state[name].abs().max() <= 32**-0.5
    assert len(state) == 2 * 7 * 2


def test_adapted_product_is_that_of_each_parts_own_low_rank_change():
    model = adapted(spec=LoraSpec(rank=3, alpha=6.0, targets=["q_proj", "v_proj"]))
    qkv = model.layers[0].attn.qkv
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    change = [
        2.0 * qkv.lora_b["q_proj"] @ qkv.lora_a["q_proj"],
        torch.zeros(16, 32),
        2.0 * qkv.lora_b["v_proj"] @ qkv.lora_a["v_proj"],
    ]

    torch.testing.assert_close(qkv(x), x @ (qkv.weight + torch.cat(change)).t() + qkv.bias)
    assert not isinstance(model.layers[0].mlp.down, LoraLinear)


@pytest.mark.parametrize("shape", [SHAPE, EXPERTS], ids=["dense", "experts"])
def test_merged_weights_make_a_plain_model_that_computes_the_same(shape):
    model, plain = adapted(shape), Transformer(shape)
    before = logprobs(model)

    plain.load_state_dict(merged_weights(model))

    torch.testing.assert_close(logprobs(plain), before, rtol=1e-5, atol=1e-5)
    assert (before - logprobs(make(shape))).abs().max() > 0.1
    assert merged_weights(model)["embed"].data_ptr() == model.embed.data_ptr()


def test_merged_weights_of_a_plain_model_are_its_own():
    model = make()

    assert merged_weights(model).keys() == dict(model.named_parameters()).keys()


def test_adapters_of_half_precision_weights_are_added_in_fp32():
    model = adapted().bfloat16()
    qkv = model.layers[0].attn.qkv

    change = torch.cat([qkv.lora_b[part].double() @ qkv.lora_a[part].double() * 2.0 for part in qkv.parts])

    expected = (qkv.weight.double() + change).bfloat16()
    found = merged_weights(model)["layers.0.attn.qkv.weight"]
    assert found.dtype == torch.bfloat16
    assert (found == expected).double().mean() > 0.999  # FP32 may round a tie the other way


def test_adapted_model_in_bf16_keeps_fp32_adapters_and_their_gradients():
    model = adapted(dtype=torch.bfloat16)

    scored = score(model, BATCH)
    scored.logprobs.sum().backward()

    assert scored.hidden.dtype == torch.bfloat16
    assert {t.grad.dtype for t in model.parameters() if t.requires_grad} == {torch.float32}
    assert (scored.logprobs - logprobs(adapted())).abs().max() < 0.1


def test_adapter_state_loaded_into_another_model_gives_the_same_numbers():
    model, other = adapted(), make()
    add_lora(other, SPEC, torch.Generator().manual_seed(9))

    load_adapter_state(other, copy.deepcopy(adapter_state(model)))

    assert torch.equal(logprobs(model), logprobs(other))


def test_adapter_state_that_does_not_fit_is_refused_by_name():
    model = adapted()
    wider = adapter_state(adapted(spec=LoraSpec(rank=4, alpha=6.0)))
    fewer = adapter_state(adapted(spec=LoraSpec(rank=3, targets=["q_proj"])))

    with pytest.raises(PalestraError, match=r"layers.0.attn.o.lora_a.o_proj is \[4, 32\] and the model's is \[3, 32\]"):
        load_adapter_state(model, wider)
    with pytest.raises(PalestraError, match=r"o_proj is absent and the model's is \[3, 32\]"):
        load_adapter_state(model, fewer)


def test_targets_that_the_model_does_not_have_are_refused_before_anything_changes():
    model = make(SHAPE.model_copy(update={"moe": MoESpec(experts=4, active=2, mlp=16)}))

    with pytest.raises(UsageError, match="no gate_proj and no down_proj outside routed experts; take of q_proj"):
        add_lora(model, LoraSpec(targets=["q_proj", "gate_proj", "down_proj"]), torch.Generator())
    assert not adapter_state(model)
    assert model.embed.requires_grad


DORA = LoraSpec(rank=3, alpha=6.0, dora=True, rslora=True)
WHOLE = LoraSpec(rank=3, targets=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
UNTIED = SHAPE.model_copy(update={"tied": False})


def test_new_dora_adapters_change_nothing_and_have_the_norms_of_rows():
    model = make()
    add_lora(model, DORA, torch.Generator().manual_seed(1))
    qkv = model.layers[0].attn.qkv

    torch.testing.assert_close(logprobs(model), logprobs(make()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(qkv.lora_magnitude["k_proj"], qkv.weight[32:48].norm(dim=1))
    assert qkv.scale == 6.0 / 3**0.5


def test_frozen_copy_in_bf16_is_that_of_the_plain_model_also_beside_dora():
    plain, model = Transformer(SHAPE, torch.bfloat16), Transformer(SHAPE, torch.bfloat16)
    for each in (plain, model):
        each.load_state_dict(make().state_dict())
    add_lora(model, DORA, torch.Generator().manual_seed(1))

    frozen = frozen_copy(model)

    assert torch.equal(logprobs(frozen), logprobs(frozen_copy(plain)))
    assert not adapter_state(frozen)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert adapter_state(model)


def test_dora_product_has_rows_of_the_learned_norms_and_no_gradient_through_their_own():
    qkv = adapted(spec=LoraSpec(rank=3, alpha=6.0, dora=True, targets=["q_proj", "v_proj"])).layers[0].attn.qkv
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    qkv.bias.data.normal_(generator=torch.Generator().manual_seed(3))
    rows, change = [*qkv.weight.split([32, 16, 16])], qkv.lora_b["v_proj"] @ qkv.lora_a["v_proj"] * 2.0
    turned = rows[2] + change
    expected = x @ (turned * (qkv.lora_magnitude["v_proj"] / turned.norm(dim=1).detach())[:, None]).t() + qkv.bias[48:]
    wanted = torch.autograd.grad(expected.square().sum(), qkv.lora_a["v_proj"])[0]

    found = qkv(x)[:, 48:]

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), qkv.lora_a["v_proj"])[0], wanted, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(qkv(x)[:, 32:48], x @ rows[1].t() + qkv.bias[32:48])


@pytest.mark.parametrize("spec", [DORA, WHOLE], ids=["dora", "whole"])
def test_adapters_of_a_richer_form_merge_and_come_back_from_their_folder(tmp_path: Path, spec):
    model, plain, other = adapted(UNTIED, spec), Transformer(UNTIED), make(UNTIED)
    before = logprobs(model)
    save_peft(tmp_path, model, "base/model")

    plain.load_state_dict(merged_weights(model))

    torch.testing.assert_close(logprobs(plain), before, rtol=1e-5, atol=1e-5)
    assert load_peft(tmp_path, other).model_copy(update={"targets": spec.targets}) == spec
    assert torch.equal(logprobs(other), before)
    assert adapter_state(model).keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    assert ("head" in adapter_state(model)) == (spec is WHOLE)


def test_head_that_is_tied_cannot_be_trained_beside_adapters():
    with pytest.raises(UsageError, match=r"lm_head is tied to its embedding: take embed_tokens"):
        add_lora(make(), WHOLE, torch.Generator())


def test_second_adapters_are_refused():
    with pytest.raises(UsageError, match="already"):
        add_lora(adapted(), SPEC, torch.Generator())


PLAIN = SHAPE.model_copy(update={"attention_bias": False})


@pytest.mark.parametrize("shape", [PLAIN, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("targets", ["all", ["q_proj", "v_proj", "down_proj"]], ids=str)
def test_peft_folder_gives_the_adapters_back(tmp_path: Path, targets, shape):
    model = adapted(shape, LoraSpec(rank=3, alpha=5.0, targets=targets))
    save_peft(tmp_path / "adapters", model, "base/model")

    other = make(shape)
    spec = load_peft(tmp_path / "adapters", other)

    assert torch.equal(logprobs(model), logprobs(other))
    assert (spec.rank, spec.alpha) == (3, 5.0)


def test_peft_folder_names_a_gated_shared_expert_as_qwen2_moe_does(tmp_path: Path):
    shape = SHAPE.model_copy(update={"moe": MoESpec(experts=4, active=2, mlp=16, gated_shared=12)})
    save_peft(tmp_path, adapted(shape), "base/model")
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_A.weight" in names


def test_peft_folder_has_the_names_of_peft(tmp_path: Path):
    model = adapted(PLAIN)
    save_peft(tmp_path, model, "base/model")

    weights, config = load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_config.json"

    prefix = "base_model.model.model.layers.1"
    torch.testing.assert_close(
        weights[f"{prefix}.self_attn.k_proj.lora_B.weight"], model.layers[1].attn.qkv.lora_b["k_proj"]
    )
    assert weights[f"{prefix}.mlp.down_proj.lora_A.weight"].shape == (3, 48)
    assert len(weights) == 2 * 7 * 2
    written = json.loads(config.read_text())
    assert (written["r"], written["lora_alpha"], written["peft_type"]) == (3, 6.0, "LORA")
    assert "up_proj" in written["target_modules"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_qalora": True}, "use_qalora: true"),
        ({"modules_to_save": ["score"]}, "expected modules_to_save of embed_tokens, lm_head"),
        ({"modules_to_save": ["embed_tokens"]}, "without ensure_weight_tying"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
        ({"target_modules": ".*attn.*"}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
        ({"modules_to_save": 5}, "expected modules_to_save of embed_tokens, lm_head, got 5"),
        ({"r": None}, "r = None: Input should be a valid integer"),
        ({"r": 0, "lora_alpha": "8"}, "r = 0: .*, lora_alpha = '8': "),
    ],
    ids=str,
)
def test_peft_adapters_of_another_form_are_refused_by_name(tmp_path: Path, changes, message):
    save_peft(tmp_path, adapted(PLAIN), "base/model")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))

    with pytest.raises(UsageError, match=message):
        load_peft(tmp_path, make(PLAIN))


def test_peft_weights_beyond_the_targets_are_refused(tmp_path: Path):
    save_peft(tmp_path, adapted(PLAIN), "base/model")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj"]}))

    with pytest.raises(PalestraError, match=r"no place for .*down_proj"):
        load_peft(tmp_path, make(PLAIN))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{", "is not valid JSON"),
        ("adapter_config.json", b"[]", "is not a mapping"),
        ("adapter_model.safetensors", b"", "truncated or damaged"),
    ],
)
def test_damaged_peft_folder_is_refused_by_file(tmp_path: Path, name, content, message):
    save_peft(tmp_path, adapted(PLAIN), "base/model")
    (tmp_path / name).write_bytes(content)

    with pytest.raises(PalestraError, match=f"{name}.* {message}"):
        load_peft(tmp_path, make(PLAIN))


def test_peft_folder_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match=r"has no adapter_config\.json"):
        load_peft(tmp_path, make())


def test_saving_adapters_of_a_plain_model_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="no LoRA adapters"):
        save_peft(tmp_path, make(), "base/model")


def test_scalar_model_gives_zero_at_first_and_then_a_number_of_each_hidden_state():
    model = ScalarModel(make(dtype=torch.bfloat16))

    assert not model.values(BATCH).any()
    model.value.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    values = model.values(BATCH)

    hidden = forward(model.transformer, BATCH).hidden
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, hidden.float() @ model.value.weight[0])
    assert model.state_dict()["value.weight"].shape == (1, 32)


def test_sequence_scores_are_the_values_of_the_last_tokens_whatever_is_packed_with_them():
    model = ScalarModel(make())
    model.value.weight.data.normal_(generator=torch.Generator().manual_seed(0))

    scores = model.scores_of(forward(model.transformer, BATCH), BATCH)
    alone = BATCH.select([1])

    torch.testing.assert_close(scores, model.values(BATCH)[[5, 8, 28]])
    again = model.scores_of(forward(model.transformer, alone), alone)
    torch.testing.assert_close(scores[[1]], again, rtol=1e-5, atol=1e-5)
    scores.sum().backward()
    assert model.value.weight.grad.any()
    assert model.transformer.embed.grad.any()
