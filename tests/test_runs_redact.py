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
from palestra.work.pool import Pool, TaskFailed
from palestra.work.redact import REDACTED, Stream, hidden, redact, redacted, secrets

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


def test_secret_among_numbers_is_found_and_numbers_alone_stay_as_they_are():
    key, tokens = "hf_" + "a1" * 17, tuple(range(300))
    huge = [10**400, 0.5]  # whose sum is no float
    row = {"tokens": tokens, "empty": [], "mixed": [1, 2.5, key], "nested": [1.0, [True, {key: None}]], "huge": huge}
    found = redacted(row)
    assert found["tokens"] is tokens
    assert found["mixed"] == [1, 2.5, REDACTED]
    assert found["nested"] == [1.0, [True, {REDACTED: None}]]
    assert (found["empty"], found["huge"]) == ([], huge)


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


MIXED = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3fG5hJ7"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hf_{MIXED[:34]}", REDACTED),
        (f"use sk-{MIXED[:32]}{MIXED[:16]}, please", f"use {REDACTED}, please"),
        (f"sk-proj-{MIXED}_{MIXED}-x", REDACTED),
        (f"sk-ant-api03-{MIXED}-AA", REDACTED),
        (f"(ghp_{MIXED[:36]})", f"({REDACTED})"),
        (f"github_pat_{MIXED[:22]}_{MIXED}{MIXED[:20]}", REDACTED),
        ("key=AKIAIOSFODNN7EXAMPLE", f"key={REDACTED}"),
        (f"AIza{MIXED[:35]}", REDACTED),
        (f"glpat-{MIXED[:20]}", REDACTED),
        (f"xoxb-1234567890-{MIXED[:24]}", REDACTED),
        (f"Bearer {JWT}", f"Bearer {REDACTED}"),
        (f"https://hooks.slack.com/services/T0/B0/{MIXED[:24]}", f"https://hooks.slack.com/{REDACTED}"),
        (f"https://discord.com/api/webhooks/12/{MIXED}", f"https://discord.com/api/webhooks/{REDACTED}"),
        (f"AccountName=me;AccountKey={MIXED}==;Suffix=x", f"AccountName=me;AccountKey={REDACTED};Suffix=x"),
        (f"+AWS_SECRET_ACCESS_KEY={MIXED}", f"+AWS_SECRET_ACCESS_KEY={REDACTED}"),
        (f'"WANDB_API_KEY":"{MIXED}"', f'"WANDB_API_KEY":"{REDACTED}"'),
        ("task-sk-ppo-cartpole-20261115T040803-54d8", "task-sk-ppo-cartpole-20261115T040803-54d8"),
        ("MAX_TOKENS=max_new_tokens_of_2_turns", "MAX_TOKENS=max_new_tokens_of_2_turns"),
        ("PAD_TOKEN=<|endoftext|>", "PAD_TOKEN=<|endoftext|>"),
        ("hf_internal_testing_tiny_random_gpt2_model", "hf_internal_testing_tiny_random_gpt2_model"),
        ("https://hooks.slack.com/docs", "https://hooks.slack.com/docs"),
    ],
)
def test_redact_knows_what_keys_look_like_wherever_they_stand(text, expected):
    test_redact_takes_secrets_out_of_urls_and_leaves_the_rest(text, expected)


@given(
    st.text("0123456789abcdef", min_size=7, max_size=64),
    st.datetimes(),
    st.uuids(),
    st.floats(allow_nan=False),
    st.lists(
        st.sampled_from(
            ["runs", "ppo", "sk", "hf", "task", "model", "lr", "key", "token", "qwen2.5", "0.6b", "adamw", "a8b14e6e"]
        ),
        min_size=1,
    ),
)
def test_redact_leaves_hashes_ids_names_and_numbers(digest, moment, name, number, words):
    for text in (
        digest,
        digest.upper(),
        f"sha256:{digest}",
        f"{'-'.join(words)}-{digest[:10]}/{moment:%Y%m%dT%H%M%S}-{digest[:4]}",
        f"{'_'.join(words)}: {number!r}",
        f"https://host/{'/'.join(words)}?page={digest}",
        str(name),
        json.dumps({"_".join(words): digest, "loss": number}),
    ):
        assert redact(text) == text


def test_diff_of_a_checkout_and_the_terminal_hide_what_looks_like_a_key(scratch: Scratch):
    subprocess.run(["git", "init", "-q"], cwd=scratch.path, check=True)
    settings = scratch.path / "settings.env"
    settings.write_text("nothing\n")
    subprocess.run(["git", "add", "."], cwd=scratch.path, check=True)
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run(["git", *who, "commit", "-qm", "x"], cwd=scratch.path, check=True)
    settings.write_text(f"SERVICE_KEY = {MIXED}\nplain hf_{MIXED[:34]}\n")
    spec = scratch.spec(train={"frames": 3 * 128}, env={"id": "CartPole-v1", "num_envs": 4})
    done = scratch("train", spec)
    assert done.returncode == 0, done.stderr
    (diff,) = scratch.path.glob("runs/*/*/sessions/0/git.diff")
    assert f"+SERVICE_KEY = {REDACTED}\n+plain {REDACTED}\n" in diff.read_text()
    said = scratch("check", spec, f"env.id=hf_{MIXED[:34]}")
    refused = scratch("train", f"hf_{MIXED[:34]}.yaml")
    for text in (said.stdout + said.stderr, refused.stderr):
        assert REDACTED in text
        assert MIXED[:30] not in text


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
from palestra.track.sinks import SinkPlace, Tracker
secret = os.environ["MY_TOKEN"]
path = Path(sys.argv[1])
session = Session.create(
    path,
    spec_yaml=f"key: {secret}",
    spec_data={"key": secret},
    manifest={"seed": 0, "command": ["train", f"key={secret}"], "diff": f"+{secret}"},
)
assert session.check_resume({"key": secret}) == []
with session, Tracker(SinkPlace(path, "p", "n", "i", {"key": secret}), ["tensorboard"]) as tracker:
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
    assert "was stored without its secrets: give the spec again" in refused.stderr
    again = scratch("train", spec, "--resume", "short", MY_TOKEN=name)
    assert again.returncode == 0, again.stderr
    swept = scratch("sweep", spec, MY_TOKEN=name)
    assert swept.returncode == 2
    assert "env.id has a secret in it" in swept.stderr.replace("\n", " ")
