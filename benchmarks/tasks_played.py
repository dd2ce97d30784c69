"""Every task that `palestra tasks` lists, played once by a language model through the workflow; a JSON line each.

    python benchmarks/tasks_played.py [--search WORD] [--turns 6] > played.jsonl

The model is tiny and random: what it writes is nonsense, and games end with its invalid moves, with its turns, or by
themselves. What is shown is that every task starts, reads, answers and ends: `correct` and `wrong` have a score,
`refused` says in a sentence what is missing here, `error` is a task that failed. One engine plays all of them.
"""

import argparse
import asyncio
import json
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from palestra.data.tokenizers import character_tokenizer
from palestra.errors import UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.types import Sampling
from palestra.lm.model import Transformer
from palestra.rollout.environment import known_text
from palestra.rollout.episode import Episode, Workflow, encode_problem
from palestra.rollout.types import Trajectory
from palestra.rollout.workflows import make_workflow
from palestra.spec.kinds.posttrain import EnvironmentSpec
from palestra.spec.shape import Shape
from palestra.spec.tasks import TaskUse
from palestra.tasks.catalog import OPEN, search
from palestra.tasks.verify.workers import Verifiers

TOKENIZER = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
CONTEXT = 6000
MADE = 5  # problems of reasoning_gym, of which one in ten is held out


def random_engine() -> Engine:
    """A random model of two small layers over characters."""
    torch.manual_seed(0)
    model = Transformer(Shape(layers=2, width=32, heads=2, mlp=64, context=CONTEXT, vocab=TOKENIZER.vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    assert TOKENIZER.eos is not None
    return Engine(model, eos=frozenset({TOKENIZER.eos}), tokenizer=TOKENIZER, max_running=8)


def play(names: Iterable[str], turns: int = 6) -> Iterator[dict[str, Any]]:
    """A row of each task: its name, seconds, outcome, reward, turns and tokens."""
    spec = EnvironmentSpec(name="environment", turns=turns, observation=1500, seconds=60.0)
    workflow = make_workflow(spec)
    names = list(names)
    # Their verifiers share a worker, which takes seconds to import the package.
    gym = [TaskUse(task=name, args={"size": MADE}) for name in names if name.startswith("reasoning_gym:")]
    with (
        LocalGenerator(random_engine()) as generator,
        Verifiers(gym, workers=1, timeout=60.0, traced=False) as shared,
    ):
        for name in names:
            began = time.perf_counter()
            row = _played(name, workflow, generator, shared)
            yield {"task": name, "seconds": round(time.perf_counter() - began, 2), **row}


def _played(name: str, workflow: Workflow, generator: LocalGenerator, shared: Verifiers) -> dict[str, Any]:
    use = TaskUse(task=name)
    try:
        if use.label in shared.tasks:
            one = _episode(shared, use.label, workflow, generator)
        else:
            with Verifiers([use], workers=1, timeout=60.0, traced=False) as verifiers:
                one = _episode(verifiers, use.label, workflow, generator)
    except (UsageError, ValidationError) as error:  # the latter: `answers` has no rows without a `source`
        said = " ".join(str(error).split()).replace(f"{sysconfig.get_path('purelib')}/", "")  # not this machine's paths
        return {"outcome": "refused", "note": said[:200]}
    outcome = {"outcome": str(one.verdict.status), "reward": one.reward, "turns": len(one.turns), "tokens": one.sampled}
    return outcome if one.verdict.status != "error" else {**outcome, "note": one.verdict.note[:200]}


def _episode(verifiers: Verifiers, label: str, workflow: Workflow, generator: LocalGenerator) -> Trajectory:
    task = verifiers.tasks[label]
    problem = task.part("train" if "train" in task.splits else task.splits[0])[0]
    sampling, text = Sampling(max_new_tokens=8, stop=task.stops), known_text(TOKENIZER, problem.text)
    prompt = encode_problem(replace(problem, prompt=text[-CONTEXT // 2 :]), TOKENIZER)
    episode = Episode(problem, prompt, 1, 0, sampling, generator, verifiers.begin, TOKENIZER, CONTEXT)

    async def go() -> Trajectory:
        return (await workflow(episode))[0]

    return asyncio.run(go())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", default="", help="only tasks with this word")
    parser.add_argument("--turns", type=int, default=6)
    given = parser.parse_args()
    names = [entry.name for entry in search(given.search) if entry.source not in OPEN]
    counts: Counter[tuple[str, str]] = Counter()
    for row in play(names, given.turns):
        counts[row["task"].partition(":")[0] if ":" in row["task"] else "palestra", row["outcome"]] += 1
        print(json.dumps(row, ensure_ascii=False), flush=True)
    for (source, outcome), count in sorted(counts.items()):
        print(f"{source:<15}{outcome:<12}{count}", file=sys.stderr)


if __name__ == "__main__":
    main()
