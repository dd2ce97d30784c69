import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SHORT, Scratch
from hypothesis import given
from hypothesis import strategies as st
from pipeline_runs import address
from pipeline_steps import telling

from palestra.pipeline import Step
from palestra.pipeline.outputs import Outputs
from palestra.pipeline.runner import PipelineFailed, run
from palestra.runs.redact import REDACTED, Stream, hidden, redact, redacted, secrets
from palestra.work.pool import Pool, TaskFailed

VALUE = 'hunter2-"quoted"\\and/long'


def holding(folder: Path, secret: str) -> list[Path]:
    """The files in which a secret stands, in whatever form."""
    forms = {secret.encode(), json.dumps(secret)[1:-1].encode(), secret[:9].encode()}
    return [path for path in folder.rglob("*") if path.is_file() and any(form in path.read_bytes() for form in forms)]


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MY_SECRET",
        "DB_PASSWORD",
        "PASSWD",
        "GITHUB_PAT",
        "api_key",
    ],
)
def test_secrets_are_known_by_the_names_of_their_variables(name):
    assert secrets({name: "abcdefghij"}) == ["abcdefghij"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TOKENIZERS_PARALLELISM", "disabled-here"),
        ("XAUTHORITY", "anything-at-all"),
        ("HOME", "/some/where/else"),
        ("API_KEY", "short"),
        ("SSH_AUTH_SOCK", sys.executable),
        ("PWD", "abcdefghij"),
    ],
)
def test_what_is_no_secret_is_left(name, text):
    assert secrets({name: text}) == []


def test_redact_takes_secrets_out_of_text_and_data(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", VALUE)
    monkeypatch.setenv("MY_PEM_KEY", "-----BEGIN-----\nabcdefghijkl\nmnopqrstuvwx")
    assert redact(f"a {VALUE} b") == f"a {REDACTED} b"
    assert VALUE not in json.loads(redact(json.dumps({"x": VALUE})))["x"]
    assert redact("line abcdefghijkl") == f"line {REDACTED}"
    data = {"a": [VALUE, 1, None, (f"x{VALUE}",)], VALUE: 2.5}
    assert redacted(data) == {"a": [REDACTED, 1, None, [f"x{REDACTED}"]], REDACTED: 2.5}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see https://me:pass@host/a?b=1.", "see https://me:(redacted)@host/a?b=1."),
        ("https://ghp_abc@host/a", "https://(redacted)@host/a"),
        ("s3://key:a@b@bucket/x", "s3://key:(redacted)@bucket/x"),
        ('{"u": "http://h/x?a=1&token=t0&b=2"}', '{"u": "http://h/x?a=1&token=(redacted)&b=2"}'),
        ("http://h/x?X-Amz-Signature=ab%2Fc#part", "http://h/x?X-Amz-Signature=(redacted)#part"),
        ("http://h/x?sv=1&amp;sig=abc", "http://h/x?sv=1&amp;sig=(redacted)"),
        ('http://h/x?sv=1\\u0026api_key=abc\\"', 'http://h/x?sv=1\\u0026api_key=(redacted)\\"'),
        ("abfs://container@account.net/x", "abfs://container@account.net/x"),
        ("hf://datasets/a/b@main/x.jsonl", "hf://datasets/a/b@main/x.jsonl"),
        ("https://h/@me/x?page=2&tokenizer=gpt2&design=3", "https://h/@me/x?page=2&tokenizer=gpt2&design=3"),
        ("write to a@b.c: if token=1", "write to a@b.c: if token=1"),
    ],
)
def test_redact_takes_secrets_out_of_urls_and_leaves_the_rest(text, expected):
    assert redact(text) == expected
    assert redact(expected) == expected
    assert hidden({"a": [1, {"b": text}]}) == ([] if text == expected else ["a.1.b"])
    stream = Stream([])
    pieces = [stream.feed(text[index : index + 1].encode()) for index in range(len(text))]
    assert b"".join(pieces) + stream.rest() == expected.encode()


def test_stream_gives_lines_at_once_and_words_without_end():
    stream = Stream([])
    assert stream.feed("ü one\ntwo".encode()) == "ü one\n".encode()
    assert stream.feed(b"x" * 10_000) == b"two" + b"x" * 10_000


@given(st.lists(st.sampled_from(["secret-one", "secret-one-longer", "secret", "sec", "x", "\n"])), st.data())
def test_stream_cut_anywhere_hides_what_the_whole_text_would(words, data):
    hidden = ["secret-one-longer", "secret-one"]
    text = "".join(words)
    expected = text
    for secret in hidden:
        expected = expected.replace(secret, REDACTED)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    stream = Stream(hidden)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = b"".join(stream.feed(piece.encode()) for piece in pieces) + stream.rest()
    assert all(secret not in found.decode() for secret in hidden)
    if not any(secret.startswith("secret-one") for secret in words) or not cuts:
        assert found.decode() == expected


def test_secret_that_a_step_prints_or_fails_with_is_nowhere_under_the_prefix(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", VALUE)
    outputs = Outputs(tmp_path)
    good, bad = telling(variable="MY_TOKEN"), telling(variable="MY_TOKEN", fails=True)
    with pytest.raises(PipelineFailed) as caught:
        run([good, bad, Step("given", give, {"key": VALUE})], outputs)
    assert VALUE not in str(caught.value)
    assert f"the key {REDACTED} is not good" in str(caught.value)
    log = outputs.log(address(good)).read_text()
    assert log.count(REDACTED) == 5
    assert all(f"{word}: {REDACTED}" in log for word in ("python", "pieces", "child"))
    assert REDACTED in json.dumps(outputs.attempt(address(bad)))
    assert outputs.earlier("given")[0]["identity"]["config"]["key"] == REDACTED
    assert holding(tmp_path, VALUE) == []


def give(out, key): ...


def speak_and_die(variable: str) -> None:
    os.write(1, f"last words: {os.environ[variable]}\n".encode())
    os.kill(os.getpid(), 9)


def test_log_of_a_killed_task_has_its_last_words_without_the_secret(tmp_path, monkeypatch):
    import time

    monkeypatch.setenv("MY_TOKEN", VALUE)
    with Pool(1) as pool, pytest.raises(Exception, match="SIGKILL"):
        pool.submit(speak_and_die, "MY_TOKEN", log=tmp_path / "log.txt").result(60)
    until = time.monotonic() + 30
    while (tmp_path / "log.txt").read_text() != f"last words: {REDACTED}\n":
        assert time.monotonic() < until, (tmp_path / "log.txt").read_text()
        time.sleep(0.05)


def raise_it(variable: str) -> None:
    raise ValueError(os.environ[variable])


def test_exception_of_a_worker_does_not_carry_the_secret(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", VALUE)
    with Pool(1) as pool, pytest.raises(TaskFailed) as caught:
        pool.submit(raise_it, "MY_TOKEN").result(60)
    assert VALUE not in str(caught.value)
    assert VALUE not in repr(caught.value.__cause__)
    assert caught.value.type_name == "ValueError"


SESSION = """
import logging, os, sys
from pathlib import Path
from palestra.runs.session import Session
from palestra.track.tracker import Tracker
secret = os.environ["MY_TOKEN"]
path = Path(sys.argv[1])
session = Session.create(
    path,
    spec_yaml=f"key: {secret}",
    spec_data={"key": secret},
    manifest={"seed": 0, "command": ["train", f"key={secret}"], "diff": f"+{secret}"},
)
assert session.check_resume({"key": secret}) == []
with session, Tracker(path, ["tensorboard"], project="p", name="n", id="i", config={"key": secret}) as tracker:
    logging.getLogger("palestra.x").warning("the key is %s", secret)
    tracker.log({"text": secret, "loss": 1.0}, 1)
    raise RuntimeError(f"bad key {secret}")
"""


def test_secret_that_a_session_logs_tracks_or_fails_with_is_nowhere_in_its_folder(tmp_path):
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(folder)],
        env={**os.environ, "MY_TOKEN": "plain-secret-value"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "bad key" in done.stderr
    assert f"the key is {REDACTED}" in (folder / "log.txt").read_text()
    assert f"bad key {REDACTED}" in json.loads((folder / "status.json").read_text())["reason"]
    assert holding(tmp_path, "plain-secret-value") == []


def test_run_whose_spec_has_a_secret_in_it_works_and_keeps_it_out_of_its_folder(scratch: Scratch):
    spec = scratch.spec(train={"frames": 3 * 128}, sweep={"axes": {"algorithm.lr": [0.1, 0.2]}})
    name = SHORT["env"]["id"]
    done = scratch("train", spec, MY_TOKEN=name)
    assert done.returncode == 0, done.stderr
    assert holding(scratch.path / "runs", name) == []
    refused = scratch("train", "--resume", "short", MY_TOKEN=name)
    assert refused.returncode == 2
    assert "is without the secrets that were in it: give the spec again" in refused.stderr
    again = scratch("train", spec, "--resume", "short", MY_TOKEN=name)
    assert again.returncode == 0, again.stderr
    swept = scratch("sweep", spec, MY_TOKEN=name)
    assert swept.returncode == 2
    assert "env.id has a secret in it" in swept.stderr.replace("\n", " ")
