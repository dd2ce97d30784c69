"""What a gateway refuses or bounds: keys, ended sessions, long bodies, limits, idle and stalled clients."""

import asyncio
import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from gateway_lab import Lab, gateway_of, until

from palestra.rollout.gateway import server
from palestra.rollout.gateway.session import Session


def echo(prompt: str, sample: int) -> str:
    return "ok<|im_end|>"


@pytest.fixture
def lab():
    with gateway_of(echo) as one:
        yield one


def call(lab: Lab, path: str, body: Any, key: str | None, header: str = "Authorization") -> tuple[int, dict[str, Any]]:
    """The status and the JSON of a request."""
    value = f"Bearer {key}" if header == "Authorization" else key or ""
    headers = {"Content-Type": "application/json"} | ({} if key is None else {header: value})
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(lab.gateway.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 5, **CHAT}


def test_wrong_and_missing_keys_are_refused_in_the_words_of_the_dialect(lab):
    session = lab.session()
    for key in (None, "", "pal-other", "é"):
        assert call(lab, "/v1/chat/completions", CHAT, key)[0] == 401
    status, body = call(lab, "/v1/messages", MESSAGES, "pal-other", "x-api-key")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    assert call(lab, "/reward", {"reward": 1}, "pal-other")[0] == 401
    assert session.turns == []
    assert session.reward is None


def test_a_session_does_not_see_anothers_responses(lab):
    one, other = lab.session(), lab.session()
    _, made = call(lab, "/v1/responses", {"input": "a"}, one.key)
    asked = {"input": "b", "previous_response_id": made["id"]}
    assert call(lab, "/v1/responses", asked, other.key)[0] == 404
    assert call(lab, "/v1/responses", asked, one.key)[0] == 200


def test_session_that_has_ended_is_refused_and_cannot_end_twice(lab):
    session = lab.session()
    assert call(lab, "/v1/chat/completions", CHAT, session.key)[0] == 200
    assert call(lab, "/reward", {"reward": 0.5}, session.key) == (200, {"reward": 0.5})
    status, body = call(lab, "/end", {"answer": "five"}, session.key)
    assert (status, body["ended"], body["turns"]) == (200, "call", 1)
    for path, asked in (("/end", {}), ("/reward", {"reward": 1}), ("/v1/chat/completions", CHAT)):
        assert call(lab, path, asked, session.key)[0] == 410
    assert (session.answer, session.reward, len(session.turns)) == ("five", 0.5, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", b"{", 400, "not valid JSON"),
        pytest.param("/v1/chat/completions", b"[" * 100_000, 400, "not valid JSON", id="nested"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "oracle", "content": "a"}]}, 400, "messages.0.role"),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"1": 2}}, 400, "logit_bias"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, 400, "tool_choice"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"function": {}}]}, 400, "no name"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "text only",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "☃"}]}, 400, "☃"),
        ("/v1/responses", {"input": [{"type": "web_search_call"}]}, 400, "web_search_call"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "file_search"}]}, 400, "file_search"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "model": "m"}, 400, "max_tokens"),
        ("/v1/messages", {**MESSAGES, "tool_choice": {"type": "any"}}, 400, "tool_choice"),
        ("/reward", {"reward": "much"}, 400, "reward"),
        ("/reward", b'{"reward": NaN}', 400, "reward"),
        ("/end", {"verdict": 1}, 400, "verdict"),
        ("/v1/other", {}, 404, "Not Found"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "context"),
    ],
)
def test_wrong_request_is_refused_with_what_is_wrong_and_the_session_goes_on(lab, path, body, status, words):
    session = lab.session()
    found, said = call(lab, path, body, session.key)
    assert found == status, said
    assert words in json.dumps(said, ensure_ascii=False)
    assert call(lab, "/v1/chat/completions", CHAT, session.key)[0] == 200
    assert len(session.turns) == 1


def test_body_that_is_too_long_is_refused_before_it_is_read(lab):
    session, (host, port) = lab.session(), lab.gateway._socket.getsockname()
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Authorization", f"Bearer {session.key}")
    connection.putheader("Content-Length", str(5 << 20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    assert call(lab, "/v1/chat/completions", CHAT, session.key)[0] == 200


def test_limits_of_turns_and_tokens_refuse_what_is_beyond_and_mark_the_session(lab):
    turns, tokens = lab.session(most_turns=2), lab.session(most_tokens=4)
    assert [call(lab, "/v1/chat/completions", CHAT, turns.key)[0] for _ in range(3)] == [200, 200, 400]
    assert call(lab, "/v1/chat/completions", CHAT, tokens.key)[0] == 200
    _, cut = call(lab, "/v1/chat/completions", CHAT, tokens.key)
    assert cut["choices"][0]["finish_reason"] == "length"
    status, body = call(lab, "/v1/chat/completions", CHAT, tokens.key)
    assert (status, body["error"]["code"]) == (400, "session_limit")
    assert turns.limited
    assert tokens.limited
    assert tokens.sampled == 4


def test_idle_session_ends_and_one_at_work_does_not(monkeypatch):
    with gateway_of(echo, idle_seconds=0.4) as lab:
        idle, busy = lab.session(), lab.session()
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.clear)

        async def begin() -> Any:
            body = server._read(server.ToolChatBody, json.dumps(CHAT).encode())
            return await busy.exchange(body.conversation(100), "a", False)

        exchange = lab.gateway.thread.start(begin()).result()
        until(lambda: idle.ended == "idle")
        assert busy.ended is None
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.set)
        until(lambda: busy.ended == "idle")
        assert exchange.task.done()
        assert call(lab, "/v1/chat/completions", CHAT, idle.key)[0] == 410
        assert lab.gateway.sessions.open == {}


def test_end_of_a_session_aborts_its_request_and_the_client_is_told(lab):
    session = lab.session()
    lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.clear)
    client = openai.OpenAI(base_url=f"{lab.gateway.url}/v1", api_key=session.key, max_retries=0)

    async def end_when_busy() -> None:
        while not session.busy:
            await asyncio.sleep(0.01)
        lab.gateway.sessions.end(session, "call")

    lab.gateway.thread.start(end_when_busy())
    with pytest.raises(openai.APIStatusError, match="ended"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    assert not session.busy


def connections_of(lab: Lab) -> int:
    return len(lab.gateway._server.server_state.connections)


def test_a_thousand_connections_half_open_leave_others_untouched_and_are_closed(lab, monkeypatch):
    monkeypatch.setattr("palestra.generate.serve.listen.HEADER_SECONDS", 3.0)
    session, (host, port) = lab.session(), lab.gateway._socket.getsockname()
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            one = stack.enter_context(socket.create_connection((host, port)))
            if number % 2:
                one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        assert call(lab, "/v1/chat/completions", CHAT, session.key)[0] == 200
        until(lambda: connections_of(lab) == 0)
    assert call(lab, "/v1/chat/completions", CHAT, session.key)[0] == 200


def test_client_that_does_not_read_is_disconnected_and_holds_nothing(monkeypatch):
    monkeypatch.setattr("palestra.generate.serve.listen.STALL_SECONDS", 0.5)
    with gateway_of(lambda prompt, sample: "a" * 3000 + "<|im_end|>") as lab:
        slow, quick = lab.session(context=20_000, sampling=None), lab.session()
        body = json.dumps({**CHAT, "stream": True, "n": 40}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {slow.key}\r\n"
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(lab.gateway._socket.getsockname())
            one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: len(slow.turns) == 40)
            assert call(lab, "/v1/chat/completions", CHAT, quick.key)[0] == 200
            until(lambda: connections_of(lab) == 0)
        assert not slow.busy
        assert not any(turn.delivered for turn in slow.turns)


def test_more_requests_at_once_than_a_session_may_have_are_refused(lab):
    session: Session = lab.session()
    lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.clear)

    async def many() -> list[str]:
        body = server._read(server.ToolChatBody, json.dumps(CHAT).encode())
        begun = [session.exchange(body.conversation(100), str(number), False) for number in range(70)]
        return [str(one) for one in await asyncio.gather(*begun, return_exceptions=True) if isinstance(one, Exception)]

    refused = lab.gateway.thread.start(many()).result()
    lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.set)
    assert len(refused) == 6
    assert "64 requests" in refused[0]
