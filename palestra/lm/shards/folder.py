"""Hugging Face folders written from the boxes of all ranks, and read into them: no rank ever has the whole model."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from palestra.data.tokenizers import Tokenizer
from palestra.lm import hf
from palestra.lm.model import Transformer
from palestra.lm.parallel.collectives import Group
from palestra.lm.scorer import ScalarModel
from palestra.lm.shards.boxes import Boxes, boxes, load, save, stored
from palestra.runs.store import write_json
from palestra.spec.shape import Shape

SCORE = "score.weight"


def fill(model: Transformer | ScalarModel, folder: Path) -> None:
    """Take the weights of a model folder; of each tensor a rank reads its boxes."""
    transformer = model.transformer if isinstance(model, ScalarModel) else model
    _, _, files, places = hf.opened(folder)
    mine = boxes(transformer.state_dict())
    for slot in places:
        if slot.ours in mine:
            _cut(mine[slot.ours], slot).fill(files.slice(slot.theirs))
    if isinstance(model, ScalarModel) and SCORE in files.shapes:
        boxes({SCORE: model.value.weight})[SCORE].fill(files.slice(SCORE))


def _cut(boxes: Boxes, slot: hf.Slot) -> Boxes:
    cut = boxes.cut(slot.index)
    return cut.transposed() if slot.transposed else cut


def sample(model: Transformer, seed: int) -> None:
    """Take the initial weights of a seed, one tensor after the other; of each a rank keeps its boxes."""
    mine = boxes(model.state_dict())
    for name, weight in hf.skeleton(model.shape).initial(torch.Generator().manual_seed(seed)):
        if name in mine:
            mine[name].fill(weight)


def save_folder(
    folder: Path,
    group: Group,
    shape: Shape,
    mine: Mapping[str, Boxes],
    *,
    tokenizer: Tokenizer | None,
    eos: Sequence[int],
    base_config: Mapping[str, Any],
) -> None:
    """What `hf.save_weights` writes, from boxes by the transformer's names; `score.weight` makes it a reward model.

    The ranks of the group write files in turn. For each, one gathers through the file system no more than its share.
    """
    shape, family, config = hf.described(shape, base_config, scores=SCORE in mine)
    places = [*hf.slots(shape, family), *([hf.Slot(SCORE, SCORE)] if SCORE in mine else [])]
    parts, rank, ranks = folder.parent / "weights", group.rank(), group.size()
    save(parts, {slot.theirs: _cut(mine[slot.ours], slot) for slot in places if slot.ours in mine}, group)
    forms = stored(parts)
    sizes = {slot.theirs: forms[slot.theirs].nbytes for slot in places}
    total = sum(sizes.values())
    count = min(max(ranks, -(-total // hf.MAX_SHARD_BYTES)), len(sizes))
    files: dict[str, list[str]] = {f"model-{i:05d}-of-{count:05d}.safetensors": [] for i in range(1, count + 1)}
    loads = dict.fromkeys(files, 0)
    for name, size in sizes.items():
        least = min(loads, key=lambda file: loads[file])
        files[least].append(name)
        loads[least] += size
    if rank == 0:
        folder.mkdir()
        hf.write_about(folder, config, forms[places[0].theirs].dtype, tokenizer, eos, base_config)
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / hf.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    dist.barrier(group)
    for file in list(files)[rank::ranks]:
        tensors = {name: torch.empty_like(forms[name], device="cpu") for name in files[file]}
        load(parts, boxes(tensors), partial=True)
        hf.write_file(folder / file, tensors)
    dist.barrier(group)
    if rank == 0:
        shutil.rmtree(parts)
