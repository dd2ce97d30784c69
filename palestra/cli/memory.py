"""What `check` prints of memory: the prediction for each device, and what this machine has."""

import shutil
import subprocess
from pathlib import Path

import psutil
from rich.filesize import decimal as size

from palestra.lm.hf_config import read_folder
from palestra.spec.lm import BpeSpec, LanguageModelSpec
from palestra.spec.memory import host_bytes, predicted
from palestra.spec.shape import Shape

SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


def show_memory(spec: LanguageModelSpec) -> None:
    """The table, where the model's shape and vocabulary are known without loading or making anything."""
    shape = _shape(spec)
    if shape is None or shape.vocab is None:
        return
    gpu = None if spec.device == "cpu" else _gpu_memory()
    device, total = ("cpu", psutil.virtual_memory().total) if gpu is None else ("cuda", gpu)
    rows = predicted(spec, shape, device)
    print(f"\n# memory on each {device}, predicted")
    for name, count in rows.items():
        print(f"{name + ':':<32}{size(count):>10}")
    print(f"{'sum:':<32}{size(sum(rows.values())):>10} of {size(total)}")
    if device == "cuda" and (count := host_bytes(spec, shape)):
        print(f"{'on the host:':<32}{size(count):>10} of {size(psutil.virtual_memory().total)}")


def _shape(spec: LanguageModelSpec) -> Shape | None:
    shape, init, tokenizer = spec.model.shape, spec.model.init, spec.model.tokenizer
    if shape is not None and shape.vocab is None and isinstance(tokenizer, BpeSpec):
        return shape.model_copy(update={"vocab": -(-tokenizer.bpe // 64) * 64})
    if shape is None and init is not None and (Path(init) / "config.json").is_file():
        return read_folder(Path(init))[1]
    return shape


def _gpu_memory() -> int | None:
    """Of the smallest GPU here; None where there is none."""
    if shutil.which(SMI[0]) is None:
        return None
    listed = subprocess.run(SMI, capture_output=True, text=True, check=False).stdout.split()
    return min((int(count) * 2**20 for count in listed if count.isdigit()), default=None)
