"""Predicted memory beside what tensors take: weights, gradients, moments, activations, logits."""

import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_lab import TOKENIZER
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from palestra.cli.show import show_check
from palestra.kinds.models import Start, build_model, rounding_seed
from palestra.kinds.posttrain import room_for_keys
from palestra.lm.batch import Batch, score
from palestra.lm.engine import Loss, TrainEngine
from palestra.lm.lora import adapted, adapter_state, frozen_copy
from palestra.lm.model import Transformer
from palestra.lm.optim import Optimizer
from palestra.lm.ranks import Ranks
from palestra.posttrain.critic import Critic
from palestra.spec.kinds.posttrain import PosttrainSpec
from palestra.spec.lm import LmSpec
from palestra.spec.load import load
from palestra.spec.memory import after_loading, host_bytes, predicted
from palestra.spec.shape import Shape

SHAPE = Shape(layers=4, width=128, heads=4, kv_heads=2, mlp=320, context=256, vocab=1024)
LORA = {"rank": 8, "targets": ["q_proj", "v_proj", "down_proj"]}


def spec_of(**changes: Any) -> LmSpec:
    """A spec on the CPU whose model has the sizes of `SHAPE`; `changes` are fields with `__` for the dot."""
    data: dict[str, Any] = {
        "kind": "pretrain",
        "name": "x",
        "device": "cpu",
        "model": {"shape": SHAPE.model_dump(), "tokenizer": "characters"},
        "data": {"train": {"texts": {"path": "texts.jsonl"}}, "context": 256},
        "train": {"steps": 2, "batch": 16, "micro_tokens": 1024, "precision": "fp32"},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        block = data
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    if data["model"].get("init"):
        del data["model"]["shape"], data["model"]["tokenizer"]
        data["kind"] = "sft"
    spec = load(data).spec
    assert isinstance(spec, LmSpec)
    return spec


class Peak(TorchDispatchMode):
    """Bytes of the storages that live, and the most there were."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.most = 0
        for tensor in known:
            self._see(tensor)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.live:
            self.live[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, key: int) -> None:
        self.now -= self.live.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out


def loss(model: Transformer, batch: Batch) -> Loss:
    return Loss(-score(model, batch, entropy=False).logprobs.sum(), {})


def prepared(spec: LmSpec, shape: Shape, device: str) -> TrainEngine:
    model = build_model(spec, Start(shape, TOKENIZER, Path(), (), None, {}), 0, torch.device(device))
    optimizer = Optimizer(model, spec.optim, 2, rounding_seed(spec, 0))
    return TrainEngine(model, optimizer, Ranks(), micro_tokens=spec.train.micro_tokens, flops_per_token=1.0)


def train(engine: TrainEngine, spec: LmSpec, vocab: int) -> None:
    """Two steps."""
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        tokens = torch.randint(vocab, (spec.train.batch, spec.data.context), generator=generator)
        engine.forward_backward(Batch.pack(tokens.tolist()), loss, 1.0)
        engine.optim_step(step / 2)


def measured(spec: LmSpec, shape: Shape = SHAPE) -> int:
    """The most bytes that tensors take in two steps of training."""
    engine = prepared(spec, shape, "cpu")
    moments = [t for named in engine.optimizer.tensors().values() for t in named.values()]
    weights = [t for m in adapted(engine.model).values() if (q := m.quantized) is not None for t in (q.codes, q.scales)]
    with Peak([*engine.model.parameters(), *moments, *weights]) as peak:
        train(engine, spec, shape.vocab or 0)
    return peak.most


CASES: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "one micro-batch": {"train__batch": 4},
    "short": {"data__context": 64},
    "recomputed": {"train__checkpointing": "full"},
    "half recomputed": {"train__checkpointing": "selective"},
    "muon": {"optim": {"name": "muon"}},
    "8 bits": {"optim": {"name": "adamw", "state": "8bit"}, "train__weights": "bf16"},
    "bf16": {"train__precision": "bf16"},
    "all bf16": {"train__precision": "bf16", "train__weights": "bf16"},
    "adapters": {"model__init": "model", "model__lora": {"rank": 8}},
    "some adapters": {"model__init": "model", "model__lora": LORA, "train__weights": "bf16"},
    "4 bits": {"model__init": "model", "model__lora": {"rank": 8, "quantize": "nf4"}, "train__precision": "bf16"},
    "dora": {"model__init": "model", "model__lora": {"rank": 8, "dora": True, "modules_to_save": ["embed_tokens"]}},
}
FAST = ("accumulated", "adapters")


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CASES])
def test_prediction_is_within_a_tenth_of_what_tensors_take(case):
    spec = spec_of(**CASES[case])
    assert sum(predicted(spec, SHAPE, "cpu").values()) == pytest.approx(measured(spec), rel=0.1)


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu", "norm": "layer", "positions": "learned", "biases": True},
    "sinks": {"sinks": True, "biases": True, "window": 32},
    "gemma3": {"activation": "geglu", "norm_order": "both", "norm_offset": 1.0, "qk_norm": "head", "window": 32},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_prediction_of_other_families_is_within_a_tenth_of_what_tensors_take(changes):
    spec, shape = spec_of(), SHAPE.model_copy(update=changes)
    assert sum(predicted(spec, shape, "cpu").values()) == pytest.approx(measured(spec, shape), rel=0.1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", ["accumulated", "recomputed", "8 bits", "adapters", "4 bits"])
def test_prediction_is_within_a_tenth_of_the_peak_of_a_gpu(case):
    shape = Shape(layers=8, width=1024, heads=16, kv_heads=4, mlp=2816, context=1024, vocab=32000)
    sizes = {"data__context": 1024, "train__micro_tokens": 8192, "train__batch": 16, "train__precision": "bf16"}
    spec = spec_of(model__shape=shape.model_dump(), **(CASES[case] | sizes))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(prepared(spec, shape, "cuda"), spec, 32000)
    found = torch.cuda.max_memory_allocated() - before
    assert sum(predicted(spec, shape, "cuda").values()) == pytest.approx(found, rel=0.1)


WHOLE = {"rank": 4, "modules_to_save": ["embed_tokens"]}


@pytest.mark.parametrize("changes", [{}, SHAPES["gpt2"]], ids=["llama", "gpt2"])
@pytest.mark.parametrize("lora", [None, {"rank": 8}, {**LORA, "dora": True}, WHOLE])
def test_predicted_weights_and_moments_are_those_of_the_model(lora, changes):
    spec = spec_of(**({} if lora is None else {"model__init": "model", "model__lora": lora}))
    shape = SHAPE.model_copy(update=changes)
    model = build_model(spec, Start(shape, TOKENIZER, Path(), (), None, {}), 0, torch.device("cpu"))
    rows = predicted(spec, shape, "cpu")
    assert rows["weights"] == sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert rows["optimizer state"] == 2 * trained
    assert lora is None or trained == sum(t.nbytes for t in adapter_state(model).values())


def test_prediction_of_an_8b_model_with_adapters_fits_80_gb_and_without_it_does_not():
    shape = Shape(layers=32, width=4096, heads=32, kv_heads=8, mlp=14336, context=8192, vocab=128256, tied=False)
    train = {"train__precision": "bf16", "train__checkpointing": "full", "train__micro_tokens": 8192}
    small = spec_of(model__init="model", model__lora={"rank": 16}, train__weights="bf16", **train)
    full = spec_of(**train)
    host = spec_of(train__weights="bf16", optim={"name": "adamw", "state": "8bit", "offload": True}, **train)
    assert sum(predicted(small, shape, "cuda").values()) < 40e9
    four = spec_of(model__init="model", model__lora={"rank": 16, "quantize": "nf4"}, train__weights="bf16", **train)
    assert sum(predicted(four, shape, "cuda").values()) < sum(predicted(small, shape, "cuda").values()) - 9e9
    assert sum(predicted(full, shape, "cuda").values()) > 128e9  # 16 bytes a weight
    assert sum(predicted(host, shape, "cuda").values()) < 60e9
    assert "optimizer state" not in predicted(host, shape, "cuda")
    assert host_bytes(host, shape) == pytest.approx(2 * shape.parameters(), rel=0.02)
    assert host_bytes(small, shape) == 0


def posttrain_of(**changes: Any) -> PosttrainSpec:
    data = {
        "kind": "posttrain",
        "name": "x",
        "model": {"init": "model"},
        "tasks": {"train": [{"task": "countdown"}]},
        "algorithm": {"preset": "grpo"},
        "train": {"steps": 2, "prompts_per_step": 8, "micro_tokens": 8192, "precision": "bf16"},
        "rollout": {"group": 8, "max_new_tokens": 512},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        block: dict[str, Any] = data
        for name in parents:
            block = block.setdefault(name, {})
        block[last] = value
    spec = load(data).spec
    assert isinstance(spec, PosttrainSpec)
    return spec


@pytest.mark.parametrize("lora", [None, {"rank": 8, "quantize": "nf4"}, {**LORA, "dora": True}, WHOLE])
def test_predicted_value_and_reference_model_are_copies_of_what_is_trained(lora):
    ppo = {"preset": "ppo", "kl": {"where": "reward", "estimator": "k1", "coefficient": 0.1}}
    spec = posttrain_of(algorithm=ppo, **({} if lora is None else {"model__lora": lora}))
    model = build_model(spec, Start(SHAPE, TOKENIZER, Path(), (), None, {}), 0, torch.device("cpu"))
    reference, critic = frozen_copy(model), Critic(deepcopy(model), spec.algorithm, spec.train)
    rows = predicted(spec, SHAPE, "cpu")
    assert rows["reference model"] == pytest.approx(bytes_of(reference), rel=0.01)
    trained = critic.engine.optimizer.parameters.values()
    moments = sum(t.nbytes for named in critic.engine.optimizer.tensors().values() for t in named.values())
    whole = bytes_of(critic.engine.transformer) + sum(p.nbytes for p in trained) + moments
    assert rows["value model"] == pytest.approx(whole, rel=0.01)


def bytes_of(model: Transformer) -> int:
    """Of its parameters and of its matrices in 4 bits."""
    four = [t for m in adapted(model).values() if (q := m.quantized) is not None for t in (q.codes, q.scales)]
    return sum(t.nbytes for t in [*model.parameters(), *four])


def test_after_loading_come_gradients_moments_activations_and_the_generators_weights():
    shape = Shape(layers=28, width=1024, heads=16, kv_heads=8, mlp=3072, context=4096, vocab=151936)
    count, spec = shape.parameters(), posttrain_of()
    rows = predicted(spec, shape, "cuda")
    activations = rows["activations"] + rows["logits and temporaries"] + rows["copies for arithmetic"]
    coming = after_loading(spec, shape, "cuda")
    assert coming == rows["gradients"] + rows["optimizer state"] + activations + rows["generator"]
    assert rows["optimizer state"] == 8 * count
    assert rows["generator"] == 2 * count
    critic = posttrain_of(algorithm={"preset": "ppo"})
    assert after_loading(critic, shape, "cuda") - coming == pytest.approx(12 * count, rel=0.01)  # its weights are there
    eight = posttrain_of(optim={"name": "adamw", "state": "8bit"})
    assert coming - after_loading(eight, shape, "cuda") == pytest.approx((6 - 8 / 256) * count, rel=0.01)


def test_room_for_keys_is_what_training_leaves_and_grows_where_it_needs_less():
    shape = Shape(layers=36, width=2560, heads=32, kv_heads=8, mlp=9728, context=4096, vocab=151936)
    free, count = 140 * 2**30, shape.parameters()
    specs = [
        posttrain_of(**changes)
        for changes in (
            {},
            {"optim": {"name": "adamw", "state": "8bit"}, "train__weights": "bf16"},
            {"model__lora": {"rank": 16}, "train__weights": "bf16"},
        )
    ]
    full, eight, adapters = (room_for_keys(spec, shape, free) for spec in specs)
    assert full < eight - 7 * count  # of moments it needs 6 bytes a weight less, of gradients and copies 2 each
    assert eight < adapters - 2 * count
    for spec, room in zip(specs, (full, eight, adapters), strict=True):
        left = free - after_loading(spec, shape, "cuda")
        assert 0.7 * left < room < 0.9 * left
    assert room_for_keys(posttrain_of(), shape, 2**30) == 2**27  # never less than an eighth


def test_check_prints_the_prediction_beside_what_the_machine_has(capsys):
    path = str(Path(__file__).parent.parent / "examples/lm/shakespeare.yaml")
    show_check(path, {"text": "text.txt"}, ["device=cpu", "train.precision=fp32", "model.shape.vocab=512"])
    lines = capsys.readouterr().out.partition("# memory on each cpu, predicted\n")[2].splitlines()
    assert lines[0].startswith("weights:")
    assert {"optimizer state", "activations"} <= {line.partition(":")[0] for line in lines}
    assert lines[-1].startswith("sum:")
    assert " of " in lines[-1]
