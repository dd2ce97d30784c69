"""Tool calls in text: each format, whole and in pieces of any size, and what only looks like a call."""

import json

import pytest
from gateway_lab import TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollout.gateway.calls import Call, CallReader, Format, format_of

ARGUMENTS = '{"a": 2}'
TWO = [("add", {"a": 2}), ("sub", {"a": 3})]
CASES: list[tuple[Format, str, str, list]] = [
    ("hermes", 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "Hm.", TWO[:1]),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>\n'
        '<tool_call>{"name": "sub", "arguments": {"a": 3}}</tool_call>',
        "",
        TWO,
    ),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 2}}', "", TWO[:1]),  # the end of the turn closes it too
    ("hermes", "<tool_call>add 2</tool_call> or < so", "<tool_call>add 2</tool_call> or < so", []),
    ("hermes", "Hm.\n\n<tool_call>add", "Hm.\n\n<tool_call>add", []),
    ("hermes", "Hm.\n<tool_call>add</tool_call>", "Hm.\n<tool_call>add</tool_call>", []),
    ("mistral", "Hm.\n[TOOL_CALLS]add", "Hm.\n[TOOL_CALLS]add", []),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 2}}', "", TWO[:1]),
    ("llama3", '{"name": "add", "parameters": {"a": 2}}; {"name": "sub", "parameters": {"a": 3}}', "", TWO),
    ("llama3", 'No: {"name": "add", "parameters": {"a": 2}}', 'No: {"name": "add", "parameters": {"a": 2}}', []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, {"name": "sub", "arguments": {"a": 3}}]',
        "",
        TWO,
    ),
    ("mistral", 'Hm. [TOOL_CALLS]add[ARGS]{"a": 2}[TOOL_CALLS]sub[ARGS]{"a": 3}', "Hm.", TWO),
    ("json", '{"name": "add", "arguments": {"a": 2}}', "", TWO[:1]),
    ("json", '```json\n{"name": "add", "arguments": {"a": 2}}\n```', "", TWO[:1]),
    ("json", '[{"name": "add", "arguments": {"a": 2}}, {"name": "sub", "arguments": "{\\"a\\": 3}"}]', "", TWO),
    ("json", '{"answer": 5}', '{"answer": 5}', []),
    ("json", '{"name": "add", "arguments": {"a": NaN}}', '{"name": "add", "arguments": {"a": NaN}}', []),
    ("json", '{"name": "add", "arguments": {"a": 1e999}}', '{"name": "add", "arguments": {"a": 1e999}}', []),
    ("json", r'{"name": "\ud800", "arguments": {}}', r'{"name": "\ud800", "arguments": {}}', []),
    ("hermes", r'<tool_call>"\ud800"</tool_call>', r'<tool_call>"\ud800"</tool_call>', []),
    ("json", "Just five.\n", "Just five.\n", []),
]


def read(format: Format, pieces: list[str]) -> tuple[str, list[Call]]:
    reader, text, calls = CallReader(format), "", []
    for piece in pieces:
        said, made = reader.push(piece)
        text, calls = text + said, calls + made
    said, made = reader.finish()
    return text + said, calls + made


@pytest.mark.parametrize(("format", "text", "said", "called"), CASES)
def test_reader_of_a_whole_text_finds_what_is_said_and_called(format, text, said, called):
    found, calls = read(format, [text])
    assert (found, [(call.name, json.loads(call.arguments)) for call in calls]) == (said, called)


@given(st.data())
def test_reader_of_pieces_finds_the_same_as_of_the_whole(data):
    format, text, said, called = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found, calls = read(format, pieces)
    assert (found, [(call.name, json.loads(call.arguments)) for call in calls]) == (said, called)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("json", "[" * 100_000),
        ("llama3", '{"a":' * 100_000),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("mistral", "[TOOL_CALLS]" + "[" * 100_000),
    ],
    ids=["json", "llama3", "hermes", "mistral"],
)
def test_reader_of_brackets_that_never_end_says_them(format, text):
    assert read(format, [text]) == (text, [])


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": NaN}', r'{"a": "\ud800"}', "two"], ids=range(4))
def test_input_of_arguments_that_are_no_json_is_their_text(arguments):
    assert Call.of("add", arguments).input == arguments


def test_reader_of_a_call_with_an_endless_name_takes_linear_time():
    # What grows with the square of the length does not end within the test's limit.
    text = "[TOOL_CALLS]" + "a" * 200_000
    assert read("mistral", [text]) == (text, [])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ('{"name": n, "parameters": p}', "llama3"),
        ("{{ messages[0].content }}", "json"),
    ],
)
def test_format_is_what_the_template_speaks_of(template, format):
    assert format_of(TOKENIZER.with_chat_template(template)) == format
