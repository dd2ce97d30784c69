"""Elo of frozen models at tic-tac-toe: each plays each, both seats, sampled at temperature 1.

    python examples/games/ratings.py tictactoe_sft runs/tictactoe/latest/sessions/*/checkpoints/* random [--games 100]

Models are runs, checkpoints or folders, and `random` plays legal moves at random; the first has the rating 0.
"""

import argparse
import asyncio
import json
from itertools import combinations
from pathlib import Path

from palestra.evaluate.elo import elo
from palestra.generate.types import Sampling
from palestra.rollout.episode import Episode, Workflow, encode_problem
from palestra.rollout.workflows import make_workflow
from palestra.spec.kinds.posttrain import EnvironmentSpec
from palestra.tasks.environments.environment import RANDOM
from palestra.tasks.rewards.rewards import open_generator
from palestra.tasks.task import make_task


async def play(workflow: Workflow, one: str, other: str, games: int, runs: Path) -> list[float]:
    """The points of the first model in so many games, of which it begins half."""
    task = make_task("textarena:TicTacToe-v0", {"opponent": other, "size": games})
    with open_generator(one, runs) as generator:
        engine = generator.engine
        assert engine.tokenizer is not None
        sampling = Sampling(temperature=1.0, max_new_tokens=4, stop=task.stops)
        episodes = [
            Episode(
                problem,
                encode_problem(problem, engine.tokenizer),
                samples=1,
                seed=number,
                sampling=sampling,
                generator=generator,
                verify=task.verify,
                tokenizer=engine.tokenizer,
                context=engine.context,
            )
            for number, problem in enumerate(task.problems("test"))
        ]
        ended = await asyncio.gather(*(workflow(episode) for episode in episodes))
    return [(trajectory.reward + 1) / 2 for (trajectory,) in ended if trajectory.verdict.status != "error"]


async def rate(models: list[str], games: int, runs: Path) -> dict[str, float]:
    """The ratings; prints a line for each pair."""
    spec = EnvironmentSpec(name="environment", turns=10, summarize="examples.games.boards:tictactoe")
    workflow, results = make_workflow(spec, runs), []
    for pair in combinations(models, 2):
        one, other = sorted(pair, key=lambda name: name == RANDOM)  # which needs another to play it
        points = await play(workflow, one, other, games, runs)
        counts = {"won": points.count(1.0), "drawn": points.count(0.5), "lost": points.count(0.0)}
        print(json.dumps({"first": one, "second": other, **counts}), flush=True)
        results += [(one, other, score) for score in points]
    return elo(results, models[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    for name, rating in asyncio.run(rate(given.models, given.games, given.runs)).items():
        print(f"{rating:7.0f}  {name}")


if __name__ == "__main__":
    main()
