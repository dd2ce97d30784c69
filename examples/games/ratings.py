"""Elo of frozen models at tic-tac-toe: each plays each, both seats, sampled at temperature 1.

    python examples/games/ratings.py tictactoe_sft tictactoe [--games 100]

Models are runs, checkpoints or folders; the first has the rating 0.
"""

import argparse
import asyncio
import json
from itertools import combinations
from pathlib import Path

from palestra.evaluate.elo import elo
from palestra.generate.types import Sampling
from palestra.rollout.episode import Episode, encode_problem
from palestra.rollout.workflows import make_workflow
from palestra.spec.kinds.posttrain import EnvironmentSpec
from palestra.tasks.rewards.rewards import open_generator
from palestra.tasks.task import make_task


async def play(one: str, other: str, games: int, runs: Path) -> list[float]:
    """The points of the first model in so many games, of which it begins half."""
    spec = EnvironmentSpec(name="environment", turns=10, summarize="examples.games.boards:tictactoe")
    workflow = make_workflow(spec, runs)
    task = make_task("textarena:TicTacToe-v0", {"opponent": other})
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
            for number, problem in enumerate(task.problems("test")[:games])
        ]
        ended = await asyncio.gather(*(workflow(episode) for episode in episodes))
    return [(trajectory.reward + 1) / 2 for (trajectory,) in ended if trajectory.verdict.status != "error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    given = parser.parse_args()
    results = []
    for one, other in combinations(given.models, 2):
        points = asyncio.run(play(one, other, given.games, given.runs))
        print(json.dumps({"first": one, "second": other, "games": len(points), "points": sum(points)}), flush=True)
        results += [(one, other, score) for score in points]
    for name, rating in elo(results, given.models[0]).items():
        print(f"{rating:7.0f}  {name}")


if __name__ == "__main__":
    main()
