"""Weights on their way to a generator; one JSON line for each measurement.

    python benchmarks/weights.py                         # all cases
    python benchmarks/weights.py delta --versions 20

`memory`: the weights of a 135M model in bf16 through shared memory, beside `Tensor.copy_` of as many bytes; by turns,
medians. `publish` copies and computes checksums, `fetch` verifies them and copies into the reader's own tensors.

`broadcast`: the same weights to one reader in another process, from the start of `publish` to the reader's last
tensor, group and checksums included, beside one bare `dist.broadcast` (gloo) of as many bytes; by turns, medians.
`again` is the same version for a reader that asks later: the writer need not copy it first.

`overlap`: the same weights by broadcast to a process that samples with the 135M model meanwhile: tokens/s while it
fetches beside tokens/s just before, and how long sampling stops to install them; medians.

`delta`: a small model trained with AdamW, published as FP32 or bf16 after each step: bytes of the differences beside
whole versions, and whether a reader that follows and one that begins late have every bit.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import Layout, MappingSource, open_channel
from palestra.cluster.files import Files
from palestra.cluster.memory import SharedMemory
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, score
from palestra.lm.model import Transformer
from palestra.spec.shape import Shape

M135 = Shape(layers=30, width=576, heads=9, kv_heads=3, mlp=1536, context=2048, vocab=49152)
SMALL = Shape(layers=6, width=256, heads=4, mlp=704, context=256, vocab=4096)
Line = dict[str, Any]


def random_weights(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    with torch.device("meta"):
        parameters = Transformer(shape).state_dict()
    return {name: (torch.randn(tensor.shape) * 0.02).to(dtype) for name, tensor in parameters.items()}


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def memory(rounds: int) -> Line:
    weights = random_weights(M135)
    nbytes = Layout.of(MappingSource(weights)).offsets[-1]
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    own = {name: tensor.clone() for name, tensor in weights.items()}
    times: dict[str, list[float]] = {"memcpy": [], "publish": [], "fetch": []}
    with closing(SharedMemory()) as writer:
        reader = open_channel(writer.address)

        def take(version: int) -> None:
            for name, tensor in reader.fetch(version):
                own[name].copy_(tensor)

        for version in range(rounds + 2):
            row = {
                "memcpy": seconds(lambda: target.copy_(source)),
                "publish": seconds(lambda version=version: writer.publish(version, weights)),
                "fetch": seconds(lambda version=version: take(version)),
            }
            if version >= 2:  # the first two allocate
                for name, value in row.items():
                    times[name].append(value)
    speeds = {name: nbytes / statistics.median(values) / 1e9 for name, values in times.items()}
    return {
        "case": "memory",
        "megabytes": nbytes / 1e6,
        "gigabytes_per_second": {name: round(speed, 2) for name, speed in speeds.items()},
        "publish_share_of_memcpy": round(speeds["publish"] / speeds["memcpy"], 3),
        "threads": torch.get_num_threads(),
    }


def join(port: int, rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)


def read(port: int, address: str, rounds: int, nbytes: int, threads: int) -> None:
    torch.set_num_threads(threads)
    join(port, 1)
    reader, target = open_channel(address), torch.ones(nbytes, dtype=torch.uint8)
    for version in range(rounds):
        torch.distributed.barrier()
        torch.distributed.broadcast(target, 0)
        torch.distributed.barrier()
        torch.distributed.barrier()
        dict(reader.fetch(version))
        torch.distributed.barrier()
        torch.distributed.barrier()
        dict(reader.fetch(version))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def broadcast(rounds: int) -> Line:
    weights, rounds = random_weights(M135), rounds + 2
    nbytes = Layout.of(MappingSource(weights)).offsets[-1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flat, times = torch.ones(nbytes, dtype=torch.uint8), {"bare": [], "publish": [], "again": []}
    with closing(Broadcast()) as writer:
        writer.readers = 1
        args = (port, writer.address, rounds, nbytes, torch.get_num_threads())
        reader = multiprocessing.get_context("spawn").Process(target=read, args=args, daemon=True)
        reader.start()
        join(port, 0)

        def together(call: Callable[[], object]) -> float:
            torch.distributed.barrier()

            def both() -> None:
                call()
                torch.distributed.barrier()

            return seconds(both)

        for version in range(rounds):
            times["bare"].append(together(lambda: torch.distributed.broadcast(flat, 0)))
            times["publish"].append(together(lambda version=version: writer.publish(version, weights)))
            times["again"].append(together(lambda: None))
        torch.distributed.destroy_process_group()
        reader.join()
    speeds = {name: nbytes / statistics.median(values[2:]) / 1e9 for name, values in times.items()}
    return {
        "case": "broadcast",
        "megabytes": nbytes / 1e6,
        "gigabytes_per_second": {name: round(speed, 3) for name, speed in speeds.items()},
        "share_of_bare": round(speeds["publish"] / speeds["bare"], 3),
        "again_share_of_bare": round(speeds["again"] / speeds["bare"], 3),
        "threads": torch.get_num_threads(),
    }


def sample_and_fetch(address: str, rounds: int, pipe: Connection) -> None:
    """Sample all the time, and fetch each version; tokens/s before and while, seconds to fetch and to install."""
    torch.set_num_threads(1)
    model = Transformer(M135)
    model.load_state_dict(random_weights(M135, torch.float32))
    engine, channel = Engine(model, eos=frozenset(), dtype=torch.float32, context=1024, burst=1), open_channel(address)
    request = Request(tuple(range(8)), Sampling(max_new_tokens=1000), n=4)
    with LocalGenerator(engine) as generator:
        threading.Thread(target=lambda: asyncio.run(generator.generate(request)), daemon=True).start()

        def counted(call: Callable[[], Any]) -> tuple[Any, float, float]:
            tokens, began = generator.generated, time.perf_counter()
            result = call()
            took = time.perf_counter() - began
            return result, took, (generator.generated - tokens) / took

        while generator.generated < 8:
            time.sleep(0.1)
        for version in range(rounds):
            *_, before = counted(lambda: time.sleep(3.0))
            pipe.send("ready")
            weights, fetch, meanwhile = counted(lambda version=version: dict(channel.fetch(version)))
            install = seconds(lambda version=version, weights=weights: engine.publish(weights, version))
            pipe.send((before, meanwhile, fetch, install))
            pipe.recv()


def overlap(rounds: int) -> Line:
    weights, (pipe, theirs) = random_weights(M135), multiprocessing.Pipe()
    rows = []
    with closing(Broadcast()) as writer:
        writer.readers = 1
        args = (writer.address, rounds, theirs)
        reader = multiprocessing.get_context("spawn").Process(target=sample_and_fetch, args=args, daemon=True)
        reader.start()
        for version in range(rounds):
            assert pipe.recv() == "ready"
            writer.publish(version, weights)
            rows.append(pipe.recv())
            pipe.send("next")
        reader.join()
    before, meanwhile, fetch, install = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {
        "case": "overlap",
        "tokens_per_second": {"before": round(before, 1), "while fetching": round(meanwhile, 1)},
        "share": round(statistics.median(row[1] / row[0] for row in rows[1:]), 3),
        "seconds": {"fetch": round(fetch, 3), "install": round(install, 3)},
    }


def text(vocab: int) -> Tensor:
    """Pairs of characters of real text where it is at hand, as tokens."""
    folder = Path(os.environ.get("PALESTRA_DATA", "../shared/data")) / "tinyshakespeare/input.txt"
    data = folder.read_bytes() if folder.exists() else Path(__file__).read_bytes() * 20
    pairs = [data[i] % 64 * 64 + data[i + 1] % 64 for i in range(0, len(data) - 1, 2)]
    return torch.tensor(pairs) % vocab


def delta(versions: int, lr: float, dtype: torch.dtype) -> Line:
    torch.manual_seed(0)
    model, tokens = Transformer(SMALL), text(SMALL.vocab or 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    changed, equal, before, weights = [], True, None, {}
    with tempfile.TemporaryDirectory() as folder:
        writer, follower = Files(folder, whole_every=versions + 1), open_channel(f"files:{folder}")
        for version in range(versions + 1):
            start = version * 512
            batch = Batch.pack([tokens[start + i * 128 : start + (i + 1) * 128].tolist() for i in range(4)])
            loss = -score(model, batch, entropy=False).logprobs.sum() / 512
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            weights = {name: tensor.detach().to(dtype).clone() for name, tensor in model.state_dict().items()}
            writer.publish(version, weights)
            fetched = dict(follower.fetch(version))
            equal &= all(torch.equal(fetched[name], tensor) for name, tensor in weights.items())
            if before is not None:
                count = sum((weights[name] != before[name]).sum().item() for name in weights)
                changed.append(count / sum(tensor.numel() for tensor in weights.values()))
            before = weights
        late = dict(open_channel(f"files:{folder}").fetch(versions))
        equal &= all(torch.equal(late[name], tensor) for name, tensor in weights.items())
        sizes = {int(path.stem): path.stat().st_size for path in Path(folder).glob("*.bin")}
    deltas = [sizes[version] for version in range(1, versions + 1)]
    return {
        "case": "delta",
        "dtype": str(dtype).removeprefix("torch."),
        "lr": lr,
        "versions": versions,
        "bit_equal": equal,
        "changed_share": round(statistics.mean(changed), 4),
        "whole_bytes": sizes[0],
        "mean_delta_bytes": round(statistics.mean(deltas)),
        "delta_share": round(statistics.mean(deltas) / sizes[0], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=["memory", "broadcast", "overlap", "delta"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--versions", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "memory" in args.cases:
        print(json.dumps(memory(args.rounds)), flush=True)
    if "broadcast" in args.cases:
        print(json.dumps(broadcast(args.rounds)), flush=True)
    if "overlap" in args.cases:
        print(json.dumps(overlap(args.rounds)), flush=True)
    if "delta" in args.cases:
        for dtype in (torch.bfloat16, torch.float32):
            for lr in (1e-6, 1e-5):
                print(json.dumps(delta(args.versions, lr, dtype)), flush=True)


if __name__ == "__main__":
    main()
