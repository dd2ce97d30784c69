"""The tasks `clevr_count` and `geometry3k`: questions about pictures, from files that a user brings."""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from palestra.data.readers import Row
from palestra.errors import UsageError
from palestra.tasks.dataset import files_of, load_rows, text_of
from palestra.tasks.sets.questions import Question, QuestionArgs, Questions
from palestra.tasks.task import Message, Problem
from palestra.tasks.verify.final_answers import Comparison, number_of

COLUMNS = ("images", "image")
KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


class PicturesArgs(QuestionArgs):
    """Args of tasks about pictures."""

    source: str = Field(min_length=1)
    """A file, or a folder, URL or name on the Hub with files for the splits, with `problem` (or `question`), `answer`,
    and `images` (or `image`): paths beside the file, data URLs, or bytes as Parquet has them."""


class Pictures(Questions[PicturesArgs]):
    """Questions about one picture or several, which come before the text."""

    Args = PicturesArgs
    hub: ClassVar[str]
    """The dataset on the Hub that has its columns."""

    def __init__(self, args: PicturesArgs, name: str):
        super().__init__(args, name)
        if args.format == "plain" or args.shots:
            raise UsageError(f"{name}: its questions have images, so format must be chat and shots 0")

    def questions(self, split: str) -> Iterator[Question]:
        source, where = self.args.source, f"{self.name}, split {split}"
        place = Path(source).expanduser()
        folder = place if place.is_dir() else place.parent
        for number, row in enumerate(load_rows(source, default=self.hub, files=files_of(split))):
            text = text_of(row, "problem" if "problem" in row else "question", number, where)
            text = text.replace("<image>", "").strip()
            answer = re.sub(r"</?answer>", "", text_of(row, "answer", number, where)).strip()
            if self.compare == "number" and number_of(answer) is None:
                raise UsageError(f"{where}, row {number + 1}: the answer {answer!r:.60} is not a number")
            images = _images(row, folder, f"{where}, row {number + 1}")
            yield Question(number, text, {"question": text, "answer": answer, "images": images})

    def problems(self, split: str) -> Sequence[Problem]:
        # Pictures are in the prompts: a second copy in the row would double the memory.
        return [
            replace(one, prompt=_with_images(one.prompt, one.row["images"]), row=_without(one.row, "images"))
            for one in super().problems(split)
        ]


class ClevrCount(Pictures):
    """How many objects of a kind a rendered scene has (CLEVR)."""

    hub: ClassVar[str] = "BUAADreams/clevr_count_70k"
    isolated: ClassVar[bool] = False
    compare: Comparison = "number"


class Geometry3k(Pictures):
    """Problems of plane geometry with a figure; answers are compared as mathematics."""

    hub: ClassVar[str] = "hiyouga/geometry3k"
    compare: Comparison = "math"


def _with_images(prompt: str | tuple[Message, ...], images: list[str]) -> tuple[Message, ...]:
    assert not isinstance(prompt, str)  # format: plain is refused
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return (*prompt[:-1], {**prompt[-1], "content": [*parts, {"type": "text", "text": prompt[-1]["content"]}]})


def _without(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def _images(row: Row, folder: Path, where: str) -> list[str]:
    column = next((name for name in COLUMNS if row.get(name)), None)
    if column is None:
        raise UsageError(f"{where}: there are no {' or '.join(COLUMNS)}; the row has {', '.join(row) or 'nothing'}")
    value = row[column]
    return [_url(image, folder, where) for image in (value if isinstance(value, list) else [value])]


def _url(image: Any, folder: Path, where: str) -> str:
    """A data URL of a path, a data URL, bytes, or a record of `bytes` and `path`."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image.startswith("data:"):
        return image
    if isinstance(image, str):
        try:
            image = (folder / image).read_bytes()
        except OSError as error:
            raise UsageError(f"{where}: the picture {folder / image} cannot be read: {error.strerror}") from error
    if not isinstance(image, bytes):
        raise UsageError(f"{where}: a picture is {image!r:.60}: expected a path, a data URL or bytes")
    kind = next((kind for start, kind in KINDS.items() if image.startswith(start)), None)
    if kind is None:
        raise UsageError(f"{where}: a picture is not a PNG, JPEG, GIF, WebP or BMP")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
