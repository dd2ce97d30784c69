"""The precision by what the CPU is said to do: every answer is forced, whatever this machine has."""

from pathlib import Path

import pytest
import torch
from eval_lab import TOKENIZER, save_model
from small_lm import small_model

from palestra.api import check
from palestra.cli.show import show_check
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.kinds.models import Start, build_model
from palestra.kinds.serving import open_engine
from palestra.spec import shape as module
from palestra.spec.lm import LmSpec
from palestra.spec.shape import described, precision

CPUS = {
    "amx": ("fpu sse avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 amx_bf16", "bf16"),
    "avx512_bf16": ("fpu sse avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16", "bf16"),
    "avx512": ("fpu sse avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni", "fp32"),
    "avx2": ("fpu sse avx avx2 fma", "fp32"),
    "xeon_phi": ("fpu sse avx2 avx512f avx512cd", "fp32"),
    "arm": ("fp asimd fphp asimdhp asimddp", "fp32"),
    "unknown": ("", "fp32"),
}


@pytest.fixture(params=CPUS)
def forced_cpu(request, monkeypatch):
    """The precision of a machine whose CPU is said to have the features of one of these."""
    features, expected = CPUS[request.param]
    monkeypatch.setattr(module, "cpu_features", lambda: frozenset(features.split()))
    return expected


def test_forced_cpu_feature_decides_auto_alone(forced_cpu):
    assert precision("auto", "cpu") == forced_cpu
    assert precision("auto", "cuda") == "bf16"
    assert [precision(wanted, "cpu") for wanted in ("bf16", "fp32", "fp16")] == ["bf16", "fp32", "fp16"]
    assert described("auto", "auto") == f"bf16 on a GPU, {forced_cpu} on this CPU"
    assert described("auto", "cpu") == forced_cpu


def test_features_are_read_from_both_forms_of_cpuinfo(tmp_path, monkeypatch):
    for text in ("processor\t: 0\nflags\t\t: fpu avx512vl\n\nprocessor\t: 1\n", "Features\t: fpu avx512vl\n"):
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        monkeypatch.setattr(module, "Path", lambda _, path=path: path)
        assert module.cpu_features.__wrapped__() == {"fpu", "avx512vl"}
    path.unlink()
    assert module.cpu_features.__wrapped__() == set()


def test_forced_cpu_feature_is_printed_by_check_and_trained_with(forced_cpu, capsys):
    path = str(Path(__file__).parent.parent / "examples/lm/sft.yaml")
    overrides = ["train.precision=auto", "device=cpu"]

    show_check(path, {}, overrides)

    assert f"\nprecision: {forced_cpu}\n" in capsys.readouterr().out
    spec = check(path, overrides=overrides).spec
    assert isinstance(spec, LmSpec)
    expected = {"bf16": torch.bfloat16, "fp32": torch.float32}[forced_cpu]
    assert spec.derived()["precision"] == forced_cpu
    start = Start(small_model().shape, TOKENIZER, Path(), (), None, {})
    assert build_model(spec, start, 0, torch.device("cpu")).dtype == expected


def test_forced_cpu_feature_every_default_engine_generates(forced_cpu, tmp_path):
    engine = open_engine(save_model(tmp_path / "model"), dtype="auto", device="cpu", root=tmp_path)
    assert engine.model.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[forced_cpu]
    result = engine.run([Request((1, 2, 3), Sampling(seed=0, max_new_tokens=4, ignore_eos=True))])[0]
    assert len(result.generations[0].tokens) == 4


@pytest.mark.parametrize("bias", [False, True])
def test_forced_cpu_feature_both_ways_to_multiply_in_fp32_agree(bias, monkeypatch):
    model = small_model(width=64, heads=4, kv_heads=2, mlp=100, vocab=50, deviation=0.1, attention_bias=bias)
    requests = [Request(tuple(range(1, 20)), Sampling(seed=i, max_new_tokens=8, ignore_eos=True)) for i in range(3)]
    found = []
    for features in ("", "avx512dq avx512bw avx512vl avx512_bf16"):
        monkeypatch.setattr(module, "cpu_features", lambda features=features: frozenset(features.split()))
        found.append([result.generations[0] for result in Engine(model, eos=frozenset()).run(requests)])
    for mine, library in zip(*found, strict=True):
        assert mine.tokens == library.tokens
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(library.logprobs), rtol=1e-4, atol=1e-4)
