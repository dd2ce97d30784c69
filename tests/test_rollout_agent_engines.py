"""Agents whose model is sampled elsewhere, and later: staleness, a fleet of generators, remote engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_servers import vllm_server
from posttrain_lab import Lab, letters, rollouts_of, rows_of, weights_of
from tiny_server import running

from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.serve.server import create_app
from palestra.tasks.task import Status

STEPS = 3


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def agent(name: str, **changes: Any) -> dict[str, Any]:
    workflow = {"name": "agent", "function": f"gateway_agents:{name}"}
    return {"rollout__workflow": workflow, "tasks": letters(), "train__steps": STEPS, "eval__problems": 2, **changes}


def assert_trained_within(run: Any, staleness: int) -> None:
    """Every prompt trained once on tokens that are what the trainer computes, none older than allowed."""
    rows = [row for row in rows_of(run) if "reward" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["fate/trained"] == STEPS * 4
    assert max(row["staleness_max"] for row in rows) <= staleness
    assert rows[-1]["part/requests"] == 2
    assert rows[-1]["part/retokenized"] == rows[-1]["part/forks"] == 0
    records = [record for record in rollouts_of(run) if record.fate == "trained"]
    assert len({record.group.number for record in records}) == len(records) == STEPS * 4
    for record in records:
        assert {one.verdict.status for one in record.group.trajectories}.isdisjoint({Status.ERROR, Status.TIMEOUT})
        for one in record.group.trajectories:
            assert len(one.turns) == 2
            oldest = min(v for v, mine in zip(one.versions, one.loss_mask, strict=True) if mine)
            assert oldest >= record.step - 1 - staleness


def tokens_of(run: Any) -> list[Any]:
    return [[(one.tokens, one.loss_mask) for one in record.group.trajectories] for record in rollouts_of(run)]


@pytest.mark.parametrize(("name", "staleness"), [("twice", 1), ("streaming", 2)])
def test_agents_with_staleness_train_every_prompt_once_within_it(lab, name, staleness):
    run = lab.run(**agent(name, rollout__staleness=staleness))
    assert_trained_within(run, staleness)
    assert max(row["staleness_max"] for row in rows_of(run) if "reward" in row) >= 1, "nothing was ever stale"


def test_agents_that_grow_too_stale_are_dropped_and_their_prompts_trained_later(lab):
    run = lab.run(**agent("twice", rollout__staleness=1, rollout__on_stale="drop"))
    assert_trained_within(run, 1)


@pytest.mark.parametrize("name", ["twice", pytest.param("streaming", marks=pytest.mark.slow)])
def test_agents_over_a_fleet_train_on_the_tokens_of_one_engine(lab, name):
    here = lab.run(name="here", **agent(name))
    fleet = lab.run(name="fleet", **agent(name), cluster={"generators": 2})
    assert_trained_within(fleet, 0)
    assert tokens_of(fleet) == tokens_of(here)
    assert all(weights_of(fleet)[name].equal(tensor) for name, tensor in weights_of(here).items())


def test_agents_over_a_fleet_with_staleness(lab):
    run = lab.run(**agent("twice", rollout__staleness=2), cluster={"generators": 2})
    assert_trained_within(run, 2)


@contextmanager
def palestra_server(engine: Engine) -> Iterator[tuple[str, list[str]]]:
    """What `palestra serve` starts."""
    assert engine.tokenizer is not None
    with (
        LocalGenerator(engine, drive="thread") as generator,
        running(create_app(generator, engine.tokenizer, model_name="lab")) as address,
    ):
        yield address, []


SERVERS = {"palestra": palestra_server, "vllm": vllm_server}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("palestra", "streaming"),
        ("vllm", "twice"),
        pytest.param("palestra", "twice", marks=SLOW),
        pytest.param("vllm", "streaming", marks=SLOW),
    ],
)
def test_agents_over_a_remote_engine_train_on_the_tokens_of_one_here(lab, engine, name):
    here = lab.run(name="here", **agent(name))
    with SERVERS[engine](Engine.from_folder(lab.model)) as (address, problems):
        there = lab.run(name="there", **agent(name), rollout__generator={"engine": engine, "url": address})
    assert not problems
    assert_trained_within(there, 0)
    assert tokens_of(there) == tokens_of(here)
    assert max(row["mismatch"] for row in rows_of(there) if "mismatch" in row) < 1e-6


@pytest.mark.parametrize("engine", ["palestra", pytest.param("vllm", marks=SLOW)])
def test_agents_over_a_remote_engine_with_staleness(lab, engine):
    with SERVERS[engine](Engine.from_folder(lab.model)) as (address, problems):
        run = lab.run(**agent("twice", rollout__staleness=1), rollout__generator={"engine": engine, "url": address})
    assert not problems
    assert_trained_within(run, 1)
