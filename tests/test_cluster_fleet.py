"""A fleet of generators: weights reach all of them, old or broken ones are given up, NaN is refused by name."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_things import Threads, hosted_tiny_engine
from tiny_server import TOKENIZER, tiny_model

from palestra.cluster.actor import Actor, Hub
from palestra.cluster.broadcast import Broadcast
from palestra.cluster.channel import WeightChannel
from palestra.cluster.crew import Crew
from palestra.cluster.files import Files
from palestra.cluster.fleet import Fleet
from palestra.cluster.memory import SharedMemory
from palestra.errors import UsageError
from palestra.generate.types import GROUP, Request, Sampling

PROMPT = tuple(TOKENIZER.encode("Once upon a time"))


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tiny_model(seed).state_dict().items()}


@contextmanager
def fleet_of(size: int, channel: WeightChannel, slow: dict[str, float] | None = None) -> Iterator[Fleet]:
    hub = Hub(Threads())
    fleet = Fleet(hub, channel)

    def start(name: str) -> Actor:
        settings = {"slow": (slow or {}).get(name, 0.0)}
        return hub.start(name, hosted_tiny_engine, channel.address, settings, log=None)

    fleet.crew = Crew("generator", size, start, fleet.prepare, fleet.prepared)
    try:
        wait_for(fleet, size)
        yield fleet
    finally:
        fleet.crew.close()
        hub.close()
        channel.close()


def wait_for(fleet: Fleet, size: int) -> None:
    end = time.monotonic() + 20
    while len(fleet.crew.ready()) != size:
        assert time.monotonic() < end
        time.sleep(0.01)


def sampled(fleet: Fleet, requests: int = 1) -> list[tuple[int, ...]]:
    """The versions of the tokens of some requests, each of its own group."""

    async def one(number: int) -> tuple[int, ...]:
        GROUP.set(number)
        result = await fleet.generate(Request(PROMPT, Sampling(max_new_tokens=8, seed=number, ignore_eos=True)))
        return result.generations[0].versions

    async def every() -> list[tuple[int, ...]]:
        return await asyncio.gather(*(one(number) for number in range(requests)))

    return asyncio.run(every())


def test_weights_reach_all_and_who_joins_has_the_newest() -> None:
    with fleet_of(2, SharedMemory()) as fleet:
        for version in (0, 1, 5):
            fleet.load(weights(version), version)
            assert set(sampled(fleet, 8)) == {(version,) * 8}
        fleet.crew.add()
        wait_for(fleet, 3)
        assert set(sampled(fleet, 12)) == {(5,) * 8}
        assert fleet.counters() == {
            "fleet/generators": 3, "fleet/lost": 0, "fleet/asked_again": 0, "fleet/late": 0
        }  # fmt: skip


def test_nan_weights_are_refused_by_name_and_the_old_ones_stay() -> None:
    with fleet_of(2, SharedMemory()) as fleet:
        fleet.load(weights(0), 0)
        broken = weights(1)
        broken["norm.weight"][3] = float("nan")
        with pytest.raises(UsageError, match=r"norm\.weight"):
            fleet.load(broken, 1)
        assert [actor.call("metrics").result(5)["generated_tokens"] for actor in fleet.crew.ready()] == [0, 0]


def test_generator_with_old_weights_is_given_up_and_its_requests_asked_again() -> None:
    with fleet_of(2, SharedMemory()) as fleet:
        fleet.load(weights(0), 0)
        fleet.load(weights(1), 1)
        old = fleet.crew.ready()[0]
        old.call("forget").result(5)
        assert set(sampled(fleet, 6)) == {(1,) * 8}
        assert "samples with weights 0 when all should have 1" in str(old.lost)
        wait_for(fleet, 2)
        assert fleet.crew.lost == 1


def test_generator_that_cannot_fetch_is_given_up_and_replaced(tmp_path: Path) -> None:
    with fleet_of(2, Files(str(tmp_path))) as fleet:
        fleet.load(weights(0), 0)
        blind = fleet.crew.ready()[1]
        blind.call("lose_channel").result(5)
        fleet.load(weights(1), 1)
        assert "cannot fetch weights" in str(blind.lost)
        wait_for(fleet, 2)
        assert set(sampled(fleet, 6)) == {(1,) * 8}


@pytest.mark.parametrize("channel", [SharedMemory, Broadcast])
def test_generator_that_fetches_more_slowly_than_versions_come_joins_all_the_same(channel: Any) -> None:
    with fleet_of(1, channel(), slow={"generator/1": 1.0}) as fleet:
        fleet.load(weights(0), 0)
        sampled(fleet)
        fleet.crew.add()
        version = 0
        while len(fleet.crew.ready()) < 2:
            version += 1
            assert version < 60, "it has not joined"
            fleet.load(weights(version), version)
            time.sleep(0.05)
        assert version > 1, "it was not slow enough"
        assert fleet.crew.lost == 0
        assert set(sampled(fleet, 6)) == {(version,) * 8}
