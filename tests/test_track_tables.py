"""Tables of completions that runs send to their sinks: of training and of held-out problems, at the steps of rows."""

from pathlib import Path

import eval_lab
import pytest
from posttrain_lab import Lab, letters, rollouts_of, session_of

from palestra.evaluate.records import read_records

pytest.importorskip("tensorboard")


def tables(session: Path) -> dict[str, dict[int, list[dict[str, str]]]]:
    """The rows of each table by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    accumulator = EventAccumulator(str(session / "tensorboard"))
    accumulator.Reload()
    found: dict[str, dict[int, list[dict[str, str]]]] = {}
    for tag in accumulator.Tags()["tensors"]:
        for event in accumulator.Tensors(tag):
            names, *rows = [[cell.decode() for cell in row] for row in make_ndarray(event.tensor_proto)]
            cells = [[cell.removeprefix("    ").replace("\n    ", "\n") for cell in row] for row in rows]
            found.setdefault(tag, {})[event.step] = [dict(zip(names, row, strict=True)) for row in cells]
    return found


def test_posttraining_sends_the_best_and_the_worst_completion_and_those_of_held_out_problems(tmp_path):
    lab = Lab(tmp_path)
    run = lab.run(track__sinks=["tensorboard"], tasks=letters(), train__steps=4, every__log="2 steps")
    found = tables(session_of(run))
    assert found.keys() == {"completions/rollouts", "completions/eval"}
    assert sorted(found["completions/eval"]) == [0, 2, 4]
    assert sorted(found["completions/rollouts"]) == [2, 4]
    groups = [record.group for record in rollouts_of(run) if record.step == 2 and record.fate == "trained"]
    rows = found["completions/rollouts"][2]
    assert len(rows) == 8
    for group, best, worst in zip(groups, rows[::2], rows[1::2], strict=True):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        assert (float(best["reward"]), float(worst["reward"])) == (max(rewards), min(rewards))
        assert best["prompt"] == worst["prompt"] == group.problem.text
        assert {best["completion"], worst["completion"]} <= {one.completion for one in group.trajectories}
    assert {row["step"] for row in rows} == {"2"}


def test_evaluation_sends_the_first_problems_of_each_task_and_mode(tmp_path):
    model = eval_lab.save_model(tmp_path / "model")
    spec = eval_lab.spec_of(model, eval_lab.letters(), eval_lab.letters("small", size=3))
    session = eval_lab.session_of(eval_lab.run(tmp_path, spec | {"track": {"sinks": ["tensorboard"]}}))
    ((rows,),) = (by_step.values() for by_step in tables(session).values())
    assert [row["task"] for row in rows] == ["letters"] * 8 + ["small"] * 6
    first = read_records(session / "answers.jsonl")[0]
    said = {"prompt": first.prompt, "completion": first.answers[0].text, "status": first.answers[0].verdict.status}
    assert {name: rows[0][name] for name in said} == said
