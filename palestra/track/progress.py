"""The progress of a run: a live line on a terminal, a plain line at intervals elsewhere, nothing when quiet.

A terminal or pipe that goes away meanwhile ends the lines, not the run.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TextIO

LIVE_EVERY = 0.25  # seconds between two updates of the live line
PLAIN_FIRST, PLAIN_NEXT, PLAIN_GROWTH, PLAIN_MOST = 2.0, 10.0, 1.5, 60.0  # seconds between two plain lines


@dataclass(slots=True)
class Row:
    """One line: the run, or one of its seeds."""

    name: str
    total: int
    first: int  # `done` at the first update: what was done before a resume does not count as speed
    since: float
    done: int = 0
    headline: str = ""
    until: float | None = None  # when it was done: the others may continue
    task: Any = None  # rich's handle of the live line

    def rate(self) -> float | None:
        """Units per second since the first update; None before there is a second one."""
        seconds = (time.monotonic() if self.until is None else self.until) - self.since
        return (self.done - self.first) / seconds if self.done > self.first else None

    def text(self, unit: str) -> dict[str, str]:
        """The parts of the line, formatted."""
        rate = self.rate()
        left = (self.total - self.done) / rate if rate else None
        return {
            "name": self.name,
            "count": f"{self.done:,}/{self.total:,} {unit}",
            "rate": f"{_short(rate)} {unit}/s" if rate else "",
            "headline": self.headline,
            "eta": f"{_clock(left)} left" if left else "",
        }


class Progress(AbstractContextManager["Progress"]):
    """Shows the rows of a run; a run has one row named `name`, parallel seeds one each (`update(..., row="seed 1")`).

    Updates that come before the next line is due only store two values.
    """

    def __init__(
        self, total: int, unit: str = "frames", name: str = "", enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.total, self.unit, self.name = total, unit, name
        self._enabled = enabled
        self._stream = stream or sys.stderr
        terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Any = self._open_live() if self._enabled and terminal else None
        self._wait = PLAIN_FIRST
        self._due = time.monotonic() + (LIVE_EVERY if self._live else self._wait)

    def update(self, done: int, headline: str = "", row: str | None = None) -> None:
        """Set that `done` of the total is done; `headline` is the main metric, such as "return 312"."""
        if not self._enabled:
            return
        name = self.name if row is None else row
        state = self.rows.setdefault(name, Row(name, self.total, done, time.monotonic()))
        state.done, state.headline = done, headline
        if state.until is None and done >= state.total:
            state.until = time.monotonic()
        if time.monotonic() >= self._due:
            self._shown(self._show)

    def close(self) -> None:
        """Show the last state and release the terminal."""
        if self._enabled:
            self._shown(self._show)
        if self._live is not None:  # its streams stand in place of stdout and stderr
            self._shown(self._live.stop)
        self._enabled = False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _shown(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:  # nobody reads any more
            self._enabled = False

    def _show(self) -> None:
        if self._live is not None:
            self._draw()
            self._due = time.monotonic() + LIVE_EVERY
            return
        for row in self.rows.values():
            parts = row.text(self.unit)
            share = f"({100 * row.done / max(row.total, 1):.0f}%)"
            line = [f"{parts['count']} {share}", parts["headline"], parts["rate"], parts["eta"]]
            print((f"{row.name}: " if row.name else "") + ", ".join(filter(None, line)), file=self._stream, flush=True)
        self._wait = PLAIN_NEXT if self._wait == PLAIN_FIRST else min(self._wait * PLAIN_GROWTH, PLAIN_MOST)
        self._due = time.monotonic() + self._wait

    def _open_live(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Live

        texts = {name: TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in Row("", 0, 0, 0.0).text("")}
        live = Live(
            texts["name"], BarColumn(20), texts["count"], texts["rate"], texts["headline"], texts["eta"],
            console=Console(file=self._stream), auto_refresh=False,
        )  # fmt: skip
        live.start()
        return live

    def _draw(self) -> None:
        for row in self.rows.values():
            if row.task is None:
                row.task = self._live.add_task("", total=row.total, **row.text(self.unit))
            self._live.update(row.task, completed=row.done, **row.text(self.unit))
        self._live.refresh()


def _short(x: float) -> str:
    """Three digits and a unit: 1.23k, 45.6M."""
    for unit in ("", "k", "M"):
        if x < 999.5:
            return f"{x:.3g}{unit}"
        x /= 1000
    return f"{x:.3g}G"


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
