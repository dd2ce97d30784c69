"""Order files: the prompts they list, in their order, from a disk or a bucket; nothing left out in silence."""

from pathlib import Path

import fsspec
import pytest
from listed_task import draw, prompts

from palestra.errors import UsageError
from palestra.spec.tasks import TasksSpec
from palestra.tasks.stream import Prompts, read_order
from palestra.tasks.task import make_task


def order(path: Path, *rows: int | str, name: str = "a") -> str:
    path.write_text("".join(f"{name}/train/{row}\n" for row in rows))
    return str(path)


def test_order_is_followed_pass_after_pass(tmp_path: Path) -> None:
    made = prompts([{"name": "a", "order": order(tmp_path / "o.txt", 3, 0, 7, 1)}])
    assert draw(made, range(10)) == ["a3", "a0", "a7", "a1", "a3", "a0", "a7", "a1", "a3", "a0"]


def test_order_with_count_takes_the_first(tmp_path: Path) -> None:
    made = prompts([{"name": "a", "order": order(tmp_path / "o.txt", 3, 0, 7, 1), "count": 2}])
    assert draw(made, range(5)) == ["a3", "a0", "a3", "a0", "a3"]


@pytest.mark.parametrize(
    ("mix", "expected"),
    [("weighted", ["a2", "b5", "a1", "b4", "a2", "b3"]), ("sequential", ["a2", "a1", "b5", "b4", "b3", "a2"])],
)
def test_order_in_a_mix_is_kept_for_each_task(tmp_path: Path, mix: str, expected: list[str]) -> None:
    uses = [
        {"name": "a", "order": order(tmp_path / "a.txt", 2, 1)},
        {"name": "b", "order": order(tmp_path / "b.txt", 5, 4, 3, name="b")},
    ]
    assert draw(prompts(uses, mix=mix), range(6)) == expected


def test_order_state_goes_on_in_the_order(tmp_path: Path) -> None:
    uses = [{"name": "a", "order": order(tmp_path / "o.txt", 3, 0, 7, 1)}]
    made, again = prompts(uses), prompts(uses)
    draw(made, range(6))
    again.load_state(made.state())
    assert draw(again, range(6, 9)) == ["a7", "a1", "a3"]


def test_order_of_generated_problems_names_them(tmp_path: Path) -> None:
    task = make_task("arithmetic", {"digits": 2, "min_digits": 1}, "sums")
    first = [problem.id for problem in task.problems("train")[:50]]
    easy_first = sorted(first, key=len)
    (tmp_path / "o.txt").write_text("\n".join(easy_first))
    use = {
        "task": "arithmetic",
        "name": "sums",
        "args": {"digits": 2, "min_digits": 1},
        "order": str(tmp_path / "o.txt"),
    }
    made = Prompts(TasksSpec.model_validate({"train": [use]}), {"sums": task}, 0)
    assert [made.sample(number).id for number in range(50)] == easy_first


def test_order_ids_may_begin_with_the_name_of_the_task(tmp_path: Path) -> None:
    """So that a file serves runs that call the task something else."""
    made = prompts([{"name": "a", "order": order(tmp_path / "o.txt", 3, 1, name="listed")}])
    assert draw(made, range(2)) == ["a3", "a1"]


def test_order_held_out_problem_is_refused(tmp_path: Path) -> None:
    task = make_task("arithmetic", {"digits": 1})
    held_out = task.problems("test")[0].id
    for id in (held_out, held_out.replace("/test/", "/train/")):
        (tmp_path / "o.txt").write_text(id)
        use = {"task": "arithmetic", "args": {"digits": 1}, "order": str(tmp_path / "o.txt")}
        with pytest.raises(UsageError, match="lists 1 of 1 ids"):
            Prompts(TasksSpec.model_validate({"train": [use]}), {"arithmetic": task}, 0)


def test_order_unknown_ids_are_an_error_that_lists_some(tmp_path: Path) -> None:
    where = order(tmp_path / "o.txt", 3, 10, 11, 12, 13, 14, 15, "x")
    with pytest.raises(UsageError) as raised:
        prompts([{"name": "a", "order": where}])
    said = str(raised.value)
    assert f"{where} lists 7 of 8 ids that the split 'train' of a does not have" in said
    assert "a/train/10, a/train/11, a/train/12, a/train/13, a/train/14 and 2 more" in said
    assert "look like a/train/0" in said


def test_order_ids_of_another_split_or_task_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "o.txt").write_text("a/test/1\nb/train/1\na/train/1\n1\n")
    with pytest.raises(UsageError, match="lists 3 of 4 ids"):
        prompts([{"name": "a", "order": str(tmp_path / "o.txt")}, {"name": "b"}])


def test_order_listed_twice_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has a/train/3 more than once"):
        read_order(order(tmp_path / "o.txt", 3, 1, 3))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_order_empty_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "o.txt").write_text(text)
    with pytest.raises(UsageError, match="has no prompt ids"):
        read_order(str(tmp_path / "o.txt"))


def test_order_windows_lines_and_blanks_are_read(tmp_path: Path) -> None:
    (tmp_path / "o.txt").write_bytes(b"a/train/1\r\n\r\n  a/train/2  \r\na/train/3")
    assert read_order(str(tmp_path / "o.txt")) == ["a/train/1", "a/train/2", "a/train/3"]


def test_order_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.txt cannot be read \(FileNotFoundError"):
        read_order(str(tmp_path / "nowhere.txt"))


def test_order_binary_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "o.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UnicodeDecodeError"):
        read_order(str(tmp_path / "o.txt"))


def test_order_comes_from_a_bucket() -> None:
    fsspec.filesystem("memory").pipe_file("orders/easy.txt", b"a/train/4\na/train/2\n")
    made = prompts([{"name": "a", "order": "memory://orders/easy.txt"}])
    assert draw(made, range(3)) == ["a4", "a2", "a4"]
    with pytest.raises(UsageError, match=r"memory://orders/none\.txt cannot be read"):
        read_order("memory://orders/none.txt")
