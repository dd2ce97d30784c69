"""Evaluation through a server of OpenAI's protocol: resumed without asking twice, retried, tokens and cost counted."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eval_tasks
import pytest
from eval_lab import letters, run, save_model, session_of, spec_of
from test_e2e_eval import show
from test_evaluate_kind import answers_of, killed_at, report_of
from tiny_server import running
from typer.testing import CliRunner

import palestra
from palestra.cli.main import app as cli
from palestra.errors import PalestraError
from palestra.evaluate.completions import evaluate_tasks
from palestra.evaluate.records import read_records
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.remote.dialects import OpenAi
from palestra.generate.serve.server import create_app

PRICE = {"prompt": 2.0, "completion": 10.0}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVAL_KILL", str(tmp_path / "kill"))
    monkeypatch.setattr(eval_tasks.Fragile, "judged", 0)
    monkeypatch.setattr(OpenAi, "waits", (0.01, 0.01, 0.01))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


class Front:
    """Before the server: keeps the prompts of completions, and refuses some calls as `refuse` says, by their number."""

    def __init__(self, app: Any, refuse: Callable[[int], int]):
        self.app, self.refuse, self.prompts, self.calls = app, refuse, [], 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            await self.app(scope, receive, send)
            return
        self.calls += 1
        if status := self.refuse(self.calls):
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"0")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "not now", "code": "busy"}}'})
            return

        async def kept() -> Any:
            message = await receive()
            if message.get("body"):
                self.prompts.append(tuple(json.loads(message["body"])["prompt"]))
            return message

        await self.app(scope, kept, send)


@contextmanager
def served(model: Path, refuse: Callable[[int], int] = lambda call: 0) -> Iterator[tuple[str, Front]]:
    engine = Engine.from_folder(model)
    assert engine.tokenizer is not None
    with LocalGenerator(engine, drive="thread") as generator:
        front = Front(create_app(generator, engine.tokenizer, model_name="tiny"), refuse)
        with running(front) as address:
            yield address, front


def through(address: str, model: Path, *tasks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return spec_of(model, *tasks, generator={"engine": "openai", "url": address}, **changes)


def test_server_gives_the_scores_of_the_engine_here_and_its_tokens_have_a_cost(tmp_path, model):
    here = run(tmp_path, spec_of(model, letters(), eval__samples=0))
    with served(model) as (address, _):
        there = run(tmp_path, through(address, model, letters(), eval__samples=0, price=PRICE), name="there")
    assert [rest[1:] for _, *rest in answers_of(there)] != []
    assert there.summary()["eval/accuracy"] == here.summary()["eval/accuracy"]
    records = read_records(session_of(there) / "answers.jsonl")
    read, written = sum(r.prompt_tokens for r in records), sum(r.answers[0].tokens for r in records)
    summary = there.summary()
    assert (summary["eval/usage/prompt_tokens"], summary["eval/usage/completion_tokens"]) == (read, written)
    assert summary["eval/usage/cost"] == pytest.approx((2.0 * read + 10.0 * written) / 1e6)
    assert "eval/usage/cost" not in here.summary()
    cost = summary["eval/usage/cost"]
    assert f"{read} of prompts, {written} of completions; cost {cost:.4g}" in show(there)


def test_further_turns_read_all_that_came_before_them(tmp_path, model):
    turns = {"name": "multi_turn", "turns": 2, "feedback": "again"}
    found = run(tmp_path, spec_of(model, letters(), eval__samples=0, eval__workflow=turns))
    records = read_records(session_of(found) / "answers.jsonl")
    assert any(record.further_tokens > record.prompt_tokens for record in records)
    read = sum(record.prompt_tokens + record.further_tokens for record in records)
    assert found.summary()["eval/usage/prompt_tokens"] == read


def test_killed_and_resumed_it_asks_for_no_completion_twice(tmp_path, model):
    spec = through("{}", model, letters("fragile", "Fragile", size=20), eval__samples=0)
    whole = run(tmp_path, {**spec, "generator": None}, name="whole")
    with served(model) as (address, front):
        spec["generator"]["url"] = address
        killed_at(tmp_path, 11, spec)
        (folder,) = (tmp_path / "runs/scores").glob("*/sessions/0")
        done = read_records(folder / "answers.jsonl")
        assert 0 < len(done) < 20
        asked, front.prompts = len(front.prompts), []
        resumed = run(tmp_path, resume="scores")
    assert len(front.prompts) == 20 - len(done)
    assert asked <= 20
    assert [record.id for record in read_records(folder / "answers.jsonl")] == [key[0] for key, *_ in answers_of(whole)]
    assert resumed.summary()["eval/usage/prompt_tokens"] == whole.summary()["eval/usage/prompt_tokens"]
    assert resumed.summary()["eval/accuracy"] == whole.summary()["eval/accuracy"]


def test_server_that_is_gone_fails_the_run_and_a_resume_goes_on_at_another_address(tmp_path, model, monkeypatch):
    monkeypatch.setitem(evaluate_tasks.__kwdefaults__, "running", 4)
    with served(model, lambda call: 503 if call > 8 else 0) as (address, _):
        spec = through(address, model, letters(size=20), eval__samples=0)
        with pytest.raises(PalestraError, match="not now"):
            run(tmp_path, spec)
    failed = palestra.open_run("scores", tmp_path / "runs")
    done = len(read_records(session_of(failed) / "answers.jsonl"))
    assert (failed.state, 0 < done < 20) == ("failed", True)
    with pytest.raises(PalestraError, match=r"does not list its models|does not respond"):
        run(tmp_path, resume="scores")
    with served(model) as (address, front):
        resumed = run(tmp_path, resume="scores", overrides=[f"generator.url={address}"], allow=["generator.url"])
        assert len(front.prompts) == 20 - done
    assert report_of(resumed)["tasks"]["letters"]["greedy"]["problems"] == 20


@pytest.mark.parametrize("status", [429, 500, 503])
def test_busy_server_is_asked_again_and_that_is_said(tmp_path, model, status):
    with served(model, lambda call: status if call <= 8 else 0) as (address, front):
        found = run(tmp_path, through(address, model, letters(), eval__samples=0))
    assert (front.calls, len(front.prompts)) == (16, 8)
    log = (session_of(found) / "log.txt").read_text()
    assert f"status {status}; the call is made again in 0.01 s, and others after it" in log
    assert "8 calls to the servers were made again" in log


def test_refusal_is_not_tried_again(tmp_path, model):
    with served(model, lambda call: 400) as (address, front), pytest.raises(PalestraError, match="not now"):
        run(tmp_path, through(address, model, letters(size=1), eval__samples=0))
    assert front.calls == 1


def test_command_asks_a_server(tmp_path, model):
    with served(model) as (address, front):
        about = ["eval", str(model), "--task", "arithmetic", "--problems", "3", "--max-new-tokens", "4", "--quiet"]
        result = CliRunner().invoke(cli, [*about, "--server", f"{address}/v1", "--runs", str(tmp_path / "runs")])
        assert result.exit_code == 0, result.output
    assert len(front.prompts) == 3
    assert "of completions" in result.output
    refused = CliRunner().invoke(cli, [*about, "--served-model", "x", "--runs", str(tmp_path / "runs")])
    assert "model: of a server, whose URL is missing" in str(refused.exception or refused.output)


def test_stop_signal_saves_what_was_answered(tmp_path, model, monkeypatch):
    judge = eval_tasks.Letters.verify

    def stopping(self, problem, answer):
        if problem.row["number"] == 10:
            os.kill(os.getpid(), signal.SIGINT)
        if problem.row["number"] >= 10:
            time.sleep(0.1)  # others are left when the signal is seen
        return judge(self, problem, answer)

    monkeypatch.setitem(evaluate_tasks.__kwdefaults__, "running", 2)
    with served(model) as (address, front):
        with monkeypatch.context() as patch:
            patch.setattr(eval_tasks.Letters, "verify", stopping)
            with pytest.raises(PalestraError, match="with everything saved; continue with: palestra train --resume"):
                run(tmp_path, through(address, model, letters(size=30), eval__samples=0))
        stopped = palestra.open_run("scores", tmp_path / "runs")
        done = len(read_records(session_of(stopped) / "answers.jsonl"))
        front.prompts = []
        run(tmp_path, resume="scores")
    assert 10 <= done < 30
    assert len(front.prompts) == 30 - done


def test_price_without_a_server_is_refused(model):
    with pytest.raises(PalestraError, match="price: expected null, because no `generator` is paid"):
        palestra.check(spec_of(model, letters(), price=PRICE))
