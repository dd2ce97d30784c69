"""Rows with given answers: what is asked, which answers there are and which is right, in the forms that people use."""

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from palestra.data.mixture import Permutation, stream_key
from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.spec.kinds.evaluate import LikelihoodUse
from palestra.tasks.dataset import load_rows

if TYPE_CHECKING:
    from jinja2 import Template

FORMS = (("query", "choices", "gold"), ("context_options", "continuation", "gold"), ("context", "continuation"))
"""The columns of llm-foundry's and CORE's tasks: choices, contexts to choose from, a text to be written."""
SHOT_END = "\n\n"
"""What ends an example that stands before the question."""


@dataclass(frozen=True)
class Option:
    """An answer after its context, delimiter included."""

    context: str
    answer: str


@dataclass(frozen=True)
class Item:
    """A row: options of which one is right, or a single text that the model must write itself."""

    options: tuple[Option, ...]
    gold: int
    """The number of the right one."""

    @property
    def choice(self) -> bool:
        """Whether there is something to choose from."""
        return len(self.options) > 1

    @property
    def one_context(self) -> bool:
        """Whether all answers follow the same text."""
        return len({option.context for option in self.options}) == 1


@dataclass(frozen=True)
class Suite:
    """The items of one file."""

    use: LikelihoodUse
    items: tuple[Item, ...]
    total: int
    """How many rows the file has."""

    @property
    def label(self) -> str:
        """Its name in this run."""
        return self.use.label

    def identity(self) -> dict[str, Any]:
        """What makes a score on these items comparable with another; plain data."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(json.dumps([[(o.context, o.answer) for o in item.options], item.gold]).encode())
        use = self.use.model_dump(mode="json", exclude={"name", "items"})
        return {**use, "items": len(self.items), "of": self.total, "items_sha256": digest.hexdigest()}


def load_suite(use: LikelihoodUse, seed: int) -> Suite:
    """Read the rows of a file; examples that stand before a question are drawn from the other rows by the seed."""
    rows = load_rows(use.path, default=use.path, files=(f"{use.label}.*", "*.jsonl", "*.parquet"))
    read = [_read(use, row, number) for number, row in enumerate(rows, 1)]
    if not read:
        raise UsageError(f"{use.path} has no rows")
    if use.shots >= len(read):
        raise UsageError(f"likelihood: {use.shots} shots, but {use.path} has only {len(read) - 1} other rows to take")
    kinds = {item.choice for item in read}
    if len(kinds) > 1:
        raise UsageError(f"{use.path} has rows with several answers and rows with one: score them as two files")
    count = min(use.items or len(read), len(read))
    items = [_with_shots(read, index, use.shots, seed) for index in range(count)]
    return Suite(use, tuple(items), len(read))


def _with_shots(read: Sequence[Item], index: int, shots: int, seed: int) -> Item:
    """The item with examples before its question: others of the same file, never itself."""
    if not shots:
        return read[index]
    places = Permutation(len(read) - 1, stream_key(seed, "shots", index))(np.arange(shots))
    others = (read[place + (place >= index)] for place in places.tolist())
    shown = "".join(one.options[one.gold].context + one.options[one.gold].answer + SHOT_END for one in others)
    item = read[index]
    return Item(tuple(Option(shown + option.context, option.answer) for option in item.options), item.gold)


def _read(use: LikelihoodUse, row: Row, number: int) -> Item:
    where = f"{use.path}, row {number}"
    if use.doc_to_text is not None:
        item = _from_templates(use, row, where)
    else:
        item = _from_columns(use, row, where)
    for option in item.options:
        if not option.answer:
            raise UsageError(f"{where}: an answer is empty, and nothing is as likely as nothing")
    return item


def _from_columns(use: LikelihoodUse, row: Row, where: str) -> Item:
    form = next((form for form in FORMS if all(column in row for column in form)), None)
    if form is None:
        known = "; ".join(", ".join(form) for form in FORMS)
        raise UsageError(
            f"{where} has the columns {', '.join(row) or '(none)'}: expected {known}; else say with doc_to_text and "
            "doc_to_target how a row is read"
        )
    # White space at the ends is an accident of the files, as llm-foundry has it: the delimiter is what separates.
    if form[0] == "query":
        context, answers = _text(row["query"], where), [_text(one, where) for one in _list(row["choices"], where)]
        return _choice(use, [context] * len(answers), answers, row["gold"], where)
    if form[0] == "context_options":
        contexts = [_text(one, where) for one in _list(row["context_options"], where)]
        return _choice(use, contexts, [_text(row["continuation"], where)] * len(contexts), row["gold"], where)
    option = Option(_text(row["context"], where) + use.delimiter, _text(row["continuation"], where))
    return Item((option,), 0)


def _from_templates(use: LikelihoodUse, row: Row, where: str) -> Item:
    assert use.doc_to_text is not None
    assert use.doc_to_target is not None  # LikelihoodUse.problems
    context = str(_rendered(use.doc_to_text, row, where))
    target = _rendered(use.doc_to_target, row, where)
    if use.doc_to_choice is None:
        return Item((Option(context + use.delimiter, str(target)),), 0)
    if isinstance(use.doc_to_choice, list):
        answers = [str(_rendered(template, row, where, columns=False)) for template in use.doc_to_choice]
    else:
        answers = [str(one) for one in _list(_rendered(use.doc_to_choice, row, where), where)]
    if isinstance(target, str) and use.doc_to_target in row and target in answers:
        target = answers.index(target)
    return _choice(use, [context] * len(answers), answers, target, where)


def _choice(use: LikelihoodUse, contexts: list[str], answers: list[str], gold: Any, where: str) -> Item:
    if len(answers) < 2:
        raise UsageError(f"{where}: there is nothing to choose from, only {answers!r}")
    if isinstance(gold, str) and gold.strip().isdecimal():
        gold = int(gold)
    if isinstance(gold, str) and gold in answers:
        gold = answers.index(gold)
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < len(answers):
        raise UsageError(
            f"{where}: the right answer is {gold!r}, expected one of them or a number from 0 on: {answers}"
        )
    pairs = zip(contexts, answers, strict=True)
    return Item(tuple(Option(context + use.delimiter, answer) for context, answer in pairs), gold)


def _rendered(template: str, row: Row, where: str, *, columns: bool = True) -> Any:
    """A column's value, or what a Jinja template makes of the row."""
    if columns and template in row:
        return row[template]
    if columns and "{" not in template:
        raise UsageError(f"{where} has no column {template!r}, only {', '.join(row) or 'nothing'}")
    import jinja2

    try:
        return _compiled(template).render(**row)
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
        raise UsageError(f"{where}: the template {template!r} failed: {error}") from error


@cache
def _compiled(template: str) -> "Template":
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # As lm-eval has it: a name that is no column is an error, and a line break at the end stays.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(template)


def _list(value: Any, where: str) -> list[Any]:
    """A list, also one that a template or a file has as text."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise UsageError(f"{where}: expected a list of answers, got {value!r:.80}") from error
    if not isinstance(value, list | tuple):
        raise UsageError(f"{where}: expected a list of answers, got {value!r:.80}")
    return list(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected a text, got {value!r:.80}")
    return value.strip()
