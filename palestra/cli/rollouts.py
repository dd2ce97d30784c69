"""What `palestra rollouts` prints: the completions of a run with their verdicts."""

import itertools
from pathlib import Path

from rich.console import Console
from rich.text import Text

from palestra.cli.show import console, indented, printable
from palestra.errors import UsageError
from palestra.rollout.records import FILE, RolloutRecord, newest
from palestra.runs.run import open_run
from palestra.tasks.task import Problem, Status

COLORS = {"correct": "green", "wrong": "red", "unparsable": "yellow", "timeout": "magenta", "error": "bold red"}
LONGEST_PROMPT = 1000
"""Characters of a prompt; of a longer one only the end is shown."""


def show_rollouts(run: str, root: Path, *, status: str | None, task: str | None, step: int | None, limit: int) -> None:
    """The newest `limit` completions of each seed that match the status, the task and the training step."""
    if status is not None and status not in list(Status):
        raise UsageError(f"no status {status!r}: choose one of {', '.join(Status)}")
    opened = open_run(run, root)
    files = {session.seed: session.path / FILE for session in opened.sessions}
    if not any(path.is_file() for path in files.values()):
        kind = opened.spec["kind"]
        why = "none has been trained on yet" if kind == "posttrain" else f"a run of kind {kind} has none"
        raise UsageError(f"{opened.path} has no {FILE}: {why}")
    screen = console()
    for seed, path in files.items():
        if not path.is_file():
            continue
        if len(files) > 1:
            screen.print(Text(f"seed {seed}", "bold"))
        wanted = (r for r in newest(path) if task in (None, r.group.problem.task) and step in (None, r.step))
        every = ((record, *each) for record in wanted for each in enumerate(record.group.trajectories))
        matching = ((record, index) for record, index, of in every if status in (None, of.verdict.status))
        chosen = list(itertools.islice(matching, limit + 1))
        groups = itertools.groupby(chosen[:limit], key=lambda pair: id(pair[0]))
        for of in reversed([list(pairs) for _, pairs in groups]):
            _show_record(screen, of[0][0], [index for _, index in of])
        if not chosen:
            screen.print("no rollouts match" if (status, task, step) != (None, None, None) else "no rollouts yet")
        elif len(chosen) > limit:
            screen.print(Text(f"there are more: these are the newest {limit} (--limit)", "dim"))


def _show_record(screen: Console, record: RolloutRecord, indices: list[int]) -> None:
    group = record.group
    screen.print(Text(f"── {group.problem.id}  number {group.number}  step {record.step}  {record.fate}", "bold"))
    screen.print(Text(indented(_prompt(group.problem)), "dim"))
    for index in indices:
        trajectory = group.trajectories[index]
        verdict, color = trajectory.verdict, COLORS[trajectory.verdict.status]
        versions = sorted({v for v, used in zip(trajectory.versions, trajectory.loss_mask, strict=True) if used})
        facts = [f"reward {trajectory.reward:g}", f"{trajectory.sampled} tokens", trajectory.stop_reason]
        if record.advantages:
            mean = sum(record.advantages[index]) / max(trajectory.sampled, 1)
            facts.insert(1, f"advantage {mean:+.3g}")
        if versions:
            last = f" to {versions[-1]}" if len(versions) > 1 else ""
            facts.append(f"version{'s' if last else ''} {versions[0]}{last}")
        facts += [f"{name} {value:g}" for name, value in verdict.parts.items()]
        head = Text(f"{verdict.status}", f"bold {color}")
        head.append(f"  completion {index + 1} of {len(group.trajectories)}: {', '.join(facts)}", "not bold")
        screen.print(head)
        if verdict.note:
            screen.print(Text(f"  note: {printable(verdict.note)}", "italic"))
        screen.print(Text(indented(trajectory.completion), color))
    screen.print()


def _prompt(problem: Problem) -> str:
    text = problem.prompt
    if not isinstance(text, str):
        text = "\n".join(f"{message['role']}: {message.get('content')}" for message in text)
    return text if len(text) <= LONGEST_PROMPT else f"… {text[-LONGEST_PROMPT:]}"
