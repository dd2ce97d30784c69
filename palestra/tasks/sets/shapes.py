"""The generated task `count_shapes`: pictures of circles, squares and triangles to be counted."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from palestra.data.media import data_url
from palestra.tasks.sets.synthetic import Generated, GeneratedArgs, ProblemForm
from palestra.tasks.task import Completion, Problem, Verdict

PICTURES = 2**40
"""Of each number of shapes."""
QUESTION = "How many shapes are there? Answer with the number alone."
COLORS = np.array(
    [(230, 60, 60), (70, 200, 90), (80, 120, 250), (240, 200, 60), (220, 110, 230), (90, 220, 230)], np.uint8
)
KINDS = 3


class CountShapesArgs(GeneratedArgs):
    """Args of `count_shapes`."""

    most: int = Field(default=5, ge=2, le=9)
    """The most shapes of a picture; the fewest is 1."""
    size: int = Field(default=56, ge=56, le=448, multiple_of=28)
    """The sides of a picture, in pixels."""
    question: str = QUESTION
    """What is asked beside the picture."""


class CountShapes(Generated[CountShapesArgs]):
    """Pictures of 1 to `most` shapes of any color and place that do not touch, on a dark ground.

    Prompts are conversations with an image. Pictures with the same number of shapes are a form, of which 500 are held
    out: the same ones in all settings of this size. The row of an id is that number and the picture's own, such as
    `3-77`.
    """

    Args = CountShapesArgs
    stop: ClassVar[tuple[str, ...]] = ()

    def forms(self) -> list[ProblemForm]:
        return [ProblemForm(self._form(count), (PICTURES,)) for count in range(1, self.args.most + 1)]

    def problem(self, split: str, form: ProblemForm, choices: tuple[int, ...]) -> Problem:
        count = int(form.name.rpartition(" ")[2])
        image = {"type": "image_url", "image_url": {"url": data_url(picture(count, choices[0], self.args.size))}}
        content = [image, {"type": "text", "text": self.args.question}]
        row = {"answer": str(count), "solution": str(count)}
        return Problem(self.id(split, f"{count}-{choices[0]}"), ({"role": "user", "content": content},), row)

    def parse(self, row: str) -> tuple[str, Sequence[int]] | None:
        count, _, number = row.partition("-")
        if not (count.isdecimal() and number.isdecimal()) or int(number) >= PICTURES:
            return None
        return self._form(int(count)), [int(number)]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether all of the completion is the number."""
        return self.score(completion.text.strip(), problem.row["answer"])

    def _form(self, count: int) -> str:
        return f"shapes {self.args.size} {count}"


def picture(count: int, number: int, size: int) -> np.ndarray:
    """A picture (size, size, 3) uint8 with `count` shapes, the same for a number everywhere."""
    random = np.random.Generator(np.random.PCG64([count, number, size]))
    canvas = np.broadcast_to(random.integers(0, 40, 3, np.uint8), (size, size, 3)).copy()
    taken = np.zeros((size, size), bool)
    rows, columns = np.mgrid[:size, :size]
    least, most = size / 6, size / 5
    while count:
        radius = random.uniform(least, most) / 2
        row, column = random.uniform(radius, size - radius, 2)
        kind, color = random.integers(KINDS), COLORS[random.integers(len(COLORS))]
        down, right = rows + 0.5 - row, columns + 0.5 - column
        near = np.maximum(abs(down), abs(right)) <= radius + 1  # and a pixel around, so that none touch
        if (taken & near).any():
            continue
        inside = (
            down**2 + right**2 <= radius**2,
            np.maximum(abs(down), abs(right)) <= radius * 0.9,
            (abs(right) <= (down + radius) / 2) & (down <= radius),
        )[kind]
        canvas[inside], taken = color, taken | near
        count -= 1
    return canvas
