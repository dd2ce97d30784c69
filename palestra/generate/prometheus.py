"""Counters and histograms in Prometheus' text format 0.0.4."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Counter:
    """A number that only grows, one for each combination of labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()):
        self.name, self.text, self.labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, amount: float = 1.0) -> None:
        """Count, under the values of the labels."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterable[str]:
        """The exposition."""
        yield from _heading(self.name, self.text, "counter")
        for values, number in sorted(self._values.items()):
            yield f"{self.name}{_labels(zip(self.labels, values, strict=True))} {_number(number)}"


class Histogram:
    """How many observations (in seconds) lie at or below each bound, for each combination of labels."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS):
        self.name, self.text, self.labels, self.bounds = name, text, labels, bounds
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, value: float, *labels: str) -> None:
        """Add one observation, under the values of the labels."""
        counts = self._counts.setdefault(labels, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self._sums[labels] = self._sums.get(labels, 0.0) + value

    def lines(self) -> Iterable[str]:
        """The exposition: buckets are cumulative."""
        yield from _heading(self.name, self.text, "histogram")
        for values, counts in sorted(self._counts.items()):
            pairs = list(zip(self.labels, values, strict=True))
            total = 0
            for bound, count in zip([*map(_number, self.bounds), "+Inf"], counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labels([*pairs, ('le', bound)])} {total}"
            yield f"{self.name}_sum{_labels(pairs)} {_number(self._sums[values])}"
            yield f"{self.name}_count{_labels(pairs)} {total}"


def gauges(prefix: str, values: Mapping[str, float], text: str) -> Iterable[str]:
    """The exposition of numbers that are read now, each under its own name."""
    for name, value in values.items():
        yield from _heading(prefix + name, f"{text}: {name.replace('_', ' ')}.", "gauge")
        yield f"{prefix}{name} {_number(value)}"


def _heading(name: str, text: str, kind: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(int(value)) if float(value).is_integer() else repr(float(value))
