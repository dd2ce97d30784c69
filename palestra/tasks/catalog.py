"""Everything that can be trained on here: our own tasks, installed ones, and those of every source."""

from collections.abc import Iterator
from dataclasses import dataclass

from palestra.errors import MissingExtra
from palestra.spec.imports import load_named
from palestra.tasks.task import SOURCES, TASKS, Task, installed

OPEN = {"openenv": "<url or package>", "verifiers": "<taskset>", "environment": "<module>:<Class>"}
"""Sources that take any name."""


@dataclass(frozen=True)
class Entry:
    """A task as `palestra tasks` lists it."""

    name: str
    source: str
    """palestra, the module of another package, or what is before the colon."""
    extra: str
    """The extra of palestra to install; empty for none."""
    needs: str
    """What else it needs; empty for nothing: it runs as it is."""
    workflow: str
    """The `rollout.workflow` that it needs; empty for any."""
    example: str
    """A line of `tasks.train`."""


def catalog() -> Iterator[Entry]:
    """All tasks; of a source whose extra is not installed one line that says so."""
    for name, reference in TASKS.items():
        if name not in SOURCES:
            cls = load_named(reference, "task", "class")
            yield Entry(name, "palestra", cls.extra, _data(cls), "", _example(name, cls))
    for name, reference in installed().items():
        cls = load_named(reference, "task", "class")
        yield Entry(name, reference.partition(":")[0], "", "", cls.workflow or "", _example(name, cls))
    for source, reference in SOURCES.items():
        cls = load_named(reference, "task", "class")
        try:
            listed = {OPEN[source]: ""} if source in OPEN else cls.names()
        except MissingExtra as error:
            listed = {"…": str(error)}
        for rest, needs in listed.items():
            name = f"{source}:{rest}"
            yield Entry(name, source, cls.extra, needs, cls.workflow or "", _example(name, cls))


def search(word: str) -> list[Entry]:
    """The entries with the word in their name, source or needs, in any case."""
    return [one for one in catalog() if word.lower() in f"{one.name} {one.source} {one.needs}".lower()]


def _example(name: str, cls: type[Task]) -> str:
    required = [key for key, field in cls.Args.model_fields.items() if field.is_required() and key != cls.named]
    args = f", args: {{{', '.join(f'{key}: …' for key in required)}}}" if required else ""
    quoted = f'"{name}"' if ":" in name else name
    return f"{{task: {quoted}{args}}}"


def _data(cls: type[Task]) -> str:
    """A task of rows reads a data set, unless it makes its problems itself."""
    return "its data set: a file, a folder or the Hub" if "source" in cls.Args.model_fields else ""
