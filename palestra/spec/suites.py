"""Suites in a spec: evaluations beside training, each a spec of kind `evaluate` or a name that is known here."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from palestra.errors import UsageError
from palestra.spec.base import Conflict, Name
from palestra.spec.cadence import Cadence, CountCadence
from palestra.spec.model import Model

if TYPE_CHECKING:
    from palestra.spec.kinds.evaluate import EvaluateSpec

EVERY = Cadence(500, "steps")
"""When a suite runs during training unless its spec says otherwise."""
CENTRED = "centred"
"""The mean of a suite's centred accuracies stands under this name among its tasks."""

_ANSWER = "\nAnswer: "


def _core(file: str, **settings: Any) -> dict[str, Any]:
    return {"path": f"core_eval/{file}.jsonl", "border": "common", **settings}


SUITES: dict[str, dict[str, Any]] = {
    # Files of llm-foundry's evaluation suite, with the shots and delimiters of CORE (Li et al. 2024, arXiv 2406.11794).
    "core": {
        "likelihood": [
            _core("arc_easy", shots=10, delimiter=_ANSWER),
            _core("arc_challenge", shots=10, delimiter=_ANSWER),
            _core("boolq", shots=10, delimiter=_ANSWER, baseline=0.62),  # six in ten answers are yes
            _core("piqa", shots=10, delimiter=_ANSWER),
            _core("commonsense_qa", shots=10),
            _core("copa"),
            _core("openbook_qa"),
            _core("winograd_wsc"),
            _core("winogrande"),
            _core("lambada_openai"),
            _core("bigbench_operators", shots=10),
            _core("bigbench_dyck_languages", shots=10),
            _core("bigbench_repeat_copy_logic", shots=10),
        ]
    },
}
"""What a suite of a name consists of: blocks of a spec of kind `evaluate`."""


class SuiteUse(Model):
    """A suite that a model is measured with during its training or after it.

    It never changes what is trained: the weights are copied, and what is drawn comes from the suite's own seed.
    """

    suite: str = Field(min_length=1)
    """A file with a spec of kind `evaluate`, whose `model`, `dtype` and `device` do not count here; or `core`."""
    name: Name | None = None
    """What it is called in metrics and results.json; null takes the file's stem."""
    mode: Literal["during", "after", "both"] = "both"
    """Measure every so often, the weights of the last step, or both."""
    every: CountCadence | None = None
    """How often during training; null is every 500 steps."""
    limit: int | None = Field(default=None, ge=1)
    """Rows, documents and problems of each of its tasks at most, from the first; null takes those of the suite."""

    @property
    def label(self) -> str:
        """What it is called in this run."""
        last = self.suite.rpartition("/")[2]
        file, _, chosen = last.partition(":")
        return self.name or chosen or re.sub(r"\.(ya?ml|json)$", "", file)

    @property
    def cadence(self) -> Cadence | None:
        """How often during training; None where it is not measured then."""
        return None if self.mode == "after" else self.every or EVERY


def suite_conflicts(uses: Sequence[SuiteUse], counts: Sequence[str]) -> list[Conflict]:
    """Names that nobody knows, one for two, cadences that do nothing or in units that the kind does not count."""
    found, labels = [], Counter(use.label for use in uses)
    for place, use in enumerate(uses):
        at = ("suites", place)
        if use.suite not in SUITES and not re.search(r"\.(ya?ml|json)(:[^/]*)?$", use.suite):
            known = ", ".join(SUITES)
            found.append(Conflict((*at, "suite"), f"expected a file of kind evaluate such as mine.yaml, or {known}"))
        if use.mode == "after" and use.every is not None:
            found.append(Conflict((*at, "every"), "expected null, because `mode: after` measures once"))
        if use.cadence is not None and use.cadence.unit not in counts:
            reason = f"expected {' or '.join(counts)}, which this kind counts; got '{use.cadence}'"
            found.append(Conflict((*at, "every"), reason))
        if labels[use.label] > 1:
            reason = f"expected another name: {labels[use.label]} suites are called '{use.label}'"
            found.append(Conflict((*at, "name"), reason))
    return found


def suite_spec(use: SuiteUse) -> "EvaluateSpec":
    """What a suite consists of, with its limit; a file is read now."""
    # Here, because specs of kinds build on this module.
    from palestra.spec.kinds.evaluate import EvaluatedModel, EvaluateSpec
    from palestra.spec.load import load, resolved

    if use.suite in SUITES:
        spec = resolved({"kind": "evaluate", "name": use.suite, "model": {"init": use.suite}, **SUITES[use.suite]})
    else:
        spec = load(use.suite).spec
    if not isinstance(spec, EvaluateSpec):
        raise UsageError(f"the suite {use.suite} is a spec of kind {spec.kind}, expected one of kind evaluate")
    tasks = [one.label for one in (*spec.tasks, *spec.likelihood, *spec.texts)]
    if CENTRED in tasks:
        raise UsageError(f"the suite {use.suite} has a task called '{CENTRED}', which is the mean over its tasks")
    # Whose weights it is about is the run's to say.
    spec = spec.model_copy(update={"model": EvaluatedModel(init="the model that is trained")})
    if use.limit is None:
        return spec
    most = use.limit
    return spec.model_copy(
        update={
            "likelihood": [_limited(one, "items", most) for one in spec.likelihood],
            "texts": [_limited(one, "items", most) for one in spec.texts],
            "eval": _limited(spec.eval, "problems", most),
        }
    )


def _limited(model: Any, field: str, most: int) -> Any:
    return model.model_copy(update={field: min(most, getattr(model, field) or most)})
