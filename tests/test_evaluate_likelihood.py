"""Likelihoods against brute force and transformers; the border of context and answer; rows in every form; resumed."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from small_lm import CONTEXT, small_model, small_tokenizer
from tiny_lm import write_rows
from tiny_models import tiny_checkpoint

from palestra.data.tokenizers import Tokenizer, train_bpe
from palestra.errors import PalestraError, UsageError
from palestra.evaluate import likelihood
from palestra.evaluate.likelihood import (
    EncodedChoice,
    ScoredChoice,
    encode_item,
    likelihood_metrics,
    likelihood_outcome,
    score_set,
)
from palestra.evaluate.likelihood_data import Choices, Item, Option, load_choices
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Request, Sampling
from palestra.lm.batch import Batch, forward
from palestra.lm.hf import load_pretrained
from palestra.lm.model import Transformer
from palestra.spec.kinds.evaluate import LikelihoodUse

TOKENIZER = small_tokenizer()
CORE = Path(os.environ.get("PALESTRA_DATA", Path(__file__).parents[2] / "shared/data")) / "core_eval"
needs_core = pytest.mark.skipif(not CORE.is_dir(), reason="needs core_eval in the folder PALESTRA_DATA")
WORDS = ["red", "green", "blue", "Maybe yes", "no", "a very long answer", "x"]


def suite_of(items: list[Item], **settings: Any) -> Choices:
    return Choices(LikelihoodUse(path="some.jsonl", **settings), tuple(items), len(items))


def choice(context: str, *answers: str, gold: int = 0) -> Item:
    return Item(tuple(Option(context, answer) for answer in answers), gold)


def some_items(count: int, seed: int = 0) -> list[Item]:
    draw, items = random.Random(seed), []
    for _ in range(count):
        answers = draw.sample(WORDS, draw.randint(2, 4))
        context = " ".join(draw.choices(WORDS, k=draw.randint(1, 4))) + " "
        items.append(choice(context, *answers, gold=draw.randrange(len(answers))))
    return items


@torch.no_grad()
def plain_logprob(model: Transformer, encoded: EncodedChoice) -> tuple[float, bool]:
    """One sequence alone, one token at a time, in float64."""
    total, greedy = 0.0, True
    for place in range(encoded.start, len(encoded.tokens)):
        hidden = forward(model, Batch.pack([encoded.tokens[:place]])).hidden[-1].double()
        scores = (model.unembed.double() @ hidden).log_softmax(-1)
        total += float(scores[encoded.tokens[place]])
        greedy = greedy and int(scores.argmax()) == encoded.tokens[place]
    return total, greedy


def bpe() -> Tokenizer:
    texts = ["Answer: yes", "Answer: no", "Question: is it? Answer: yes no maybe yes no"] * 40
    return train_bpe(texts, 300)


# ---- scores


def test_scores_equal_a_plain_loop_and_choose_as_it_does():
    model, suite = small_model(), suite_of(some_items(40))
    scored = score_set(model, TOKENIZER, suite)
    assert [one.item for one in scored] == list(range(40))
    for item, one in zip(suite.items, scored, strict=True):
        encoded = encode_item(TOKENIZER, item, CONTEXT)
        expected = [plain_logprob(model, option)[0] for option in encoded]
        assert one.logprobs == pytest.approx(expected, abs=1e-4)
        assert one.tokens == tuple(1 + len(option.answer) for option in item.options)  # the space before it, letters
        assert one.chosen("sum") == expected.index(max(expected))
        means = [value / size for value, size in zip(expected, one.tokens, strict=True)]
        assert one.chosen("token") == means.index(max(means))
        assert one.written is None
    ways = {way: [one.chosen(way) for one in scored] for way in ("sum", "token")}
    assert ways["sum"] != ways["token"]


def test_scores_equal_those_of_transformers(tmp_path):
    import transformers

    folder = tiny_checkpoint("llama2", tmp_path / "llama")
    ours, theirs = load_pretrained(folder).model, transformers.AutoModelForCausalLM.from_pretrained(folder)
    suite = suite_of(some_items(6))
    for item, one in zip(suite.items, score_set(ours, TOKENIZER, suite), strict=True):
        for encoded, found in zip(encode_item(TOKENIZER, item, 64), one.logprobs, strict=True):
            with torch.no_grad():
                scores = theirs(torch.tensor([encoded.tokens])).logits[0].double().log_softmax(-1)
            places = range(encoded.start, len(encoded.tokens))
            assert found == pytest.approx(sum(float(scores[p - 1, encoded.tokens[p]]) for p in places), abs=1e-3)


def test_written_is_what_greedy_decoding_writes():
    model = small_model()
    engine = Engine(model, eos=frozenset(), tokenizer=TOKENIZER)
    contexts = [item.options[0].context.rstrip() for item in some_items(30)]
    requests = [Request(tuple(TOKENIZER.encode(c)), Sampling(temperature=0, max_new_tokens=4)) for c in contexts]
    texts = [result.generations[0].text or "" for result in engine.run(requests)]
    usable = [(c, t) for c, t in zip(contexts, texts, strict=True) if len(TOKENIZER.encode(t)) == 4]
    assert len(usable) > 3
    items = [Item((Option(c, t),), 0) for c, t in usable]
    items += [Item((Option(c, t[:-1] + ("a" if t[-1] != "a" else "b")),), 0) for c, t in usable]
    suite = suite_of(items)
    scored = score_set(model, TOKENIZER, suite)
    assert [one.written for one in scored] == [True] * len(usable) + [False] * len(usable)
    for item, one in zip(items, scored, strict=True):
        (encoded,) = encode_item(TOKENIZER, item, CONTEXT)
        expected, greedy = plain_logprob(model, encoded)
        assert (one.logprobs[0], one.written) == (pytest.approx(expected, abs=1e-4), greedy)
    outcome = likelihood_outcome(suite, scored)
    assert (outcome.accuracy.mean, outcome.baseline, outcome.centred, outcome.accuracies) == (0.5, 0.0, 0.5, {})


def test_ways_of_choosing_closed_form():
    one = ScoredChoice("s", 0, 0, (-6.0, -4.0, -5.0), (4, 2, 5), (12, 4, 5), (6, 4, 2), None, False)
    assert [one.chosen(way) for way in ("sum", "token", "byte", "character")] == [1, 2, 0, 0]
    assert [one.right(way) for way in ("sum", "token", "byte", "character")] == [False, False, True, True]
    tie = ScoredChoice("s", 0, 1, (-2.0, -2.0), (1, 1), (1, 1), (1, 1), None, False)
    assert tie.chosen("sum") == 0


def test_outcome_closed_form():
    items = [choice("c", "aa", "bb", gold=0), choice("c", "a", "b", "c", "d", gold=3)]
    scored = [
        ScoredChoice("some", 0, 0, (-1.0, -2.0), (1, 1), (2, 2), (2, 2), None, False),
        ScoredChoice("some", 1, 3, (-1.0, -2.0, -3.0, -4.0), (1,) * 4, (1,) * 4, (1,) * 4, None, True),
    ]
    outcome = likelihood_outcome(suite_of(items), scored)
    assert outcome.accuracy.mean == 0.5
    assert outcome.baseline == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert outcome.centred == pytest.approx((0.5 - 0.375) / 0.625)
    assert outcome.bits_per_byte == pytest.approx((1 + 4) / math.log(2) / 3)
    assert outcome.cut == 1
    assert likelihood_outcome(suite_of(items, baseline=0.0), scored).centred == 0.5
    metrics = likelihood_metrics({"one": outcome, "two": likelihood_outcome(suite_of(items, baseline=0.0), scored)})
    assert metrics["eval/centred"] == pytest.approx((outcome.centred + 0.5) / 2)
    assert metrics["eval/one/accuracy_byte"] == 0.5
    assert metrics["eval/one/cut"] == 0.5


def test_weights_that_compute_no_numbers_are_an_error():
    model = small_model()
    with torch.no_grad():
        model.norm.weight.fill_(3e38)
    with pytest.raises(PalestraError, match="non-finite"):
        score_set(model, TOKENIZER, suite_of(some_items(2)))


# ---- the border between context and answer


def test_white_space_before_the_answer_and_a_token_over_the_border_belong_to_the_answer():
    tokenizer = bpe()
    (encoded, _) = encode_item(tokenizer, choice("Question: is it? Answer: ", "yes", "no"), 99)
    assert encoded.tokens == tokenizer.encode("Question: is it? Answer: yes")
    assert [tokenizer.piece(token) for token in encoded.tokens[encoded.start :]] == [b" yes"]
    (alone, _) = encode_item(TOKENIZER, choice("Is it. ", "yes", "no"), 99)
    assert TOKENIZER.decode(alone.tokens[alone.start :]) == " yes"
    # "Answer" is one token: with a border inside it, all of it is scored.
    (inside,) = encode_item(tokenizer, choice("Question: Ans", "wer: yes"), 99)
    assert tokenizer.piece(inside.tokens[inside.start]).strip() == b"Answer"


def test_answers_to_one_context_are_scored_from_the_same_token():
    tokenizer = bpe()
    # "Answer" is a token, "Ansx" is not: alone, the second would be spared the letters that the first one pays for.
    first, second = encode_item(tokenizer, choice("Question: Ans", "wer:", "x"), 99)
    assert first.start == second.start
    assert first.tokens[: first.start] == second.tokens[: second.start]
    scored = [b"".join(map(tokenizer.piece, one.tokens[one.start :])).strip() for one in (first, second)]
    assert scored == [b"Answer:", b"Ansx"]


@given(
    st.text("yesno Answer:(é€", max_size=12),
    st.lists(st.text("yesno(é€", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_scored_tokens_hold_all_of_the_answer_and_no_token_too_many(context, answers):
    tokenizer = bpe_once()
    for option, one in zip(answers, encode_item(tokenizer, choice(context, *answers), 99), strict=True):
        whole = tokenizer.encode(context + option)
        assert one.tokens[-len(whole) :] == whole
        assert one.start >= 1
        before = b"".join(map(tokenizer.piece, one.tokens[len(one.tokens) - len(whole) : one.start]))
        assert context.rstrip().encode().startswith(before)
        if len(answers) == 1:  # had it begun one token later, some of the answer would not be scored
            assert len(before + tokenizer.piece(one.tokens[one.start])) > len(context.rstrip().encode())


_BPE: list[Tokenizer] = []


def bpe_once() -> Tokenizer:
    if not _BPE:
        _BPE.append(bpe())
    return _BPE[0]


def test_answer_without_context_follows_the_token_that_begins_a_text():
    (one, _) = encode_item(TOKENIZER, choice("", "ab", "c"), 99)
    assert one.tokens == [*TOKENIZER.encode_prompt(""), *TOKENIZER.encode("ab")]
    assert one.start == 1
    model = small_model()
    scored = score_set(model, TOKENIZER, suite_of([choice("", "ab", "c")]))
    assert scored[0].logprobs[0] == pytest.approx(plain_logprob(model, one)[0], abs=1e-4)


def test_long_context_loses_its_beginning_and_is_counted():
    item = choice("abcdefghij" * 12 + " ", "xyz", "w")
    encoded = encode_item(TOKENIZER, item, CONTEXT)
    assert [len(one.tokens) for one in encoded] == [CONTEXT, CONTEXT]
    whole = TOKENIZER.encode(item.options[0].context + "xyz")
    assert encoded[0].tokens == whole[-CONTEXT:]
    assert [TOKENIZER.decode(one.tokens[one.start :]) for one in encoded] == [" xyz", " w"]
    suite = suite_of([item, choice("short ", "a", "b")])
    assert likelihood_outcome(suite, score_set(small_model(), TOKENIZER, suite)).cut == 1
    with pytest.raises(UsageError, match="leaves no room for a token before it"):
        encode_item(TOKENIZER, choice("a", "b" * CONTEXT, "c"), CONTEXT)
    with pytest.raises(UsageError, match=r"some, item 1: an answer of 200 tokens"):
        score_set(small_model(), TOKENIZER, suite_of([item, choice("a", "b" * 200, "c")]))
    assert len(encode_item(TOKENIZER, choice("a", "b" * (CONTEXT - 1), "c"), CONTEXT)[0].tokens) == CONTEXT


# ---- resumed


def test_resumed_scores_are_the_same_bits_also_after_a_torn_chunk(monkeypatch):
    monkeypatch.setattr(likelihood, "CHUNK", 8)
    model, suite = small_model(), suite_of(some_items(30), name="mine")
    parts: list[list[ScoredChoice]] = []
    whole = score_set(model, TOKENIZER, suite, keep=lambda some: parts.append(list(some)))
    assert [len(part) for part in parts] == [8, 8, 8, 6]
    for torn in (0, 5, 8, 19, 30):
        kept: list[ScoredChoice] = []
        again = score_set(model, TOKENIZER, suite, done=whole[:torn], keep=kept.extend)
        assert again == whole  # floats and all
        assert [one.item for one in kept] == list(range(torn - torn % 8 if torn < 30 else 30, 30))
    row = json.loads(json.dumps(vars(whole[3])))
    assert TypeAdapter(ScoredChoice).validate_python(row) == whole[3]
    other = suite_of(some_items(30), name="other")
    assert score_set(model, TOKENIZER, other, done=whole)[0].suite == "other"


# ---- rows


def load(tmp_path: Path, *rows: dict[str, Any], seed: int = 0, **settings: Any) -> Choices:
    path = write_rows(tmp_path / "mine.jsonl", rows)
    return load_choices(LikelihoodUse(path=path, **settings), seed)


def test_rows_with_choices_contexts_and_continuations(tmp_path):
    (item,) = load(tmp_path, {"query": " Who? ", "choices": ["a", " b"], "gold": 1}).items
    assert item == Item((Option("Who? ", "a"), Option("Who? ", "b")), 1)
    assert item.one_context
    (item,) = load(tmp_path, {"context_options": ["He", "She"], "continuation": "went.", "gold": 0}).items
    assert item == Item((Option("He ", "went."), Option("She ", "went.")), 0)
    assert not item.one_context
    suite = load(tmp_path, {"context": "1+1 =", "continuation": " 2"}, delimiter="\nAnswer: ", items=1)
    assert suite.items == (Item((Option("1+1 =\nAnswer: ", "2"),), 0),)
    assert not suite.items[0].choice
    assert suite.label == "mine"


def test_rows_as_lm_eval_describes_them(tmp_path):
    arc = {"question": "Q?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
    (item,) = load(
        tmp_path,
        arc,
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_choice="{{choices.text}}",
        doc_to_target="{{choices.label.index(answerKey)}}",
    ).items
    assert item == Item((Option("Question: Q?\nAnswer: ", "x"), Option("Question: Q?\nAnswer: ", "y")), 1)
    swag = {"ctx": "He", "endings": ["sat", "ran"], "label": "1"}
    (item,) = load(tmp_path, swag, doc_to_text="ctx", doc_to_choice="endings", doc_to_target="label").items
    assert (item.gold, item.options[0].answer) == (1, "sat")
    piqa = {"goal": "g", "sol1": "one", "sol2": "two", "label": 0}
    (item,) = load(
        tmp_path, piqa, doc_to_text="{{goal}}\n", doc_to_choice=["{{sol1}}", "{{sol2}}"], doc_to_target="label"
    ).items
    assert [option.answer for option in item.options] == ["one", "two"]
    assert item.options[0].context == "g\n "  # a line break at the end of a template stays
    named = {"q": "g", "options": ["1", "0"], "right": "1"}
    (item,) = load(tmp_path, named, doc_to_text="q", doc_to_choice="options", doc_to_target="right").items
    assert item.gold == 0  # a column with the answer itself, not its number
    (item,) = load(tmp_path, {"text": "a b", "last": "c"}, doc_to_text="text", doc_to_target="last").items
    assert item == Item((Option("a b ", "c"),), 0)


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, {}, r"row 1: the right answer is 2"),
        ({"query": "q", "choices": ["a", "b"], "gold": None}, {}, r"the right answer is None"),
        ({"query": "q", "choices": ["a"], "gold": 0}, {}, "nothing to choose from"),
        ({"query": "q", "choices": ["a", " "], "gold": 0}, {}, "an answer is empty"),
        ({"query": "q", "choices": "a, b", "gold": 0}, {}, "expected a list of answers"),
        ({"query": 3, "choices": ["a", "b"], "gold": 0}, {}, "expected a text, got 3"),
        ({"text": "q"}, {}, "has the columns text: expected query, choices, gold"),
        ({"text": "q"}, {"doc_to_text": "txt", "doc_to_target": "text"}, "has no column 'txt', only text"),
        ({"text": "q"}, {"doc_to_text": "{{txt}}", "doc_to_target": "text"}, "'txt' is undefined"),
        ({"text": "q"}, {"doc_to_text": "{{text", "doc_to_target": "text"}, "the template"),
        ({"context": "a", "continuation": "b"}, {"shots": 1}, "has only 0 other rows"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_scored_are_refused_by_place(tmp_path, row, settings, message):
    with pytest.raises(UsageError, match=message):
        load(tmp_path, row, **settings)


def test_file_with_two_kinds_of_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="score them as two files"):
        load(tmp_path, {"context": "a", "continuation": "b"}, {"query": "q", "choices": ["a", "b"], "gold": 0})


def test_template_cannot_reach_out_of_its_row(tmp_path):
    with pytest.raises(UsageError, match=r"failed|unsafe|undefined"):
        load(tmp_path, {"text": "q"}, doc_to_text="{{ text.__class__.__mro__ }}", doc_to_target="text")


def test_shots_are_other_rows_with_their_right_answers_the_same_at_every_call(tmp_path):
    rows = [{"query": f"q{i}", "choices": [f"r{i}", f"w{i}"], "gold": i % 2} for i in range(7)]
    suite = load(tmp_path, *rows, shots=3, items=5)
    assert (len(suite.items), suite.total) == (5, 7)
    shown = []
    for number, item in enumerate(suite.items):
        *shots, question = item.options[0].context.split("\n\n")
        assert question == f"q{number} "
        assert len(set(shots)) == 3
        assert all(shot in {f"q{i} {'rw'[i % 2]}{i}" for i in range(7) if i != number} for shot in shots)
        shown.append(tuple(shots))
    assert len(set(shown)) > 2
    assert load(tmp_path, *rows, shots=3).items[:5] == suite.items
    assert load(tmp_path, *rows, shots=3, seed=1).items[:5] != suite.items
    schema = [{"context_options": [f"a{i}", f"b{i}"], "continuation": "went", "gold": 1} for i in range(2)]
    assert load(tmp_path, *schema, shots=1).items[0].options[0].context == "b1 went\n\na0 "
    for item in load(tmp_path, *rows, shots=6).items:
        assert len(set(item.options[0].context.split("\n\n"))) == 7


def test_identity_tells_other_items_apart(tmp_path):
    rows = [{"query": f"q{i}", "choices": ["a", "b"], "gold": 0} for i in range(3)]
    base = load(tmp_path, *rows).identity()
    assert load(tmp_path, *rows).identity() == base
    rows[2]["gold"] = 1
    assert load(tmp_path, *rows).identity()["items_sha256"] != base["items_sha256"]


@needs_core
@pytest.mark.parametrize("path", sorted(CORE.glob("*.jsonl")), ids=lambda path: path.stem)
def test_real_file_is_read_whole(path):
    suite = load_choices(LikelihoodUse(path=str(path), shots=2, items=20), 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert suite.total == len(rows)
    assert len(suite.items) == min(20, len(rows))
    first = suite.items[0]
    if "gold" in rows[0]:
        answers = [option.answer for option in first.options]
        gold = rows[0]["choices"][rows[0]["gold"]] if "choices" in rows[0] else rows[0]["continuation"]
        assert answers[first.gold] == gold.strip()
        assert len(answers) == len(rows[0].get("choices") or rows[0]["context_options"])
    else:
        assert [option.answer for option in first.options] == [rows[0]["continuation"].strip()]
    assert first.options[0].context.count("\n\n") >= 2


@needs_core
def test_real_choices_are_guessed_by_a_model_that_knows_nothing():
    texts = [json.loads(line)["query"] for line in (CORE / "piqa.jsonl").read_text().splitlines()]
    tokenizer = train_bpe(texts[:300], 400)
    suite = load_choices(LikelihoodUse(path=str(CORE / "piqa.jsonl"), items=96, by="byte"), 0)
    model = small_model(vocab=tokenizer.vocab_size, context=1024)
    outcome = likelihood_outcome(suite, score_set(model, tokenizer, suite))
    assert (outcome.items, outcome.baseline) == (96, 0.5)
    assert 0.25 < outcome.accuracy.mean < 0.75
    assert outcome.bits_per_byte > 2
