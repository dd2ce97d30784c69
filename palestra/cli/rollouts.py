"""What `palestra rollouts` prints: prompts, answers and verdicts of a run, the newest last."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from palestra.cli.show import console
from palestra.errors import UsageError
from palestra.rollout.records import FILE, Record, newest
from palestra.runs.run import open_run
from palestra.tasks.types import Problem, Status

COLOURS = {
    Status.CORRECT: "green",
    Status.WRONG: "red",
    Status.UNPARSABLE: "yellow",
    Status.TIMEOUT: "magenta",
    Status.ERROR: "bold red",
}
LONGEST_PROMPT = 1000
"""Characters of a prompt; of a longer one the end is shown."""
# What a terminal would obey instead of show: controls, halves of characters, changes of the writing direction.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

Shown = tuple[Record, list[int]]
"""A record and which of its trajectories to show."""


def show_rollouts(run: str, root: Path, *, status: str | None, task: str | None, step: int | None, limit: int) -> None:
    """The newest `limit` answers of each seed that have a status, are of a task, were used in a step."""
    if status is not None and status not in list(Status):
        raise UsageError(f"no status {status!r}: choose one of {', '.join(Status)}")
    found = open_run(run, root)
    files = {session.seed: session.path / FILE for session in found.sessions}
    if not any(path.is_file() for path in files.values()):
        kind = found.spec["kind"]
        why = "none has been trained on yet" if kind == "posttrain" else f"a run of kind {kind} has none"
        raise UsageError(f"{found.path} has no {FILE}: {why}")
    target = console()
    for seed, path in files.items():
        if not path.is_file():
            continue
        if len(files) > 1:
            target.print(Text(f"seed {seed}", "bold"))
        records = (one for one in newest(path) if _asked(one, task, step))
        chosen, more = _chosen(records, status, limit)
        for record, places in reversed(chosen):
            _show(target, record, places)
        if not chosen:
            target.print("no rollouts match" if (status, task, step) != (None, None, None) else "no rollouts yet")
        elif more:
            target.print(Text(f"there are more: these are the newest {limit} (--limit)", "dim"))


def _asked(record: Record, task: str | None, step: int | None) -> bool:
    return task in (None, record.group.problem.task) and step in (None, record.step)


def _chosen(records: Iterable[Record], status: str | None, limit: int) -> tuple[list[Shown], bool]:
    """The first records with answers of the status, until there are `limit` answers; and whether there are more."""
    chosen: list[Shown] = []
    for record in records:
        matching = [
            place
            for place, one in enumerate(record.group.trajectories)
            if status is None or one.verdict.status == status
        ]
        if not matching:
            continue
        if limit == 0:
            return chosen, True
        chosen.append((record, matching[:limit]))
        if len(matching) > limit:
            return chosen, True
        limit -= len(matching)
    return chosen, False


def _show(target: Console, record: Record, places: list[int]) -> None:
    group = record.group
    target.print(Text(f"── {group.problem.id}  number {group.number}  step {record.step}  {record.fate}", "bold"))
    for line in _prompt_lines(group.problem):
        target.print(Text(line, "dim"))
    for place in places:
        one = group.trajectories[place]
        verdict, colour = one.verdict, COLOURS[one.verdict.status]
        drawn = sorted({v for v, used in zip(one.versions, one.loss_mask, strict=True) if used})
        facts = [f"reward {one.reward:g}", f"{one.drawn} tokens", one.stop_reason]
        if record.advantages:
            mean = sum(record.advantages[place]) / max(one.drawn, 1)
            facts.insert(1, f"advantage {mean:+.3g}")
        if drawn:
            facts.append(f"version {drawn[0]}" if len(drawn) == 1 else f"versions {drawn[0]} to {drawn[-1]}")
        facts += [f"{name} {value:g}" for name, value in verdict.parts.items()]
        head = Text(f"{verdict.status}", f"bold {colour}")
        head.append(f"  answer {place + 1} of {len(group.trajectories)}: {', '.join(facts)}", "not bold")
        target.print(head)
        if verdict.note:
            target.print(Text(f"  note: {_seen(verdict.note)}", "italic"))
        target.print(Text("\n".join(f"  {line}" for line in _seen(one.completion).split("\n")), colour))
    target.print()


def _prompt_lines(problem: Problem) -> Iterator[str]:
    if isinstance(problem.prompt, str):
        text = problem.prompt
    else:
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in problem.prompt)
    text = _seen(text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}")
    yield from (f"  {line}" for line in text.split("\n"))


def _seen(text: str) -> str:
    """The text with what a terminal would obey spelled out."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
