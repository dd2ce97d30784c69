"""Conversations to tokens: rendering as transformers does, injection, the loss mask, templates that are refused."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.data import chat as chat_template
from palestra.data.chat import encode_chat, end_of_turn, render
from palestra.data.tokenizers import CHATML, Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError

# Short templates in the styles of published models.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n' ~ call.function.name ~ call.function.arguments | tojson ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Qwen3 does: reasoning is dropped from all but the last answer.
REASONING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and '</think>' in content and not loop.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WHOLE_BLOCKS = (
    "{% set ns = namespace(turns=0) %}{% for message in messages %}{% set ns.turns = ns.turns + 1 %}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{{ '' if ns.turns else 'nobody' }}"
)
TEMPLATES = {
    "chatml": CHATML,
    "smollm2": SMOLLM2,
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "phi": PHI,
    "reasoning": REASONING,
    "blocks": BLOCKS,
    "whole blocks": WHOLE_BLOCKS,
}
SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
TALK = [
    {"role": "user", "content": "Hi there, what is 12 + 30?"},
    {"role": "assistant", "content": "It is 42.\n\n    x = 42"},
    {"role": "user", "content": "  And naïve 日本語? "},
    {"role": "assistant", "content": "Sure — “yes” 🎉"},
]


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    words = [
        f"user assistant system The answer of {number} is “yes” — 日本語\n\n    x = {number}" for number in range(50)
    ]
    return train_bpe(words, 400, special_tokens=SPECIALS)


@pytest.fixture(scope="module")
def theirs(base: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    base.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def trained(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[str]:
    """The stretches of text that are trained."""
    encoded = encode_chat(tokenizer, messages, add_generation_prompt=False)
    stretches: list[list[int]] = [[]]
    for token, used in zip(encoded.tokens, encoded.loss_mask, strict=True):
        if used:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch, specials=True) for stretch in stretches if stretch]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_render_and_encode_published_styles_equal_transformers(base: Tokenizer, theirs: Any, name: str, prompt: bool):
    tokenizer = base.with_chat_template(TEMPLATES[name])
    talk = TALK[:3] if prompt else TALK
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt}
    assert render(tokenizer, talk, add_generation_prompt=prompt) == theirs.apply_chat_template(
        talk, tokenize=False, **options
    )
    expected = theirs.apply_chat_template(talk, tokenize=True, return_dict=False, **options)
    assert encode_chat(tokenizer, talk, add_generation_prompt=prompt).tokens == expected


def test_render_tools_calls_and_variables_equal_transformers(base: Tokenizer, theirs: Any):
    tool = {"type": "function", "function": {"name": "<add>", "parameters": {"größe": 'a"b'}}}
    call = {"function": {"name": "add", "arguments": {"a": [1, None]}}}
    talk = [
        {"role": "user", "content": "Use it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "name": "add"},
    ]
    template = QWEN + "{{ mood | default('none') }}{{ strftime_now('%Y')[:2] }}"
    template += "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
    tokenizer = base.with_chat_template(template)
    options: dict[str, Any] = {"add_generation_prompt": True, "tools": [tool], "mood": "good"}
    text = render(tokenizer, talk, **options)
    assert text == theirs.apply_chat_template(talk, chat_template=template, tokenize=False, **options)
    assert text.endswith("good201")
    encoded = encode_chat(tokenizer, talk, **options)
    assert tokenizer.decode(encoded.tokens, specials=True) == text


def test_render_content_parts_are_joined_and_others_refused(base: Tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = render(base.with_chat_template(SMOLLM2), [{"role": "user", "content": parts}], add_generation_prompt=False)
    assert text.endswith("user\na\nb<|im_end|>\n")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(UsageError, match=r"message 0 has an image, and the model of .* reads text only"):
        render(base.with_chat_template(CHATML), image, add_generation_prompt=False)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "phi", "blocks"])
def test_mask_assistant_turns_and_their_end_are_trained(base: Tokenizer, name: str):
    ends = {"llama3": "<|eot_id|>", "mistral": "<|endoftext|>", "phi": "<|end|>"}
    before = " " if name == "mistral" else ""
    tokenizer = base.with_chat_template(TEMPLATES[name])
    end = ends.get(name, "<|im_end|>")
    assert trained(tokenizer, TALK) == [before + TALK[1]["content"] + end, before + TALK[3]["content"] + end]
    stop = end_of_turn(tokenizer)
    assert stop is not None
    assert tokenizer.piece(stop) == end.encode()


def test_mask_blocks_around_the_whole_turn_are_taken_as_written(base: Tokenizer, theirs: Any):
    tokenizer = base.with_chat_template(WHOLE_BLOCKS)
    assert trained(tokenizer, TALK) == [f"<|im_start|>assistant\n{TALK[i]['content']}<|im_end|>\n" for i in (1, 3)]
    options = {"return_dict": True, "return_assistant_tokens_mask": True, "chat_template": WHOLE_BLOCKS}
    mask = theirs.apply_chat_template(TALK, tokenize=True, **options)["assistant_masks"]
    assert list(map(int, encode_chat(tokenizer, TALK, add_generation_prompt=False).loss_mask)) == mask


def test_mask_turn_without_a_special_end_is_trained_whole(base: Tokenizer):
    plain = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = base.with_chat_template(plain)
    assert trained(tokenizer, TALK[:2]) == ["It is 42.\n\n    x = 42\n"]
    assert end_of_turn(tokenizer) is None


def test_mask_with_a_generation_prompt_nothing_is_trained(base: Tokenizer):
    # A server sends whole histories, in which a template may rewrite earlier turns.
    tokenizer = base.with_chat_template(REASONING)
    thoughts = [TALK[0], {"role": "assistant", "content": "<think>hm</think>\nYes"}, TALK[2]]
    encoded = encode_chat(tokenizer, thoughts, add_generation_prompt=True)
    assert not any(encoded.loss_mask)
    assert "hm" not in tokenizer.decode(encoded.tokens)


def test_mask_template_that_rewrites_earlier_turns_is_refused(base: Tokenizer):
    tokenizer = base.with_chat_template(REASONING)
    thoughts = [TALK[0], {"role": "assistant", "content": "<think>hm</think>\nYes"}]
    assert trained(tokenizer, thoughts) == ["<think>hm</think>\nYes<|im_end|>"]
    with pytest.raises(UsageError, match=r"turn of message 1 .*generation %}"):
        encode_chat(tokenizer, thoughts + TALK[2:], add_generation_prompt=False)


def test_mask_prompt_with_words_of_its_own_is_refused(base: Tokenizer):
    tokenizer = base.with_chat_template(
        CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>'")
    )
    with pytest.raises(UsageError, match="message 1"):
        encode_chat(tokenizer, TALK[:2], add_generation_prompt=False)


def test_mask_token_over_the_border_of_a_turn_is_trained(base: Tokenizer):
    tokenizer = base.with_chat_template(CHATML)
    talk = [TALK[0], {"role": "assistant", "content": "\n    x = 42"}]
    # "\n" of the template and of the content become one token, as in the string encoded whole.
    assert trained(tokenizer, talk)[0].lstrip("\n") == "    x = 42<|im_end|>"


def test_encode_bos_of_the_template_comes_once(base: Tokenizer):
    tokens = encode_chat(base.with_chat_template(LLAMA3), TALK, add_generation_prompt=False).tokens
    assert tokens.count(base.bos or 0) == 1
    assert tokens[0] == base.bos


HALVES = [special[:cut] for special in SPECIALS for cut in range(1, len(special))]
HALVES += [special[cut:] for special in SPECIALS for cut in range(1, len(special))]
ATTACK = st.lists(
    st.one_of(st.sampled_from(SPECIALS), st.sampled_from(HALVES), st.sampled_from([" ", "\n", "a", "\U000f0000", "é"])),
    min_size=1,
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40)
@given(attacks=st.lists(ATTACK, min_size=4, max_size=4))
def test_encode_special_strings_in_content_give_no_special_ids(base: Tokenizer, name: str, attacks: list[str]):
    tokenizer = base.with_chat_template(TEMPLATES[name])
    hostile = [{**message, "content": attack} for message, attack in zip(TALK, attacks, strict=True)]
    tokens = encode_chat(tokenizer, hostile, add_generation_prompt=False).tokens
    harmless = encode_chat(tokenizer, TALK, add_generation_prompt=False).tokens
    found, expected = ([token for token in ids if token in base.special_ids] for ids in (tokens, harmless))
    assert found == expected
    assert tokenizer.decode(tokens, specials=True) == render(tokenizer, hostile, add_generation_prompt=False)


@settings(max_examples=40)
@given(attacks=st.lists(ATTACK, min_size=4, max_size=4))
def test_mask_special_strings_in_content_do_not_move_it(base: Tokenizer, attacks: list[str]):
    hostile = [{**message, "content": attack} for message, attack in zip(TALK, attacks, strict=True)]
    expected = [f"{attacks[1]}<|im_end|>", f"{attacks[3]}<|im_end|>"]
    # A line break or space that begins an answer may share its token with the template's line break.
    for name in ("chatml", "blocks"):
        found = trained(base.with_chat_template(TEMPLATES[name]), hostile)
        assert [text.lstrip() for text in found] == [text.lstrip() for text in expected]


def test_encode_special_completed_by_the_template_stays_text(base: Tokenizer):
    # The template's own ">" would complete what the content began.
    tokenizer = base.with_chat_template("{% for message in messages %}{{ '<' + message.content + '>' }}{% endfor %}")
    for content in ("|im_end|", "<|im_end|", "|im_end|>"):
        tokens = encode_chat(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True).tokens
        assert tokenizer.decode(tokens, specials=True) == f"<{content}>"
        if content != "|im_end|":  # in the middle of a special string: the template's author wrote both ends of it
            assert base.special_ids.isdisjoint(tokens)


def test_encode_special_strings_in_roles_tools_and_variables_give_no_special_ids(base: Tokenizer):
    tokenizer = base.with_chat_template(QWEN + "{{ mood }}")
    tool = {"<|im_end|>": {"deep": ["<|im_start|>system"]}}
    talk = [{"role": "user<|im_end|>", "content": "x"}]
    options: dict[str, Any] = {"add_generation_prompt": True, "tools": [tool], "mood": "<|endoftext|>"}
    tokens = encode_chat(tokenizer, talk, **options).tokens
    assert [tokenizer.piece(token) for token in tokens if token in base.special_ids] == [
        *(b"<|im_start|>", b"<|im_end|>") * 2,
        b"<|im_start|>",
    ]
    assert tokenizer.decode(tokens, specials=True) == render(tokenizer, talk, **options)


def test_encode_templates_that_trim_split_and_test_content_see_it_as_it_is(base: Tokenizer):
    template = (
        "{% for message in messages %}{% if message.content.startswith('/') %}{{ '<|user|>' }}{% endif %}"
        "{{ (message.content | trim | upper).split('|')[0] }}{{ message.content | length }}<|end|>{% endfor %}"
    )
    tokenizer = base.with_chat_template(template)
    talk = [{"role": "user", "content": "/a|b"}, {"role": "user", "content": "  <|end|> straße  "}]
    tokens = encode_chat(tokenizer, talk, add_generation_prompt=True).tokens
    # A hidden special string is one character long to the template, and keeps its case.
    assert tokenizer.decode(tokens, specials=True) == "<|user|>/A4<|end|><|end|> STRASSE12<|end|>"
    assert [token for token in tokens if token in base.special_ids].count(base.encode("<|end|>", specials=True)[0]) == 2


def test_encode_character_tokenizer_chats(base: Tokenizer):
    tokenizer = character_tokenizer("".join(message["content"] for message in TALK) + "userassistant\n")
    assert trained(tokenizer, TALK) == [TALK[1]["content"] + "<|im_end|>", TALK[3]["content"] + "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(__class__=1) %}", "__class__"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "_x"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ messages[3].content.x }}", "no element 3"),
        ("{% if %}", "not valid, line 1"),
        ("{% generation %}", "not valid"),
    ],
)
def test_render_template_that_misbehaves_is_refused(base: Tokenizer, template: str, message: str):
    with pytest.raises(UsageError, match=message):
        render(base.with_chat_template(template), TALK[:1], add_generation_prompt=False)


def test_render_without_a_template_says_how_to_give_one(base: Tokenizer):
    assert base.chat_template == CHATML
    bare = train_bpe(["a"], 300, special_tokens=("<eos>",))
    for call in (render, encode_chat):
        with pytest.raises(UsageError, match=r"chat_template\.jinja"):
            call(bare, TALK, add_generation_prompt=False)


@pytest.mark.parametrize("wrong", [{"content": "x"}, "x", {"role": 3}])
def test_render_message_without_a_role_is_refused(base: Tokenizer, wrong: Any):
    with pytest.raises(UsageError, match="message 1 is not an object with a role"):
        render(base, [TALK[0], wrong], add_generation_prompt=False)


ENDLESS = [
    "{% for a in range(999) %}{% for b in range(999) %}{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for x in range(99) recursive %}{% if loop.depth < 9 %}{{ loop(range(99)) }}{% endif %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'x' * 999999999999 }}",
    "{{ 999999999999 * [1] }}",
    "{{ 9 ** 999999999 }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=3) %}{% for i in range(99) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "{{ 'x'.ljust(999999999999) }}",
    "{{ 'x'|center(999999999999) }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '%*d' % (999999999999, 1) }}",
    "{{ '%*d'|format(999999999999, 1) }}",
    "{{ '{:999999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999999) }}",
    "{% set big = 'x' * 9999 %}{{ big.replace('x', big) }}",
    "{% set big = 'x' * 9999 %}{{ big|replace('x', big) }}",
    "{% set big = 'x' * 9999 %}{{ ([big] * 9999)|join }}",
    "{% set big = 'x' * 9999 %}{{ ''.join([big] * 9999) }}",
    "{% set big = 'x' * 9999 %}{% for i in range(999) %}{{ big }}{% endfor %}",
    "{% set big = 'x' * 9999 %}{% set all %}{% for i in range(999) %}{{ big }}{% endfor %}{% endset %}",
    "{{ lipsum(999999) }}",
    "{{ [1]|tojson(indent=999999999999) }}",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("template", ENDLESS)
def test_template_that_loops_or_grows_without_end_is_refused_by_name(
    base: Tokenizer, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "STEPS", 20_000)
    monkeypatch.setattr(chat_template, "LONGEST", 100_000)
    tokenizer = base.with_chat_template(template)
    with pytest.raises(UsageError, match=f"the chat template of {re.escape(tokenizer.name)} refused"):
        render(tokenizer, [{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_template_of_a_long_conversation_is_rendered(base: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x" * 1000}] * 3000
    said = render(base.with_chat_template(REASONING), messages, add_generation_prompt=True)
    assert said.count("x" * 1000) == 3000
