"""`palestra serve --sessions`: agents of any key are served and recorded, for SFT and for replay."""

import json
import re
import signal
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_agents import chat, post
from posttrain_lab import Lab

import palestra
from palestra.rollout.records import read

QUESTION: dict[str, Any] = {"role": "user", "content": "abc"}


@contextmanager
def served(lab: Lab, *options: str) -> Iterator[str]:
    """The address of a real `palestra serve`, which ends by SIGTERM."""
    command = [sys.executable, "-m", "palestra", "serve", str(lab.model), "--port", "0", "--device", "cpu"]
    folder = ["--sessions", str(lab.path / "sessions")]
    with subprocess.Popen([*command, *folder, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if line.startswith("serving"))
            match = re.search(r"(http://\S+)/v1", line)
            assert match is not None
            yield match[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert process.returncode == 0


def test_sessions_are_recorded_when_they_end_and_train_other_models(tmp_path: Path):
    lab = Lab(tmp_path)
    with served(lab) as address:
        said = chat(address, "one", [QUESTION], max_tokens=2)
        more = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "d"}]
        chat(address, "one", more, max_tokens=2)
        post(address, "one", "/reward", {"reward": 1})
        status = post(address, "one", "/end", {})
        chat(address, "two", [QUESTION])  # ended by the end of the server
    assert (status["turns"], status["forks"], status["retokenized"]) == (2, 0, 0)
    groups = read(lab.path / "sessions" / "rollouts.jsonl")
    assert [(len(group.trajectories), group.rewards) for group in groups] == [(1, (1.0,)), (1, (0.0,))]
    assert [len(group.trajectories[0].turns) for group in groups] == [2, 1]
    text = (lab.path / "sessions" / "conversations.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"] * 2
    assert "one" not in json.dumps([vars(group.problem)["id"] for group in groups])
    replayed = {"rollout__replay": str(lab.path / "sessions" / "rollouts.jsonl"), "train__steps": 2}
    run = lab.run(
        **replayed, algorithm={"preset": "reinforce_pp"}, tasks={"train": [{"task": "posttrain_tasks:Letters"}]}
    )
    assert run.state == "done"
    sft = {
        "kind": "sft",
        "name": "taught",
        "model": {"init": str(lab.model)},
        "data": {"train": {"sessions": {"path": str(lab.path / "sessions" / "conversations.jsonl")}}, "context": 48},
        "train": {"steps": 1, "batch": 1, "precision": "fp32"},
        "optim": {"name": "adamw", "lr": 1e-3},
        "every": {"eval": None},
        "device": "cpu",
    }
    assert palestra.run(sft, root=lab.root, quiet=True).state == "done"


def test_server_with_a_key_takes_only_sessions_under_it(tmp_path: Path):
    with served(Lab(tmp_path), "--api-key", "secret") as address:
        assert chat(address, "secret/a", [QUESTION]) is not None
        assert chat(address, "secret", [QUESTION]) is not None
        for key in ("other", "secret2", "other/secret"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                chat(address, key, [QUESTION])
