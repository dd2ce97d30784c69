"""The optimizer over two ranks: sharded weights move as whole ones do, and state goes from two to one and back."""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_lm_optim import ADAMW, EXPERTS, MUON, STEPS, give, gradients, make

from palestra.lm.optim import Ema, Optimizer
from palestra.lm.ranks import like, whole

RANKS = 2


def compare(rank: int, store: Path) -> None:
    """What each rank does: train the sharded model beside a whole one on the same gradients."""
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for spec in (ADAMW, MUON):
        alone, split = make(EXPERTS), make(EXPERTS)
        for block in split.layers:
            fully_shard(block)
        fully_shard(split)
        optimizers = [Optimizer(alone, spec, STEPS), Optimizer(split, spec, STEPS)]
        averages = [Ema(alone, 0.9), Ema(split, 0.9)]
        for step in range(6):
            found = gradients(alone, step)
            if step == 1:
                found["norm.weight"][0] = math.nan
            give(alone, found)
            for name, p in split.named_parameters():
                p.grad = like(found[name], p)
            one, both = (optimizer.step(step / STEPS) for optimizer in optimizers)
            assert one["skipped"] == both["skipped"] == float(step == 1)
            assert step == 1 or both["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
            for average, model in zip(averages, (alone, split), strict=True):
                average.update(model)
            if step == 3:  # each goes on, made anew, with what the other kept
                kept = [(_copied(o.state()), _copied(a.state())) for o, a in zip(optimizers, averages, strict=True)]
                optimizers = [Optimizer(model, spec, STEPS) for model in (alone, split)]
                averages = [Ema(model, 0.9) for model in (alone, split)]
                for optimizer, average, (memory, mean) in zip(optimizers, averages, reversed(kept), strict=True):
                    optimizer.load_state(memory)
                    average.load_state(mean)
        assert split.embed.to_local().numel() < alone.embed.numel()
        _same(alone, split)
        with averages[0].swapped_in(alone), averages[1].swapped_in(split):
            _same(alone, split)
    dist.destroy_process_group()


def _copied(state):
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def _same(alone, split) -> None:
    for (name, p), q in zip(alone.named_parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(whole(q), p, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.slow
def test_two_ranks_move_the_weights_as_one_does(tmp_path):
    torch.multiprocessing.spawn(compare, (tmp_path / "store",), nprocs=RANKS)
