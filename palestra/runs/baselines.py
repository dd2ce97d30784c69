"""Reference scores: those that come with the package and those kept in a runs folder, beside an evaluation's own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from palestra.errors import UsageError

FILE = "baselines.jsonl"
SHIPPED = Path(__file__).with_name(FILE)


@dataclass(frozen=True)
class Score:
    """The share of problems that a model solves; another is comparable if task, metric and shots are equal."""

    model: str
    task: str
    """The name of the task or file."""
    metric: str
    """accuracy; of a task of lm-eval its metric, with the filter where there are several."""
    value: Annotated[float, Field(ge=0, le=1)]
    problems: int | None = None
    """How many it is over; null where that is not known, and nothing of its noise."""
    shots: int = 0
    note: str = ""
    """Where it is from, and which settings it depends on."""

    @property
    def error(self) -> float | None:
        """The standard error of a share, as if of two more right and two more wrong: 0 of 4 is not certain."""
        n = (self.problems or 0) + 4  # Agresti and Coull (1998)
        share = (self.value * (n - 4) + 2) / n
        return None if self.problems is None else math.sqrt(share * (1 - share) / n)

    def beside(self, reference: "Score") -> str:
        """In words: higher or lower than the reference by more than chance makes of 95 in 100, or within that."""
        reach = 1.96 * math.hypot(self.error or 0.0, reference.error or 0.0)
        if abs(self.value - reference.value) <= reach:
            return f"within ± {100 * reach:.1f}"
        return "higher" if self.value > reference.value else "lower"


def scores(report: Mapping[str, Any]) -> Iterator[Score]:
    """The scores in an evaluation.json that are shares of problems."""
    model = report["model"]["init"]
    for task in report["tasks"].values():
        if "greedy" in task:
            share = task["greedy"]["accuracy"]
            shots = task["args"].get("shots", task["args"].get("few_shot", 0))
            yield Score(model, task["task"], "accuracy", share["mean"], share["problems"], shots)
    for label, rows in report["likelihood"].items():
        yield Score(model, label, "accuracy", rows["accuracy"]["mean"], rows["items"], rows["shots"])
    for label, task in report.get("lm_eval", {}).items():  # old evaluations have none
        for metric, (value, _) in task["metrics"].items():
            if 0 <= value <= 1:
                yield Score(model, label, metric, value, task["documents"], task["shots"])


def references(score: Score, root: Path) -> list[Score]:
    """The comparable ones of the package and of the runs folder, whatever model they are of."""
    known = [*_read(SHIPPED), *(_read(root / FILE) if (root / FILE).exists() else ())]
    return [one for one in known if (one.task, one.metric, one.shots) == (score.task, score.metric, score.shots)]


def _read(path: Path) -> Iterator[Score]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield TypeAdapter(Score).validate_json(line)
        except ValidationError as error:
            why = f"{error.errors()[0]['loc'] or ''} {error.errors()[0]['msg']}"
            raise UsageError(f"{path}:{number} is not a reference score: {why.strip()}") from error
