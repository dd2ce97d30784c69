"""From the data of a spec to examples: mixtures and stages, what is held out, masks, long rows, made tokenizers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_lm import write_rows

from palestra.data.store import Example
from palestra.data.tokenizers import Tokenizer, character_tokenizer
from palestra.errors import PalestraError, UsageError
from palestra.lm.datasets import (
    bytes_of_tokens,
    chat_data,
    held_out,
    kept_tokenizer,
    made_tokenizer,
    mixture_of,
    pair_data,
    text_data,
)
from palestra.spec.kinds.lm import ChatData, PretrainData
from palestra.spec.lm import BpeSpec

LETTERS = "abcdefghij"


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PALESTRA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    character_tokenizer(LETTERS + "systemuserassistant\n").save(folder)
    return folder


def texts(folder: Path, **letters: int) -> dict[str, dict[str, Any]]:
    """A source for each letter, with that many documents of seven of it: eight tokens each."""
    return {
        letter: {"path": write_rows(folder / f"{letter}.jsonl", [{"text": letter * 7}] * count)}
        for letter, count in letters.items()
    }


def pretrain(train: dict[str, Any], **fields: Any) -> PretrainData:
    return PretrainData.model_validate({"train": train, "context": 8, **fields})


def steps(count: int = 4, batch: int = 16) -> dict[str, int]:
    return {"steps": count, "batch": batch}


def letters_of(examples: list[Example], folder: Path) -> Counter[str]:
    tokenizer = Tokenizer.load(folder)
    return Counter(tokenizer.decode(example.tokens[:1].tolist()) for example in examples)


# ---- plain text


def test_mixture_has_the_exact_shares_of_the_weights_in_every_block(tmp_path, characters):
    sources = texts(tmp_path, a=50, b=50, c=50)
    sources["a"]["weight"], sources["b"]["weight"] = 3.0, 0.0
    data = pretrain(sources, mix={"block": 16})
    found = text_data(data, characters)
    assert (list(found.train), list(found.evals)) == (["a", "c"], ["b"])  # no weight: for evaluation
    mixture = mixture_of(found, data, **steps(), seed=0)
    for block in range(4):
        drawn = letters_of(mixture.examples(np.arange(16 * block, 16 * (block + 1))), characters)
        assert drawn == {"a": 12, "c": 4}


def test_stages_begin_at_their_steps_and_until_then_the_weights_of_the_sources_hold(tmp_path, characters):
    sources = texts(tmp_path, a=50, b=50)
    sources["b"]["weight"] = 0.0
    stages = [{"step": 2, "weights": {"a": 1.0, "b": 1.0}}, {"step": 3, "weights": {"b": 1.0}}]
    data = pretrain(sources, mix={"block": 16}, stages=stages)
    found = text_data(data, characters)
    assert list(found.train) == ["a", "b"]  # b is trained on later
    mixture = mixture_of(found, data, **steps(), seed=0)
    drawn = [letters_of(mixture.examples(np.arange(16 * step, 16 * (step + 1))), characters) for step in range(4)]
    assert drawn == [{"a": 16}, {"a": 16}, {"a": 8, "b": 8}, {"b": 16}]
    with pytest.raises(UsageError, match=r"data\.stages: .* steps are multiples of 4"):
        mixture_of(found, data.model_copy(update={"mix": data.mix.model_copy(update={"block": 64})}), **steps(), seed=0)


def test_data_that_end_before_the_steps_are_refused_with_the_steps_there_are(tmp_path, characters):
    data = pretrain(texts(tmp_path, a=50), mix={"block": 16, "stop": "first_exhausted"})
    found = text_data(data, characters)
    assert len(mixture_of(found, data, **steps(3), seed=0)) == 50
    with pytest.raises(UsageError, match=r"ends the data after 50 examples.*train for 3 steps"):
        mixture_of(found, data, **steps(4), seed=0)


@settings(max_examples=20, deadline=None)
@given(held=st.integers(1, 19))
def test_what_is_held_out_is_a_random_part_of_each_source_and_never_trained_on(tmp_path_factory, characters, held):
    folder = tmp_path_factory.getbasetemp() / "held"
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    if not path.exists():
        write_rows(path, ({"text": LETTERS[i // 10] * 4 + LETTERS[i % 10] * 3} for i in range(20)))
    data = pretrain({"rows": {"path": str(path)}}, holdout=held / 20)
    found = text_data(data, characters)
    trained, evaluated = (
        [tuple(part[i].tokens) for i in range(len(part))] for part in (found.train["rows"], found.evals["rows"])
    )
    assert (len(trained), len(evaluated)) == (20 - held, held)
    assert len({*trained, *evaluated}) == 20
    other = text_data(pretrain({"rows": {"path": str(path)}}, holdout=held / 20), characters).evals["rows"]
    assert [tuple(other[i].tokens) for i in range(held)] == evaluated
    drawn = mixture_of(found, data, **steps(4), seed=held).examples(np.arange(64))
    assert {tuple(example.tokens) for example in drawn} <= set(trained)


def test_holdout_of_a_sorted_source_has_its_share_of_every_part_of_it(tmp_path, characters):
    write_rows(tmp_path / "sorted.jsonl", ({"text": LETTERS[i // 200] * 7} for i in range(1000)))
    found = text_data(pretrain({"sorted": {"path": str(tmp_path / "sorted.jsonl")}}, holdout=0.2), characters)
    held = [int(found.evals["sorted"][i].tokens[0]) for i in range(len(found.evals["sorted"]))]
    assert len(held) == 200
    assert all(20 <= held.count(letter) <= 60 for letter in set(held))
    assert len(set(held)) == 5


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=30), share=st.floats(0, 0.99), seed=st.integers(0, 10))
def test_held_out_takes_whole_documents_but_for_one(lengths, share, seed):
    documents = np.repeat(np.arange(len(lengths)) * 3 + seed, lengths)  # numbers of documents may have gaps
    held = held_out(documents, share)
    assert len(held) == int(len(documents) * share)
    assert list(held) == sorted(set(held))
    divided = set(documents[held]) & set(np.delete(documents, held))
    assert len(divided) <= 1


def test_holdout_of_nothing_and_sources_without_examples_are_refused_by_name(tmp_path, characters):
    sources = texts(tmp_path, a=5)
    with pytest.raises(UsageError, match=r"data\.holdout: 0\.1 of the 5 examples of 'a' is none"):
        text_data(pretrain(sources, holdout=0.1), characters)
    with pytest.raises(UsageError, match=r"data\.train\.a: .*a\.jsonl has no example for data\.context = 100 tokens"):
        text_data(pretrain(sources, context=100), characters)
    with pytest.raises(UsageError, match=r"data\.eval\.b: .*b\.jsonl has no example"):
        text_data(pretrain(sources, eval=texts(tmp_path, b=1), context=20), characters)


def test_documents_in_a_window_are_kept_apart_unless_joined(tmp_path, characters):
    sources = texts(tmp_path, a=10)
    apart = text_data(pretrain(sources, context=20), characters).train["a"][0]
    joined = text_data(pretrain(sources, context=20, documents=False), characters).train["a"][0]
    assert (apart.segments.tolist(), joined.segments.tolist()) == ([8, 8, 4], [20])
    assert np.array_equal(apart.tokens, joined.tokens)


# ---- conversations and pairs


def chat(path: str, **fields: Any) -> ChatData:
    return ChatData.model_validate({"train": {"rows": {"path": path}}, "context": 64, **fields})


PLAIN = {"format": "plain"}


def test_long_conversations_are_cut_dropped_or_refused_as_the_rule_says(tmp_path, characters):
    rows = [{"prompt": "a" * n, "completion": "b" * n} for n in (2, 4, 8, 3)]  # 5, 9, 17 and 7 tokens
    path = write_rows(tmp_path / "rows.jsonl", rows)

    def examples(**fields: Any) -> list[tuple[int, int]]:
        found = chat_data(chat(path, **PLAIN, **fields), characters).train["rows"]
        return [(len(found[i].tokens), int(np.sum(found[i].loss))) for i in range(len(found))]

    assert examples() == [(5, 3), (9, 5), (17, 9), (7, 4)]
    assert examples(context=9) == [(5, 3), (9, 5), (9, 1), (7, 4)]
    assert examples(context=8) == [(5, 3), (8, 4), (7, 4)]  # of the longest only its prompt is left
    assert examples(context=9, over_long="drop") == [(5, 3), (9, 5), (7, 4)]
    with pytest.raises(UsageError, match=r"1 of 4 documents .* have more than 9 tokens"):
        examples(context=9, over_long="error")
    with pytest.raises(UsageError, match=r"data\.train\.rows: .* has no example for data\.context = 2 tokens"):
        examples(context=2)


def test_pairs_stay_together_when_one_of_them_is_long(tmp_path, characters):
    rows = [
        {"prompt": "aa", "chosen": "b", "rejected": "c" * 9},
        {"prompt": "aa", "chosen": "bbb", "rejected": "cc"},
        {"prompt": "a" * 9, "chosen": "b", "rejected": "c"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)

    def examples(**fields: Any) -> list[tuple[str, str]]:
        found, tokenizer = (
            pair_data(chat(path, **PLAIN, **fields), characters).train["rows"],
            Tokenizer.load(characters),
        )
        return [tuple(tokenizer.decode(side.tokens.tolist()) for side in found[i]) for i in range(len(found))]

    whole = [(row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) for row in rows]
    assert examples() == whole
    assert examples(context=8, over_long="drop") == [whole[1]]
    assert examples(context=8) == [("aab", "aa" + "c" * 6), whole[1]]  # the last has no answer left
    with pytest.raises(UsageError, match="more than 8 tokens"):
        examples(context=8, over_long="error")


def test_mask_of_a_chat_covers_answers_with_the_token_that_ends_them(tmp_path, characters):
    messages = [{"role": role, "content": text} for role, text in (("user", "aa"), ("assistant", "bc"))]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [*messages, *messages]}])
    example, tokenizer = chat_data(chat(path), characters).train["rows"][0], Tokenizer.load(characters)
    assert tokenizer.decode(example.tokens[example.loss].tolist(), specials=True) == "bc<|im_end|>bc<|im_end|>"
    assert len(example.segments) == 1  # the turns see each other


def test_bad_row_is_refused_with_its_line_and_what_was_expected(tmp_path, characters):
    good = {"prompt": "a", "completion": "b"}
    path = write_rows(tmp_path / "rows.jsonl", [good] * 300 + [{"prompt": "a", "response": "b"}])
    with pytest.raises(PalestraError) as raised:
        chat_data(chat(path), characters)
    assert str(raised.value).startswith(f"{path}:301: expected a row with 'messages'")
    assert "this one has 'prompt', 'response'" in str(raised.value)
    path = write_rows(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    with pytest.raises(PalestraError, match=r"pairs\.jsonl:1: the chosen and the rejected conversation are the same"):
        pair_data(chat(path), characters)
    Path(path).write_text(json.dumps(good) + "\n{\n")
    with pytest.raises(PalestraError, match=r"pairs\.jsonl:2"):
        chat_data(chat(path), characters)


def test_empty_and_missing_files_are_refused_by_name(tmp_path, characters):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(PalestraError, match=r"empty\.jsonl"):
        chat_data(chat(str(tmp_path / "empty.jsonl")), characters)
    with pytest.raises(UsageError, match=r"there is no file .*missing\.jsonl in "):
        chat_data(chat(str(tmp_path / "missing.jsonl")), characters)
    with pytest.raises(UsageError, match="no file matches"):
        chat_data(chat(str(tmp_path / "*.parquet")), characters)


def test_chat_with_a_tokenizer_without_template_is_refused_and_plain_is_not(tmp_path, characters):
    document = json.loads((characters / "tokenizer_config.json").read_text())
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((characters / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**document, "chat_template": None}))
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(UsageError, match=r"data\.format: .* has no chat template .* model\.chat_template"):
        chat_data(chat(path), folder)
    assert len(chat_data(chat(path, **PLAIN), folder).train["rows"]) == 1


# ---- tokenizers


def test_character_tokenizer_of_conversations_knows_what_the_template_writes(tmp_path):
    data = chat(write_rows(tmp_path / "rows.jsonl", [{"prompt": "1", "completion": "2"}]))
    folder = made_tokenizer("characters", data, None)
    assert len(chat_data(data, folder).train["rows"]) == 1
    template = "{% for m in messages %}Q{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}Q{% endif %}"
    other = Tokenizer.load(made_tokenizer("characters", data, template))
    assert other.decode(other.encode("Q12")) == "Q12"


def test_made_tokenizer_depends_on_the_texts_it_is_made_of_and_is_made_once(tmp_path):
    rows = [{"text": "aa", "other": "bb"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    by_key = [
        made_tokenizer("characters", pretrain({"t": {"path": path, "key": key}}), None) for key in ("text", "other")
    ]
    assert [Tokenizer.load(folder).encode(letter) for folder, letter in zip(by_key, "ab", strict=True)] == [[0], [0]]
    assert made_tokenizer("characters", pretrain({"t": {"path": path}}), None) == by_key[0]
    bpe = made_tokenizer(BpeSpec(bpe=300), pretrain({"t": {"path": path}}), None)
    assert bpe not in by_key
    assert not list(bpe.parent.glob(".*"))  # nothing half written is left
    assert kept_tokenizer(Tokenizer.load(bpe)) == kept_tokenizer(Tokenizer.load(bpe))
    changed = Tokenizer.load(bpe).with_chat_template("{{ messages }}")
    assert Tokenizer.load(kept_tokenizer(changed)).chat_template == "{{ messages }}"


def test_bytes_of_tokens_count_utf8_and_nothing_for_special_ones(tmp_path):
    data = pretrain({"t": {"path": write_rows(tmp_path / "rows.jsonl", [{"text": "aü€"}])}})
    tokenizer = Tokenizer.load(made_tokenizer("characters", data, None))
    sizes = bytes_of_tokens(tokenizer, 64)
    assert len(sizes) == 64
    assert [sizes[tokenizer.encode(letter)[0]] for letter in "aü€"] == [1, 2, 3]
    assert sizes.sum() == 6


# ---- names, moved files, sources by their texts


def test_source_with_a_dot_in_its_name_is_trained_on(tmp_path, characters):
    rows = texts(tmp_path, a=20)["a"]
    found = text_data(pretrain({"books.v2": rows}, eval={"books.v3": rows}), characters)
    assert (list(found.train), list(found.evals)) == (["books.v2"], ["books.v3"])


def test_path_from_the_home_folder_is_found(tmp_path, characters, monkeypatch):
    texts(tmp_path, a=20)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/a.jsonl", "~/*.jsonl"):
        assert len(text_data(pretrain({"a": {"path": path}}), characters).train["a"]) == 20


def test_stage_that_names_a_source_without_weight_leaves_it_out(tmp_path, characters):
    sources = texts(tmp_path, a=50, b=50, c=50)
    sources["c"]["weight"] = 0.0
    stages = [{"step": 2, "weights": {"a": 0.0, "b": 1.0, "c": 0.0}}]
    data = pretrain(sources, mix={"block": 16}, stages=stages)
    found = text_data(data, characters)
    assert (list(found.train), list(found.evals)) == (["a", "b"], ["c"])
    mixture = mixture_of(found, data, **steps(), seed=0)
    drawn = [letters_of(mixture.examples(np.arange(16 * step, 16 * (step + 1))), characters) for step in range(4)]
    assert drawn == [{"a": 8, "b": 8}, {"a": 8, "b": 8}, {"b": 16}, {"b": 16}]


def test_contents_of_a_source_stay_where_it_moves_and_change_with_it(tmp_path, characters):
    def content(folder: Path, count: int) -> dict[str, str]:
        folder.mkdir()
        return text_data(pretrain(texts(folder, a=count)), characters).contents

    first, moved, other = (content(tmp_path / name, n) for name, n in (("one", 20), ("two", 20), ("three", 21)))
    assert first == moved
    assert first["data.train.a"] != other["data.train.a"]


def test_tokenizer_made_of_conversations_reads_what_they_say_and_nothing_else(tmp_path):
    row = {"prompt": "1", "completion": "2", "text": "3", "note": "4"}
    data = chat(write_rows(tmp_path / "rows.jsonl", [row]))
    tokenizer = Tokenizer.load(made_tokenizer("characters", data, None))
    assert tokenizer.decode(tokenizer.encode("12")) == "12"
    for letter in "34":
        with pytest.raises(UsageError):
            tokenizer.encode(letter)
    pairs = chat(write_rows(tmp_path / "pairs.jsonl", [{"prompt": "1", "chosen": "2", "rejected": "5", "text": "3"}]))
    tokenizer = Tokenizer.load(made_tokenizer("characters", pairs, None, pairs=True))
    assert tokenizer.decode(tokenizer.encode("125")) == "125"
    with pytest.raises(UsageError, match=r"pairs\.jsonl:1: expected a row with 'messages'"):
        made_tokenizer("characters", pairs, None)


def test_plain_prompt_begins_as_the_tokenizer_says(tmp_path, characters):
    folder = tmp_path / "begins"
    folder.mkdir()
    config = json.loads((characters / "tokenizer_config.json").read_text())
    (folder / "tokenizer.json").write_bytes((characters / "tokenizer.json").read_bytes())
    config |= {"add_bos_token": True, "bos_token": config["eos_token"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    found, tokenizer = chat_data(chat(path, **PLAIN), folder).train["rows"][0], Tokenizer.load(folder)
    assert found.tokens.tolist() == [*tokenizer.encode_prompt("a"), *tokenizer.encode("b"), tokenizer.eos]
    assert found.tokens[0] == tokenizer.bos
    assert found.loss is not None
    assert found.loss.tolist() == [False, False, True, True]
