"""The specs of real models, end to end on a tiny random Qwen2 with real data: prompts, verifiers, two steps."""

import os
import shutil
from pathlib import Path

import pytest
from example_specs import ROOT
from tiny_models import tiny_checkpoint

import palestra

DATA = Path(os.environ.get("PALESTRA_DATA") or ROOT.parent / "shared" / "data").resolve()
SETS = {"gsm8k": ["gsm8k"], "math": ["math"], "code": ["mbpp"]}
SMALL = {
    "device": "cpu",
    "threads": 1,
    "train__steps": 2,
    "train__prompts_per_step": 2,
    "train__precision": "fp32",
    "train__compile": "off",  # what a GPU would do takes a minute to compile here
    "rollout__group": 2,
    "rollout__max_new_tokens": 4,
    "rollout__max_filtered_batches": None,
    "algorithm__filters__zero_variance": False,
    "eval__problems": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("qwen2"), DATA / "tokenizers" / "smollm"
    if not tokenizer.is_dir():
        pytest.skip("needs tokenizers/smollm under PALESTRA_DATA")
    tiny_checkpoint("qwen2", folder, vocab_size=49280, max_position_embeddings=4096, eos_token_id=2, bos_token_id=1)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    return folder


def _shorter(folder: Path) -> Path:
    """GSM8K up to its 700th problems: of all of them the longest is searched for, and 500 are held out."""
    (folder / "gsm8k").mkdir(parents=True)
    for file in ("train.jsonl", "test.jsonl"):
        lines = (DATA / "gsm8k" / file).read_text().splitlines(keepends=True)
        (folder / "gsm8k" / file).write_text("".join(lines[:700]))
    return folder


@pytest.mark.parametrize("name", ["gsm8k", *(pytest.param(name, marks=pytest.mark.slow) for name in ("math", "code"))])
def test_spec_of_a_real_model_trains_two_steps_on_a_tiny_one(name, model, tmp_path, monkeypatch):
    for folder in SETS[name]:
        if not (DATA / folder).is_dir():
            pytest.skip(f"needs {folder} under PALESTRA_DATA")
    if name == "math":
        pytest.importorskip("math_verify")
    monkeypatch.setenv("PALESTRA_DATA", str(_shorter(tmp_path / "data") if name == "gsm8k" else DATA))
    path = ROOT / "examples" / "posttrain" / f"{name}.yaml"
    assert len(path.read_text().splitlines()) < 25
    run = palestra.run(path, variables={"model": str(model)}, root=tmp_path, quiet=True, **SMALL)
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert "eval/accuracy" in rows[-1]
    told = (run.path / "sessions" / "0" / "log.txt").read_text()
    assert "longest prompt: " in told
    if name != "code":
        assert "Please reason step by step, and put your final answer within \\boxed{}." in told
