"""Tasks played once by a tiny random model through the workflow: ten here, all that are listed in the slow test."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Scratch

from palestra.tasks.catalog import OPEN, catalog, search

FILE = Path(__file__).parent.parent / "benchmarks" / "tasks_played.py"
TEN = [
    "arithmetic",
    "countdown",
    "reasoning_gym:leg_counting",
    "gymnasium:CartPole-v1",
    "gymnasium:Taxi-v4",
    "textarena:2048-v0",
    "textarena:GuessTheNumber-v0",
    "textarena:Nim-v0",
    "textarena:ThreePlayerTicTacToe-v0",
    "textarena:Wordle-v0",
]


def played(names: list[str]) -> dict[str, dict[str, Any]]:
    found = importlib.util.spec_from_file_location("tasks_played", FILE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return {row["task"]: row for row in module.play(names)}


def test_ten_tasks_are_played_by_a_language_model() -> None:
    rows = played(TEN)
    for row in rows.values():
        assert row["outcome"] in ("correct", "wrong", "unparsable"), row
        assert row["tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_listed_task_is_played_or_says_what_it_needs() -> None:
    entries = {entry.name: entry for entry in catalog() if entry.source not in OPEN}
    rows = played(list(entries))
    failed = {name: row for name, row in rows.items() if row["outcome"] in ("error", "timeout")}
    bad = {name: row for name, row in failed.items() if not entries[name].needs}
    refused = {name: row for name, row in rows.items() if row["outcome"] == "refused" and not entries[name].needs}
    assert bad.keys() <= FAIL, bad
    assert not refused


FAIL = {"textarena:Sokoban-v0-medium", "reasoning_gym:prime_factorization"}
"""One may take longer than a minute to begin; the other's scorer raises for what is not a number."""


def test_catalog_lists_games_and_tasks_without_importing_them(scratch: Scratch) -> None:
    sources = [json.loads(line) for line in scratch("tasks", "--json").stdout.splitlines()]
    counts = {source: sum(row["source"] == source for row in sources) for source in ("textarena", "reasoning_gym")}
    assert counts["textarena"] >= 90
    assert counts["reasoning_gym"] >= 95
    usable = [row for row in sources if row["source"] == "textarena" and not row["needs"]]
    assert len(usable) >= 90
    assert {"arithmetic", "gsm8k", "gymnasium:CartPole-v1", "openenv:<url or package>"} <= {
        row["name"] for row in sources
    }
    assert len({row["name"] for row in sources}) == len(sources)


def test_search_finds_by_any_word_and_nothing_is_a_sentence(scratch: Scratch) -> None:
    assert {entry.name for entry in search("tictactoe")} >= {"textarena:TicTacToe-v0", "textarena:WildTicTacToe-v0"}
    assert "textarena:Nim-v0" in scratch("tasks", "--search", "nim").stdout
    refused = scratch("tasks", "--search", "nosuchthing")
    assert refused.returncode == 2
    assert "no task has 'nosuchthing'" in refused.stderr
