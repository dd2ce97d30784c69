"""Checkpoints of several ranks: exact under every other layout, whole or absent after a kill, no model in one place."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Scratch, numbers, small_disk
from safetensors.torch import load_file
from test_lm_ranks import cached, on_ranks, small  # noqa: F401 (a fixture)

import palestra
from palestra.errors import PalestraError
from palestra.lm.batch import Batch, forward
from palestra.lm.hf import load_pretrained
from palestra.lm.shards.boxes import Box, Boxes, boxes
from palestra.lm.shards.saver import copied
from palestra.runs.checkpoint import DamagedCheckpoint, metas
from palestra.runs.checkpoint import load as load_checkpoint
from palestra.work.pool import TaskFailed

TWO = ["shard=2", "tensor=2", "expert=2", "context=2", "pipeline=2", "data=2"]
FOUR = ["shard=2,tensor=2", "shard=2,expert=2", "context=2,tensor=2", "pipeline=2,shard=2", "data=2,shard=2"]


def ring(layouts: list[str]) -> list[str]:
    """Every layout, loaded by the next."""
    return [f"{one}>{other}" for one, other in zip(layouts, [*layouts[1:], layouts[0]], strict=True)]


QUICK = ["shard=2>tensor=2/tied/reload", "expert=2/one_sequence/unused", "shard=2/one_sequence/poisoned"]
SLOW = [
    *(
        pytest.param(2, [f"{axes}/{c}/reload" for c in ("one_sequence", "micro-batches")], id=axes)
        for axes in ring(TWO)
    ),
    *(pytest.param(4, [f"{axes}/micro-batches/reload"], id=axes) for axes in ring(FOUR)),
    pytest.param(2, ["shard=2>context=2/adapters/reload", "shard=2>pipeline=2/scalar/reload"], id="adapters, score"),
    pytest.param(2, ["tensor=2/tied/reload", "pipeline=2>shard=2/tied/reload"], id="tied"),
    pytest.param(2, ["expert=2/micro-batches/unused", *(f"{a}/one_sequence/poisoned" for a in TWO)], id="bad days"),
]


def assert_exact(found: list[dict[str, dict[str, float]]], jobs: list[str]) -> None:
    """Bits where they are compared, else the numbers of one process."""
    bits = ("restored", "built", "exact", "too much", "not skipped", "changed")
    for rank in found:
        assert rank.keys() == set(jobs)
        numbers = {(job, what): by for job in jobs for what, by in rank[job].items()}
        assert not {at: by for at, by in numbers.items() if not by <= (0.0 if at[1].startswith(bits) else 1e-12)}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, dict[str, float]]]]:
    """Where ranks have worked, and what they have measured."""
    folder = tmp_path_factory.mktemp("quick")
    return folder, on_ranks(folder, 2, "float64", *QUICK)


def test_layout_loads_what_another_saved_bit_for_bit_and_bad_days_leave_ranks_together(quick):
    assert_exact(quick[1], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "jobs"), SLOW)
def test_every_layout_loads_what_another_saved_bit_for_bit(tmp_path, size, jobs):
    assert_exact(on_ranks(tmp_path, size, "float64", *jobs), jobs)
    for folder in tmp_path.glob("* tied reload/checkpoints/*/model"):
        assert_equal_logits(folder)


def test_folder_of_several_ranks_loads_in_transformers_with_equal_logits(quick):
    (folder,) = quick[0].glob("* tied reload/checkpoints/*/model")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) >= 2  # both ranks write
    assert_equal_logits(folder)


def assert_equal_logits(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_pretrained(folder).model
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        hidden = forward(ours, Batch.pack([tokens.tolist()])).hidden
        torch.testing.assert_close(hidden @ ours.unembed.T, theirs(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)


# ---- boxes


def test_cut_of_a_box_is_what_indexing_the_whole_gives():
    whole = torch.arange(4 * 6 * 3).view(4, 6, 3)
    indices = [(), (slice(1, 3),), (2,), (slice(0, 4), slice(2, 5)), (3, slice(0, 3)), (0, 5, slice(1, 2))]
    places = itertools.product([(0, 2), (1, 4), (3, 4)], [(0, 6), (2, 3), (4, 6)], [(0, 3), (1, 2)])
    for (a, b), (c, d), (e, f) in places:
        box = Box((a, c, e), whole[a:b, c:d, e:f].clone())
        for index in indices:
            target, mask = whole[index].clone(), torch.zeros_like(whole, dtype=torch.bool)
            mask[a:b, c:d, e:f] = True
            cut = Boxes(whole.shape, (box,)).cut(index)
            assert cut.whole == target.shape
            assert sum(part.tensor.numel() for part in cut.boxes) == int(mask[index].sum())
            for part in cut.boxes:
                assert torch.equal(part.tensor, target[part.place])


def test_parts_of_a_stack_lie_one_after_the_other_and_are_filled_from_it():
    parts = {f"attn.qkv.weights.{name}": torch.zeros(rows, 2) for name, rows in (("q", 4), ("k", 2), ("v", 2))}
    steps = {f"step/{name}": torch.zeros(()) for name in parts}
    stacks = boxes({**parts, **steps, "layers.0.mlp.experts.down": torch.zeros(2, 3, 4)})
    assert {name: tuple(stack.whole) for name, stack in stacks.items()} == {
        "attn.qkv.weight": (8, 2),
        "step/attn.qkv.weight": (1,),
        "layers.0.mlp.down": (2, 3, 4),
    }
    whole = torch.arange(16.0).view(8, 2)
    stacks["attn.qkv.weight"].fill(whole)
    stacks["step/attn.qkv.weight"].fill(torch.tensor([3.0]))
    assert torch.equal(torch.cat(list(parts.values())), whole)
    assert all(step == 3.0 for step in steps.values())


# ---- runs


def run_of(place: Scratch, name: str, **changes) -> Path:
    palestra.run(small(place.path, name=name, **changes), quiet=True)
    return place.session(name)


def assert_same_bits(one: Path, other: Path) -> None:
    """The last checkpoints of two runs have the same tensors in the same files, and all that was measured is equal."""
    ours, theirs = (metas(session)[-1] for session in (one, other))
    assert ours.files.keys() == theirs.files.keys()
    for name in ours.files:
        if name.endswith(".safetensors"):  # whose headers are in any order
            mine, wanted = (load_file(meta.path / name) for meta in (ours, theirs))
            assert mine.keys() == wanted.keys()
            assert all(torch.equal(mine[key], wanted[key]) for key in wanted), name
        else:
            assert ours.files[name] == theirs.files[name], name
    assert numbers(one) == numbers(other)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["save", "checksums"])
def test_rank_killed_in_a_save_loses_nothing_and_the_resumed_run_is_the_uninterrupted_one(cached, where):  # noqa: F811
    changes = {"parallel": {"shard": 2}, "every": {"log": "1 steps", "eval": "20 steps", "checkpoint": "3 steps"}}
    reference = run_of(cached, "reference", hooks=["killed_saver:hook"], **changes)
    Path("kill").write_text(where)
    with pytest.raises((TaskFailed, PalestraError)):
        run_of(cached, "killed", hooks=["killed_saver:hook"], **changes)
    killed = cached.session("killed")
    assert not Path("kill").exists()
    assert [meta.step for meta in metas(killed)] == [3]
    palestra.run(resume="killed", quiet=True)
    assert_same_bits(reference, killed)


@pytest.mark.slow
def test_damaged_shard_is_skipped_for_the_checkpoint_before(cached):  # noqa: F811
    session = run_of(cached, "damaged", parallel={"tensor": 2})
    last = metas(session)[-1].path
    shard = sorted(last.glob("shards/*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(DamagedCheckpoint, match=r"the CRC-32 of shards/.* differs"):
        load_checkpoint(last)


@pytest.mark.slow
def test_full_disk_costs_one_checkpoint_and_the_run_resumes_where_there_is_room(cached, tmp_path):  # noqa: F811
    changes = {"parallel": {"shard": 2}, "every": {"log": "1 steps", "eval": "20 steps", "checkpoint": "3 steps"}}
    changes["hooks"] = ["lm_hooks:fill_disk"]
    reference = run_of(cached, "reference", **changes)
    with small_disk(tmp_path / "small", 32 << 20) as disk:
        (disk / "fill").touch()
        with pytest.raises(PalestraError, match="No space left on device") as caught:
            palestra.run(small(cached.path, name="full", **changes), root=disk, quiet=True)
        assert "Earlier checkpoints are intact" in str(caught.value)
        assert "Traceback" not in str(caught.value)
        (session,) = disk.glob("full/*/sessions/*")
        assert [meta.step for meta in metas(session)] == [3]
        assert not list((session / "checkpoints").glob(".step_*/model/*"))
        shutil.copytree(disk / "full", cached.path / "runs" / "full")
    palestra.run(resume="full", quiet=True)
    assert_same_bits(reference, cached.session("full"))


def test_copied_state_stays_as_it_was():
    weight, moments = torch.ones(3), [torch.zeros(2), (torch.ones(1), "adamw")]
    state = {"weight": weight, "moments": moments, "steps": 3, "groups": {"tokens": np.arange(4)}}
    copy = copied(state)
    weight.mul_(2)
    moments[0].add_(1)
    state["groups"]["tokens"][0] = 9
    assert torch.equal(copy["weight"], torch.ones(3))
    assert torch.equal(copy["moments"][0], torch.zeros(2))
    assert copy["moments"][1][1] == "adamw"
    assert copy["steps"] == 3
    assert copy["groups"]["tokens"].tolist() == [0, 1, 2, 3]
