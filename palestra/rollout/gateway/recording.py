"""The gateway without training: a model served to agents, every session recorded as rollouts and as conversations."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.errors import UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.local import LocalGenerator
from palestra.generate.serve import gate, listen
from palestra.rollout.gateway.dialect import Source
from palestra.rollout.gateway.server import Sessions, create_app
from palestra.rollout.gateway.session import Session, Turn
from palestra.rollout.records import FILE, RolloutRecord, write
from palestra.rollout.types import Group
from palestra.tasks.task import Problem, Status, Verdict
from palestra.track.sinks import JsonlSink

CONVERSATIONS = "conversations.jsonl"
"""A line is a branch: `messages` as the model wrote them, for kind `sft`, and the reward."""
IDLE_SECONDS = 600.0


class SessionRecorder:
    """Appends every session that ends with a turn to the files of a folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._rollouts = JsonlSink(folder / FILE, append=True)
        self._conversations = JsonlSink(folder / CONVERSATIONS, append=True)
        with (folder / FILE).open("rb") as file:
            self._number = sum(1 for _ in file)

    def __call__(self, session: Session) -> None:
        if session.last is None:
            return
        reward, paths = session.reward or 0.0, session.branches()
        status = Status.CORRECT if reward >= 1 else Status.UNPARSABLE if session.reward is None else Status.WRONG
        rows = tuple(session.trajectories(Verdict(reward, status, note=session.answer or ""), reward, "branches"))
        name = hashlib.sha256(session.key.encode()).hexdigest()[:16]  # a key is a secret
        prompt = paths[0][0].messages[:-1]
        group = Group(self._number, Problem(f"sessions/{self._number}-{name}", prompt), rows[0].oldest, rows, asked=1)
        self._number += 1
        write(self._rollouts, RolloutRecord(group, "recorded", self._number))
        self._conversations.write(*({"messages": written(path, session), "reward": session.reward} for path in paths))


def written(path: Sequence[Turn], session: Session) -> list[dict[str, Any]]:
    """The conversation of a branch, its turns as the model wrote them, calls and all."""
    messages = list(path[-1].messages)
    for turn in path:
        tokens, specials = turn.generation.tokens, session.tokenizer.special_ids
        tokens = tokens[:-1] if tokens and tokens[-1] in specials else tokens
        if specials.isdisjoint(tokens):  # else only the template can write them: a text never becomes a special token
            content = session.tokenizer.decode(tokens, continues=True)
            messages[len(turn.messages) - 1] = {"role": "assistant", "content": content}
    return messages


def serve_sessions(
    engine: Engine,
    folder: Path,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    allowed_hosts: Sequence[str] = (),
    max_body_bytes: int | None,
    max_concurrent: int,
) -> None:
    """Serve agents until SIGINT or SIGTERM. A new key opens a session; with `api_key` it is that, or that and a /."""
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise UsageError(f"{name} has no chat template, which sessions of agents need")
    recorder = SessionRecorder(folder)
    with listen.bound(host, port) as listening, LocalGenerator(engine, drive="thread") as generator:

        def opened(key: str) -> Session | None:
            prefix = key.partition("/")[0].encode("latin-1", "replace")
            allowed = api_key is None or hmac.compare_digest(prefix, api_key.encode())
            if not key or not allowed or len(sessions.open) >= max_concurrent:
                return None
            return Session(key, Source(generator), tokenizer, context=engine.context, model=name)

        sessions = Sessions(idle_seconds=IDLE_SECONDS, unknown=opened, ended=recorder)
        most = max_body_bytes or gate.most_bytes(engine.model.shape.vision is not None)
        hosts = listen.hosts_of(host, allowed_hosts)
        app = create_app(sessions, model=name, max_body_bytes=most, allowed_hosts=hosts)

        async def end_all() -> None:
            for session in list(sessions.open.values()):
                sessions.end(session, "closed")

        about = {"name": name, "api_key": api_key, "note": f", sessions in {folder}"}
        listen.serve(app, listening, end_all, **about, beside=sessions.reap)
