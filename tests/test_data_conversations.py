"""Rows of every accepted form become the conversation, or the pair, that they mean; others are refused by name."""

import os
from pathlib import Path

import pytest
from example_specs import ROOT
from hypothesis import given
from hypothesis import strategies as st

from palestra.data.encoders import ChatEncoder, conversation, pair
from palestra.data.readers import read_rows, shards
from palestra.data.tokenizers import CHATML, Tokenizer, character_tokenizer, train_bpe
from palestra.errors import UsageError

DATA = ROOT / os.environ.get("PALESTRA_DATA", "../shared/data")
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SYSTEM = [{"role": "system", "content": "Be brief"}, *ASKED]
SAID = (("system", "Be brief"), ("human", "Hi"), ("gpt", "Ho"))
THREE = {"role": "assistant", "content": "3"}
BEFORE = [{"role": "user", "content": "Hi"}]


# ---- conversations


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": SYSTEM}, SYSTEM),
        ({"messages": ASKED, "prompt": "ignored", "source": "web"}, ASKED),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, ASKED),
        ({"conversations": [{"from": who, "value": what} for who, what in SAID]}, SYSTEM),
        ({"conversations": ASKED}, ASKED),
        ({"prompt": "Hi", "completion": "Ho"}, ASKED),
        ({"prompt": BEFORE, "completion": [ASKED[1]]}, ASKED),
        ({"instruction": "Hi", "input": "", "output": "Ho"}, ASKED),
        ({"instruction": "Hi", "output": "Ho"}, ASKED),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, [{"role": "user", "content": "Add\n\n1 2"}, THREE]),
        ({"question": "Hi", "answer": "Ho"}, ASKED),
    ],
)
def test_row_of_each_form_is_the_conversation_it_means(row, messages):
    assert conversation(row) == messages


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "Hi"}, "expected a row with 'messages', 'conversations', or one of 'prompt' and 'completion'"),
        ({"text": "Hi"}, "this one has 'text'"),
        ({"messages": "Hi"}, "expected a list of messages in 'messages', got str"),
        ({"messages": []}, "expected a list of messages in 'messages', got an empty list"),
        ({"messages": [{"role": "user"}]}, "expected messages with 'role' and 'content' in 'messages'"),
        ({"conversations": [{"from": "robot", "value": "Hi"}]}, "human, gpt, system"),
        ({"conversations": None}, "expected turns with 'from'"),
        ({"prompt": "2 + 2", "completion": 4}, "expected a text or a list of messages in 'completion', got int"),
        ({"question": None, "answer": "Ho"}, "expected a text or a list of messages in 'question', got NoneType"),
    ],
)
def test_row_that_is_no_conversation_is_refused_with_what_was_expected(row, said):
    with pytest.raises(UsageError) as raised:
        conversation(row)
    assert said in str(raised.value)


# ---- pairs

GOOD, BAD = [*BEFORE, {"role": "assistant", "content": "Ho"}], [*BEFORE, {"role": "assistant", "content": "Ha"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Ho", "rejected": "Ha"},
        {"prompt": BEFORE, "chosen": [GOOD[-1]], "rejected": [BAD[-1]]},
        {"prompt": "Hi", "chosen": GOOD, "rejected": BAD},  # the prompt repeated, as in UltraFeedback
        {"messages": BEFORE, "chosen": "Ho", "rejected": "Ha"},
        {"messages": BEFORE, "chosen": GOOD, "rejected": [BAD[-1]]},
        {"chosen": GOOD, "rejected": BAD},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Ho", "rejected": "\n\nHuman: Hi\n\nAssistant: Ha"},
        {"chosen": "Human: Hi\n\nAssistant: Ho", "rejected": "Human:Hi\n\nAssistant:Ha"},
    ],
)
def test_row_of_each_form_is_the_pair_it_means(row):
    assert pair(row) == (GOOD, BAD)


def test_text_of_several_turns_keeps_paragraphs_inside_a_turn():
    text = "\n\nHuman: One\n\ntwo\n\nAssistant: Yes.\n\n1. a\n\nHuman: More\n\nAssistant: No"
    chosen, _ = pair({"chosen": text, "rejected": text})
    assert [(turn["role"], turn["content"]) for turn in chosen] == [
        ("user", "One\n\ntwo"),
        ("assistant", "Yes.\n\n1. a"),
        ("user", "More"),
        ("assistant", "No"),
    ]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "Hi", "chosen": "Ho"},
            "with 'chosen' and 'rejected'; this one has 'prompt', 'chosen'",
        ),
        (
            {"chosen": "Ho", "rejected": "Ha"},
            "paragraphs that begin with 'Human:' or 'Assistant:' in 'chosen'",
        ),
        ({"chosen": GOOD, "rejected": 3}, "expected a list of messages in 'rejected', got int"),
        ({"prompt": 3, "chosen": "Ho", "rejected": "Ha"}, "expected a text or a list of messages in 'prompt', got int"),
    ],
)
def test_row_that_is_no_pair_is_refused_with_what_was_expected(row, said):
    with pytest.raises(UsageError) as raised:
        pair(row)
    assert said in str(raised.value)


# ---- what is trained on


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["some words to merge some words"], 300).save(path)
    return path


def spoken(tokenizer: Tokenizer, tokens: list[int], mask: list[bool]) -> str:
    """The trained tokens as text, with `|` where others stand before them."""
    runs: list[list[int]] = []
    for index, (token, trained) in enumerate(zip(tokens, mask, strict=True)):
        if trained and (index == 0 or not mask[index - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return "".join(f"|{tokenizer.decode(run, specials=True)}" for run in runs)


def test_chat_trains_on_every_assistant_turn_and_its_end_and_on_nothing_else(folder):
    messages = [*SYSTEM, {"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "No"}]
    (encoded,) = ChatEncoder.load(folder)([{"messages": messages}])
    tokenizer = Tokenizer.load(folder)
    assert spoken(tokenizer, list(encoded.tokens), list(encoded.loss)) == "|Ho<|im_end|>|No<|im_end|>"
    assert encoded.num_bytes == sum(len(message["content"]) for message in messages)


def test_plain_trains_on_the_answer_and_the_end_of_text(folder):
    (encoded,) = ChatEncoder.load(folder, format="plain")([{"prompt": "Hi: ", "completion": "Ho"}])
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.decode(list(encoded.tokens), specials=True) == "Hi: Ho<|endoftext|>"
    assert spoken(tokenizer, list(encoded.tokens), list(encoded.loss)) == "|Ho<|endoftext|>"
    for row in ({"messages": SYSTEM}, {"messages": [{"role": "user", "content": None}, ASKED[1]]}):
        with pytest.raises(UsageError, match="format `plain` expects"):
            ChatEncoder.load(folder, format="plain")([row])


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_pair_trains_on_what_its_two_answers_do_not_share(folder, prompt, one, other):
    row = {"prompt": prompt, "chosen": one, "rejected": other}
    sides = [ChatEncoder.load(folder, side=side) for side in ("chosen", "rejected")]
    if one == other:
        with pytest.raises(UsageError, match="the same: nothing is preferred"):
            sides[0]([row])
        return
    chosen, rejected = (side([row])[0] for side in sides)
    first = min(list(encoded.loss).index(True) for encoded in (chosen, rejected))
    assert list(chosen.tokens[:first]) == list(rejected.tokens[:first])
    assert chosen.tokens[first] != rejected.tokens[first]
    for encoded in (chosen, rejected):  # up to the end of the turn
        assert Tokenizer.load(folder).decode(
            [encoded.tokens[list(encoded.loss).index(False, first) - 1]], specials=True
        )


def test_conversation_without_an_answer_is_refused(folder):
    with pytest.raises(UsageError, match="without an assistant's turn has nothing to train on"):
        ChatEncoder.load(folder)([{"messages": BEFORE}])


def test_template_decides_the_recipe_and_plain_does_not_depend_on_it(folder):
    twin = folder.parent / "twin"
    character_tokenizer("ab").with_chat_template(CHATML.replace("im_start", "im_end")).save(twin)
    other = folder.parent / "other"
    character_tokenizer("ab").save(other)
    assert ChatEncoder.load(twin).recipe != ChatEncoder.load(other).recipe
    assert ChatEncoder.load(twin, format="plain").recipe == ChatEncoder.load(other, format="plain").recipe


# ---- real datasets


@pytest.mark.parametrize(("name", "rows"), [("instruct_1100/instruction-data.json", 1100), ("gsm8k/test.jsonl", 1319)])
def test_real_dataset_is_read_whole_as_questions_and_answers(folder, name, rows):
    if not (DATA / name).exists():
        pytest.skip(f"needs {name} under PALESTRA_DATA")
    (shard,) = shards(DATA / name)
    found = [conversation(row) for row in read_rows(shard)]
    assert len(found) == rows
    assert all([turn["role"] for turn in messages] == ["user", "assistant"] for messages in found)
    encoder, tokenizer = ChatEncoder.load(folder), Tokenizer.load(folder)
    for row, messages in list(zip(read_rows(shard), found, strict=True))[:20]:
        (encoded,) = encoder([row])
        assert spoken(tokenizer, list(encoded.tokens), list(encoded.loss)) == f"|{messages[1]['content']}<|im_end|>"
