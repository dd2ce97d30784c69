"""What is scored by likelihood: rows with given answers, in the column layouts in use, and whole texts."""

import ast
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from palestra.data.mixture import permutation, stream_key
from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.spec.kinds.evaluate import LikelihoodUse, TextUse
from palestra.tasks.dataset import load_rows, text_of

LAYOUTS = (
    ("query", "choices", "gold"),
    ("context_options", "continuation", "gold"),
    ("context", "continuation"),
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
)
"""The columns of llm-foundry's and CORE's tasks (choices, contexts to choose from, a text to be written), and those of
HellaSwag."""
SHOT_END = "\n\n"
"""What separates few-shot examples from each other and from the question."""


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
    """Index of the right option."""

    @property
    def choice(self) -> bool:
        """Whether there is something to choose from."""
        return len(self.options) > 1

    @property
    def one_context(self) -> bool:
        """Whether all answers follow the same text."""
        return len({option.context for option in self.options}) == 1


Use = TypeVar("Use", LikelihoodUse, TextUse)
Content = TypeVar("Content", Item, str)


@dataclass(frozen=True)
class ScoredSet(Generic[Use, Content]):
    """The rows or documents of one source."""

    use: Use
    items: tuple[Content, ...]
    total: int
    """How many the source has."""

    @property
    def label(self) -> str:
        """Its name in this run."""
        return self.use.label

    def identity(self) -> dict[str, Any]:
        """What makes two scores on these items comparable; plain data."""
        digest = hashlib.sha256()
        for item in self.items:
            if isinstance(item, str):
                digest.update(hashlib.sha256(item.encode()).digest())
            else:
                digest.update(json.dumps([[(o.context, o.answer) for o in item.options], item.gold]).encode())
        use = self.use.model_dump(mode="json", exclude={"name", "items"})
        return {**use, "items": len(self.items), "of": self.total, "items_sha256": digest.hexdigest()}


Choices = ScoredSet[LikelihoodUse, Item]
Texts = ScoredSet[TextUse, str]


def load_texts(use: TextUse) -> Texts:
    """Read the documents of a source; empty ones have nothing to score and are left out."""
    files = (f"{use.label}.*", "*.jsonl", "*.parquet", "*.txt")
    rows = load_rows(use.path, default=use.path, files=files, split=use.split)
    documents = [text for number, row in enumerate(rows) if (text := text_of(row, use.key, number, use.path))]
    if not documents:
        raise UsageError(f"{use.path} has no texts")
    return Texts(use, tuple(documents[: use.items]), len(documents))


def load_choices(use: LikelihoodUse, seed: int) -> Choices:
    """Read the rows of a file; few-shot examples are sampled from the other rows, by the seed."""
    rows = load_rows(use.path, default=use.path, files=(f"{use.label}.*", "*.jsonl", "*.parquet"))
    needed = rows if use.shots else rows[: use.items]
    read = [_read(use, row, f"{use.path}, row {number}") for number, row in enumerate(needed, 1)]
    if not read:
        raise UsageError(f"{use.path} has no rows")
    if use.shots >= len(read):
        raise UsageError(f"likelihood: {use.shots} shots, but {use.path} has only {len(read) - 1} other rows to take")
    if len({item.choice for item in read}) > 1:
        raise UsageError(f"{use.path} has rows with several answers and rows with one: score them as two files")
    items = [_with_shots(read, index, use.shots, seed) for index in range(min(use.items or len(read), len(read)))]
    return Choices(use, tuple(items), len(rows))


def _with_shots(read: Sequence[Item], index: int, shots: int, seed: int) -> Item:
    """The item with examples before its question: other rows of the same file, never itself."""
    if not shots:
        return read[index]
    places = permutation(len(read) - 1, stream_key(seed, "shots", index), shots)
    others = [read[place + (place >= index)] for place in places.tolist()]
    right = [other.options[other.gold] for other in others]
    shown = "".join(option.context + option.answer + SHOT_END for option in right)
    item = read[index]
    return Item(tuple(Option(shown + option.context, option.answer) for option in item.options), item.gold)


def _read(use: LikelihoodUse, row: Row, where: str) -> Item:
    item = _from_columns(use, row, where) if use.doc_to_text is None else _from_templates(use, row, where)
    if not all(option.answer for option in item.options):
        raise UsageError(f"{where}: an answer is empty, so it has no tokens to score")
    return item


def _from_columns(use: LikelihoodUse, row: Row, where: str) -> Item:
    layout = next((layout for layout in LAYOUTS if all(column in row for column in layout)), None)
    if layout is None:
        known = "; ".join(", ".join(columns) for columns in LAYOUTS)
        raise UsageError(
            f"{where} has the columns {', '.join(row) or '(none)'}: expected {known}; for other columns, "
            "doc_to_text and doc_to_target say how a row is read"
        )
    # White space at the ends is an accident of the files, as llm-foundry has it: the delimiter is what separates.
    if layout[0] == "query":
        answers = [_text(answer, where) for answer in _list(row["choices"], where)]
        return _choice(use, [_text(row["query"], where)] * len(answers), answers, row["gold"], where)
    if layout[0] == "context_options":
        contexts = [_text(context, where) for context in _list(row["context_options"], where)]
        return _choice(use, contexts, [_text(row["continuation"], where)] * len(contexts), row["gold"], where)
    if layout[0] == "context":
        return Item((Option(_text(row["context"], where) + use.delimiter, _text(row["continuation"], where)),), 0)
    context = f"{row['activity_label']}: {row['ctx_a']} {str(row['ctx_b']).capitalize()}"
    answers = [_without_marks(str(ending)) for ending in _list(row["endings"], where)]
    return _choice(use, [_without_marks(context)] * len(answers), answers, row["label"], where)


def _without_marks(text: str) -> str:
    """As lm-eval cleans HellaSwag: its texts from WikiHow have [title] and other marks in brackets."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


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
        answers = [str(answer) for answer in _list(_rendered(use.doc_to_choice, row, where), where)]
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
            f"{where}: the right answer is {gold!r}, expected one of the answers or its index from 0: {answers}"
        )
    pairs = zip(contexts, answers, strict=True)
    return Item(tuple(Option(context + use.delimiter, answer) for context, answer in pairs), gold)


def _rendered(template: str, row: Row, where: str, *, columns: bool = True) -> Any:
    """A column's value, or what a Jinja template makes of the row."""
    if columns and template in row:
        return row[template]
    if columns and "{" not in template:
        raise UsageError(f"{where} has no column {template!r}, only {', '.join(row) or 'nothing'}")
    try:
        return _compiled(template).render(**row)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise UsageError(f"{where}: the template {template!r} failed: {error}") from error


@cache
def _compiled(template: str) -> Template:
    # As in lm-eval: a name that is not a column is an error, and a line break at the end stays.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(template)


def _list(value: Any, where: str) -> list[Any]:
    """A list, also one that a template or a file has as text."""
    try:
        items = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        items = None
    if not isinstance(items, list | tuple):
        raise UsageError(f"{where}: expected a list of answers, got {value!r:.80}")
    return list(items)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: expected a text, got {value!r:.80}")
    return value.strip()
