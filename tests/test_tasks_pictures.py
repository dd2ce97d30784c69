"""Tasks with pictures: generated ones, and those from files that a user brings."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from palestra.data.media import PixelLimits, data_url, part_image
from palestra.errors import UsageError
from palestra.tasks.sets.shapes import picture
from palestra.tasks.task import Completion, Status, make_task


@pytest.mark.parametrize("count", [1, 3, 9])
@pytest.mark.parametrize("size", [56, 112])
def test_picture_has_so_many_shapes_that_do_not_touch(count: int, size: int) -> None:
    """By flood fill of what is not the ground."""
    for number in range(10):
        pixels = picture(count, number, size).astype(int)
        ground = pixels[np.unravel_index(pixels.sum(-1).argmin(), (size, size))]
        left = {tuple(at) for at in np.argwhere((pixels != ground).any(-1)).tolist()}
        shapes = 0
        while left:
            shapes, edge = shapes + 1, [left.pop()]
            while edge:
                row, column = edge.pop()
                near = {(row + i, column + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
                left -= near
                edge += near
        assert shapes == count


def test_counts_are_balanced_and_ids_find_their_problems() -> None:
    task = make_task("count_shapes", {"most": 4})
    test, train = task.problems("test"), task.problems("train")
    answers = [problem.row["answer"] for problem in test]
    assert {answer: answers.count(answer) for answer in answers} == dict.fromkeys("1234", 500)
    problem = train[12345]
    assert train[train.locate(problem.id.split("/")[-1])].prompt == problem.prompt
    assert test.locate(problem.id.split("/")[-1]) is None


def test_only_the_number_alone_is_right() -> None:
    task = make_task("count_shapes")
    problem = task.problems("test")[0]
    answer = problem.row["answer"]
    verdicts = [task.verify(problem, Completion(text)).status for text in (answer, f" {answer}\n", "7", "", answer * 2)]
    assert verdicts == [Status.CORRECT, Status.CORRECT, Status.WRONG, Status.UNPARSABLE, Status.WRONG]


def _rows(folder: Path, **row: object) -> str:
    pixels = np.full((40, 60, 3), 200, np.uint8)
    Pillow.fromarray(pixels).save(folder / "a.png")
    known = {"problem": "<image>How many cubes?", "answer": "<answer> 3 </answer>", "images": ["a.png"]}
    (folder / "train.jsonl").write_text(json.dumps({**known, **row}) + "\n")
    return str(folder)


def test_clevr_reads_pictures_beside_its_file(tmp_path: Path) -> None:
    task = make_task("clevr_count", {"source": _rows(tmp_path)})
    (problem,) = task.problems("train")
    image, text = problem.prompt[-1]["content"]
    assert part_image(image, PixelLimits()).grid == (2, 3)
    assert text["text"].startswith("How many cubes?")
    assert problem.row == {"question": "How many cubes?", "answer": "3"}
    assert task.verify(problem, Completion("There are \\boxed{3}.")).status == Status.CORRECT
    assert task.verify(problem, Completion("There are \\boxed{4}.")).status == Status.WRONG


def test_geometry_compares_answers_as_mathematics(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    image = data_url(np.zeros((56, 56, 3), np.uint8))
    task = make_task("geometry3k", {"source": _rows(tmp_path, answer="2 \\sqrt { 221 }", images=[image])})
    (problem,) = task.problems("train")
    assert problem.prompt[-1]["content"][0]["image_url"]["url"] == image
    assert task.verify(problem, Completion("\\boxed{2\\sqrt{221}}")).status == Status.CORRECT


def test_pictures_of_parquet_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    Pillow.fromarray(np.zeros((56, 56, 3), np.uint8)).save(tmp_path / "b.jpg")
    image = {"bytes": (tmp_path / "b.jpg").read_bytes(), "path": None}
    pq.write_table(pa.Table.from_pylist([{"images": [image], "problem": "?", "answer": "1"}]), tmp_path / "t.parquet")
    (problem,) = make_task("clevr_count", {"source": str(tmp_path / "t.parquet")}).problems("train")
    assert problem.prompt[-1]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"images": []}, "there are no images or image"),
        ({"images": ["gone.png"]}, r"gone\.png cannot be read"),
        ({"images": [3]}, "expected a path"),
        ({"answer": "many"}, "not a number"),
    ],
)
def test_bad_rows_are_refused_with_their_number(tmp_path: Path, row: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why) as error:
        make_task("clevr_count", {"source": _rows(tmp_path, **row)}).problems("train")
    assert "row 1" in str(error.value)


def test_plain_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="format must be chat"):
        make_task("clevr_count", {"source": _rows(tmp_path), "format": "plain"})
