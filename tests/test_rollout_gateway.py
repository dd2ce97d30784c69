"""The gateway through the real clients of OpenAI and Anthropic: turns, tools, streams, and the tokens it captures."""

import json
import socket
from typing import Any

import anthropic
import openai
import pytest
from gateway_lab import END, TOKENIZER, Lab, gateway_of, until

from palestra.rollout.gateway.session import Session
from palestra.tasks.task import Status, Verdict

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS}}]
QUESTION: Any = {"role": "user", "content": "What is 2+3?"}
RIGHT = Verdict(1.0, Status.CORRECT)


def adder(prompt: str, sample: int) -> str:
    """Calls the tool, then gives its result."""
    _, found, result = prompt.rpartition("<|im_start|>tool\n")
    return f"It is {result.partition('<|im_end|>')[0]}.<|im_end|>" if found else f"Let me see.\n{CALL}<|im_end|>"


@pytest.fixture
def lab():
    with gateway_of(adder) as one:
        yield one


def chat(lab: Lab, session: Session, **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{lab.gateway.url}/v1", api_key=session.key, **{"max_retries": 0, **settings})


def claude(lab: Lab, session: Session) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=lab.gateway.url, api_key=session.key, max_retries=0)


def chat_agent(lab: Lab, session: Session, stream: bool) -> str:
    client, messages = chat(lab, session), [QUESTION]
    while True:
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            values = json.loads(call.function.arguments)
            content = str(values["a"] + values["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def responses_agent(lab: Lab, session: Session, stream: bool) -> str:
    client = chat(lab, session)
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [QUESTION]
    while True:
        if stream:
            with client.responses.stream(model="policy", input=items, tools=tools) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(model="policy", input=items, tools=tools)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            values = json.loads(call.arguments)
            output = str(values["a"] + values["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def claude_agent(lab: Lab, session: Session, stream: bool) -> str:
    client, messages = claude(lab, session), [QUESTION]
    tools: Any = [{"name": "add", "description": "Adds", "input_schema": PARAMETERS}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 200, "tools": tools, "system": "Be brief."}
    while True:
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] + call.input["b"])}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [chat_agent, responses_agent, claude_agent])
def test_agent_with_a_tool_is_one_branch_whose_prompts_continue_token_for_token(lab, agent, stream):
    session = lab.session()
    assert agent(lab, session, stream) == "It is 5."
    first, second = session.turns
    assert second.prompt[: len(first.tokens)] == first.tokens
    assert session.retokenized == session.forks == 0
    (one,) = session.trajectories(RIGHT, 1.0, "branches")
    written = TOKENIZER.decode(one.tokens, specials=True)
    assert written.endswith(
        f"<|im_start|>assistant\nLet me see.\n{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n"
        "<|im_start|>assistant\nIt is 5.<|im_end|>"
    )
    trained = [token for token, sampled in zip(one.tokens, one.loss_mask, strict=True) if sampled]
    assert tuple(trained) == first.generation.tokens + second.generation.tokens
    assert [one.tokens[end - 1] for _, end in one.turns] == [END, END]
    logprobs = [logprob for logprob, sampled in zip(one.logprobs, one.loss_mask, strict=True) if sampled]
    assert tuple(logprobs) == first.generation.logprobs + second.generation.logprobs


def ask(client: openai.OpenAI, *contents: str, **settings: Any) -> Any:
    """A completion after messages of the user and the assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    messages: Any = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return client.chat.completions.create(model="policy", messages=messages, **settings)


def echo(prompt: str, sample: int) -> str:
    """The number of the sample, and how long the prompt is."""
    return f"{sample}:{len(prompt)}<|im_end|>"


def message_of(client: Any, stream: bool, asked: dict[str, Any]) -> Any:
    """The message that Anthropic's client makes of a reply, whole or streamed."""
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "input"), [('"two"', {"input": "two"}), ("[2, 3]", {"input": [2, 3]}), ('"{\\"a\\": 2}"', {"a": 2})]
)
def test_input_of_a_call_is_an_object_for_anthropics_client_whatever_the_model_wrote(arguments, input, stream):
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call><|im_end|>'
    with gateway_of(lambda prompt, sample: call) as lab:
        asked: Any = {"model": "policy", "max_tokens": 200, "messages": [QUESTION]}
        asked["tools"] = [{"name": "add", "input_schema": PARAMETERS}]
        message = message_of(claude(lab, lab.session()), stream, asked)
    assert [(block.name, block.input) for block in message.content] == [("add", input)]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_is_named_to_anthropics_client_whether_it_streams(stream):
    with gateway_of(lambda prompt, sample: "Let me see. I see.<|im_end|>") as lab:
        asked: Any = {"model": "policy", "max_tokens": 200, "messages": [QUESTION], "stop_sequences": ["no", " see"]}
        message = message_of(claude(lab, lab.session()), stream, asked)
    assert message.content[0].text == "Let me"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " see")


def test_history_that_is_changed_forks_and_every_turn_is_trained_once():
    with gateway_of(echo) as lab:
        session = lab.session()
        client = chat(lab, session)
        first = ask(client, "a").choices[0].message.content
        second = ask(client, "a", first, "b").choices[0].message.content
        ask(client, "a", first, "c")  # another way on from the first turn
        ask(client, "a", first, "b", second.upper() + "!", "d")  # what was never said: rendered from the third turn on
    assert session.retokenized == 0
    assert [turn.parent for turn in session.turns] == [None, session.turns[0], session.turns[0], session.turns[0]]
    assert session.forks == 2
    rows = session.trajectories(RIGHT, 1.0, "branches")
    assert [row.row for row in rows] == [0, 1, 2]
    assert rows[0].tokens[-len(session.turns[3].tokens) :] == session.turns[3].tokens  # the last turn's branch is first
    assert sum(row.sampled for row in rows) == session.sampled
    assert [len(row.turns) for row in rows] == [2, 1, 1]
    each = session.trajectories(RIGHT, 1.0, "turns")
    assert [row.tokens for row in each] == [session.turns[i].tokens for i in (3, 0, 1, 2)]
    assert sum(row.sampled for row in each) == session.sampled


def test_system_prompt_that_is_changed_begins_a_tree_of_its_own():
    with gateway_of(echo) as lab:
        session = lab.session()
        client = chat(lab, session)
        for system in ("x", "y"):
            messages: Any = [{"role": "system", "content": system}, QUESTION]
            client.chat.completions.create(model="policy", messages=messages)
    assert [turn.parent for turn in session.turns] == [None, None]
    assert session.forks == 1


def test_template_that_rewrites_the_beginning_forks_and_is_counted():
    dropping = "{% for m in messages %}{{ m.role + (messages|length)|string + m.content + '<|im_end|>' }}{% endfor %}"
    with gateway_of(echo, tokenizer=TOKENIZER.with_chat_template(dropping)) as lab:
        session = lab.session()
        client = chat(lab, session)
        said = ask(client, "a").choices[0].message.content
        ask(client, "a", said, "b")
    assert session.forks == 1
    assert session.retokenized == 0
    assert sum(row.sampled for row in session.trajectories(RIGHT, 1.0, "branches")) == session.sampled


def test_several_choices_are_branches_with_seeds_of_their_own():
    with gateway_of(echo) as lab:
        session = lab.session()
        client = chat(lab, session)
        both = ask(client, "a", n=2, logprobs=True, top_logprobs=0)
        assert [choice.message.content for choice in both.choices] == ["0:51", "1:51"]
        for choice, turn in zip(both.choices, session.turns, strict=True):
            assert tuple(one.logprob for one in choice.logprobs.content) == turn.generation.logprobs
        ask(client, "a", both.choices[1].message.content, "b")
    assert session.turns[2].parent is session.turns[1]
    assert session.forks == 1


def test_sampling_is_the_trainings_and_not_the_clients():
    with gateway_of(echo) as lab:
        session = lab.session()
        ask(chat(lab, session), "a", temperature=0.1, top_p=0.5, max_tokens=7, stop=["!"])
        ask(chat(lab, session), "a")
        ask(chat(lab, lab.session()), "a")
    sampling = [request.sampling for request in lab.generator.requests]
    assert (sampling[0].temperature, sampling[0].top_p, sampling[0].max_new_tokens) == (1.0, 1.0, 7)
    assert sampling[0].stop == ("!",)
    assert sampling[0].seed != sampling[1].seed  # asked again is sampled again
    assert sampling[0].seed == sampling[2].seed  # of the session's seed and the prompt alone


def test_request_that_an_sdk_sends_again_is_replayed_and_a_running_one_joined():
    with gateway_of(echo) as lab:
        session = lab.session()
        again: Any = {"extra_headers": {"x-stainless-retry-count": "1"}}
        first = ask(chat(lab, session), "a")
        assert ask(chat(lab, session), "a", **again).id == first.id
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.clear)
        with pytest.raises(openai.APITimeoutError):  # its connection is closed, and the request goes on
            ask(chat(lab, session, timeout=0.5), "b")
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.set)
        joined = ask(chat(lab, session), "b", **again)
        streamed = ask(chat(lab, session), "c", stream=True)
        texts = ["".join(part.choices[0].delta.content or "" for part in streamed)]
        streamed = ask(chat(lab, session), "c", stream=True, **again)
        texts += ["".join(part.choices[0].delta.content or "" for part in streamed)]
    assert len(session.turns) == len(lab.generator.requests) == 3
    assert joined.choices[0].message.content == "0:51"
    assert texts == ["0:51", "0:51"]
    assert all(turn.delivered for turn in session.turns)


def test_turn_that_no_client_got_is_not_trained_on():
    with gateway_of(echo) as lab:
        session = lab.session()
        ask(chat(lab, session), "a")
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.clear)
        body = json.dumps({"messages": [{"role": "user", "content": "b"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {session.key}\r\n"
        connections = lab.gateway._server.server_state.connections
        before = set(connections)  # that of the first request may close at any moment
        with socket.create_connection(lab.gateway._socket.getsockname()) as one:
            one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: session.busy)
            (mine,) = connections - before
        until(lambda: mine not in connections)
        lab.gateway.thread.loop.call_soon_threadsafe(lab.generator.hold.set)
        until(lambda: len(session.turns) == 2)
        ask(chat(lab, session), "c")
    assert [turn.delivered for turn in session.turns] == [True, False, True]
    assert len(session.branches()) == 2


def test_responses_continue_from_a_response_id_and_keep_their_instructions():
    with gateway_of(echo) as lab:
        session = lab.session()
        client = chat(lab, session)
        first = client.responses.create(model="policy", instructions="Be brief.", input="a")
        more: Any = {"model": "policy", "instructions": "Be brief.", "input": "b", "previous_response_id": first.id}
        client.responses.create(**more)
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.create(**{**more, "previous_response_id": "resp_of_another"})
    assert session.turns[1].parent is session.turns[0]
    assert [message["role"] for message in session.turns[1].messages] == ["system", "user", "assistant"] * 1 + [
        "user",
        "assistant",
    ]
