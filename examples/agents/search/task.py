"""The task of the search agent: questions about people of the library. One person in five is held out."""

from collections.abc import Sequence

from examples.agents.search.library import people
from palestra.tasks.task import Completion, Problem, Status, Task, TaskArgs, Verdict


class Questions(Task[TaskArgs]):
    """Which town, and which land, somebody lives in."""

    def problems(self, split: str) -> Sequence[Problem]:
        """Both questions about everybody of a split."""
        return [
            Problem(self.id(split, f"{place}-{hops}"), question, {"answer": answer})
            for place, somebody in enumerate(people())
            if (place % 5 == 0) == (split == "test")
            for hops, (question, answer) in enumerate(somebody.questions, 1)
        ]

    def verify(self, problem: Problem, completion: Completion) -> Verdict:
        """Whether the last message is the name, and nothing else."""
        text = completion.text.strip()
        right = text == problem.row["answer"]
        return Verdict(float(right), Status.CORRECT if right else Status.WRONG, note=text)
