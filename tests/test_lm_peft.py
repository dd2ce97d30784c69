"""LoRA, rsLoRA, DoRA and modules_to_save beside PEFT itself: outputs, gradients, folders in both directions."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.errors import UsageError
from palestra.lm.batch import Batch, score
from palestra.lm.hf import load_pretrained, save_pretrained
from palestra.lm.lora import adapter_state, add_lora, load_peft, merged_weights, save_peft
from palestra.lm.model import Transformer
from palestra.spec.lm import LoraSpec
from palestra.spec.shape import Shape

peft = pytest.importorskip("peft", reason="needs the package peft, which is not among the development packages")

SHAPE = Shape(
    layers=2, width=32, heads=4, kv_heads=2, mlp=48, context=32, vocab=40, attention_bias=True, tied=False
)  # fmt: skip
TIED = SHAPE.model_copy(update={"tied": True})
TOKENS = [5, 9, 3, 17, 30, 2, 11, 8, 1, 39]
CASES = {
    "lora": (SHAPE, {"rank": 3, "alpha": 5.0}),
    "rslora": (SHAPE, {"rank": 4, "alpha": 5.0, "rslora": True}),
    "dora": (SHAPE, {"rank": 3, "alpha": 5.0, "dora": True}),
    "dora of some": (SHAPE, {"rank": 3, "dora": True, "rslora": True, "targets": ["q_proj", "v_proj", "down_proj"]}),
    "whole": (SHAPE, {"rank": 3, "targets": ["k_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied": (TIED, {"rank": 3, "modules_to_save": ["embed_tokens"], "dora": True}),
}
OF_CASES = pytest.mark.parametrize(("shape", "spec"), CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def base(folder: Path, shape: Shape) -> Path:
    """A saved model with weights of a size that shows differences."""
    model = Transformer(shape)
    generator = torch.Generator().manual_seed(0)
    model.initialize(generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if name.endswith("norm.weight") else 5)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2 * name.endswith("bias"))
    save_pretrained(folder, model, tokenizer=None, eos=())
    return folder


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def ours(folder: Path, spec: dict) -> Transformer:
    """The saved model with adapters that have been trained, so that B is no longer zero."""
    model, generator = load_pretrained(folder).model, torch.Generator().manual_seed(1)
    add_lora(model, LoraSpec(**spec), generator)
    for tensor in adapter_state(model).values():
        tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model


def logprobs(model: Transformer) -> Tensor:
    return score(model, Batch.pack([TOKENS])).logprobs[1:]


def their_logprobs(model: Any) -> Tensor:
    tokens = torch.tensor([TOKENS])
    scores = model(tokens).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, tokens[0, 1:, None])[:, 0]


def named(model: Any) -> dict[str, Tensor]:
    """PEFT's trained parameters, by the names in its files."""

    def stored(name: str) -> str:
        plain = name.replace(".default", "").replace(".modules_to_save", "")
        return plain.removesuffix(".weight") if "magnitude" in plain else plain

    return {stored(name): p for name, p in model.named_parameters() if p.requires_grad}


@OF_CASES
def test_peft_loads_our_folder_and_gives_our_numbers_and_gradients(tmp_path: Path, shape, spec):
    from palestra.lm.lora import _peft_name

    folder = base(tmp_path / "base", shape)
    model = ours(folder, spec)
    save_peft(tmp_path / "adapters", model, str(folder))

    loaded = peft.PeftModel.from_pretrained(theirs(folder), tmp_path / "adapters", is_trainable=True)

    mine, other = logprobs(model), their_logprobs(loaded)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert (mine - logprobs(load_pretrained(folder).model)).abs().max() > 0.01
    weights = torch.randn(len(mine), generator=torch.Generator().manual_seed(2))
    (mine * weights).sum().backward()
    (other * weights).sum().backward()
    found = named(loaded)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {_peft_name(name, model) for name in trained} <= found.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, found[_peft_name(name, model)].grad, rtol=1e-5, atol=1e-5)
        assert parameter.grad.any()


@OF_CASES
def test_our_model_loads_a_folder_of_peft_and_gives_its_numbers(tmp_path: Path, shape, spec):
    folder, asked = base(tmp_path / "base", shape), LoraSpec(**spec)
    config = peft.LoraConfig(
        r=asked.rank, lora_alpha=asked.alpha, use_rslora=asked.rslora, use_dora=asked.dora, task_type="CAUSAL_LM",
        target_modules="all-linear" if asked.targets == ["all"] else list(asked.targets),
        modules_to_save=[*asked.modules_to_save] or None,
        ensure_weight_tying=bool(asked.modules_to_save) and shape.tied,
    )  # fmt: skip
    foreign, generator = peft.get_peft_model(theirs(folder), config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in named(foreign).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        expected = their_logprobs(foreign)
    foreign.save_pretrained(tmp_path / "adapters")

    model, plain = load_pretrained(folder).model, Transformer(shape)
    found = load_peft(tmp_path / "adapters", model)

    plain.load_state_dict(merged_weights(model))
    with torch.no_grad():
        torch.testing.assert_close(logprobs(model), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logprobs(plain), expected, rtol=1e-5, atol=1e-5)
    assert (found.scale, found.dora, found.modules_to_save) == (asked.scale, asked.dora, asked.modules_to_save)


def test_folder_of_peft_that_unties_the_head_is_refused(tmp_path: Path):
    folder = base(tmp_path / "base", TIED)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    peft.get_peft_model(theirs(folder), config).save_pretrained(tmp_path / "adapters")
    with pytest.raises(UsageError, match="without ensure_weight_tying"):
        load_peft(tmp_path / "adapters", load_pretrained(folder).model)
