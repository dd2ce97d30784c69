import json
import re
import sys
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lm import small_model, small_tokenizer
from test_generate_engine import Listener

from palestra.data.tokenizers import train_bpe
from palestra.errors import MissingExtra, UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.types import Guide, Request, Sampling, StopReason
from palestra.lm.batch import Batch, forward
from palestra.lm.head import logits

TEXT = 'the quick brown fox has {"name": "fox", "age": 12, "tags": [true, null, false]} and says yes or no. '
TOKENIZER = train_bpe([TEXT * 20, "é€ 𝟹 " * 5], 340)
VOCAB = TOKENIZER.vocab_size + 5  # models pad theirs
MODEL = small_model(seed=4, vocab=VOCAB, context=512)
PROMPT = tuple(TOKENIZER.encode("the fox says "))
LONG = {"temperature": 1.5, "max_new_tokens": 400}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def engine_of(**options):
    tokenizer = options.pop("tokenizer", TOKENIZER)
    return Engine(options.pop("model", MODEL), eos=frozenset({tokenizer.eos}), tokenizer=tokenizer, **options)


ENGINE = engine_of()


def ask(guide, n=1, engine=ENGINE, **sampling):
    (result,) = engine.run([Request(PROMPT, Sampling(guide=guide, **{**LONG, **sampling}), n)])
    return result.generations


regexes = st.recursive(
    st.sampled_from([r"[a-f]", r"\d", "fox", "é", r"[^a-z\n]", "[^x]", "(yes|no)", r"\{", r"/\\"]),
    lambda part: st.one_of(
        st.lists(part, min_size=1, max_size=3).map("".join),
        st.lists(part, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(part, st.sampled_from(["?", "{1,3}", "{2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@given(regex=regexes, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_completions_of_any_regex_match_it(regex, seed):
    for generation in ask(Guide(regex=f"{regex}x"), n=2, seed=seed):
        assert generation.stop_reason in (StopReason.STOP, StopReason.EOS)
        assert re.fullmatch(f"{regex}x", generation.text)


schemas = st.recursive(
    st.sampled_from([
        {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 999},
        {"type": "string", "maxLength": 6}, {"enum": ["x", 2, None]}, {"const": {"k": [1]}},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
    ]),
    lambda part: st.one_of(
        st.dictionaries(st.sampled_from("abc"), part, min_size=1).map(
            lambda parts: {
                "type": "object", "properties": parts, "required": sorted(parts), "additionalProperties": False,
            }
        ),
        part.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
        st.lists(part, min_size=2, max_size=2).map(lambda parts: {"anyOf": parts}),
    ),
    max_leaves=4,
)  # fmt: skip


@given(schema=schemas, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_completions_of_any_schema_validate(schema, seed):
    for generation in ask(Guide(json=schema), n=2, seed=seed):
        assert generation.stop_reason in (StopReason.STOP, StopReason.EOS)
        jsonschema.validate(json.loads(generation.text), schema)


def test_grammar_of_nested_parentheses_is_followed():
    for generation in ask(Guide(grammar='start: "(" start ")" | "x"'), n=8, seed=0):
        depth = generation.text.index("x")
        assert generation.text == "(" * depth + "x" + ")" * depth


def plain_logprobs(tokens, texts, temperature):
    """Of each token, where the completion must be one of the texts: by trying every token of the vocabulary."""
    with torch.inference_mode():
        hidden = forward(MODEL, Batch.pack([[*PROMPT, *tokens]])).hidden[len(PROMPT) - 1 : -1]
        rows = logits(hidden, MODEL.unembed).double() / temperature
    pieces = [TOKENIZER.piece(token) for token in range(VOCAB)]
    special, before, found = TOKENIZER.special_ids, b"", []
    for row, token in zip(rows, tokens, strict=True):
        allowed = [
            before in texts
            if number == TOKENIZER.eos
            else bool(piece) and number not in special and any(text.startswith(before + piece) for text in texts)
            for number, piece in enumerate(pieces)
        ]
        found.append(row.masked_fill(~torch.tensor(allowed), -torch.inf).log_softmax(-1)[token].item())
        before += pieces[token]
    return found


@given(
    choice=st.lists(st.text("abfox é€\n\"/{}\\", min_size=1, max_size=8), min_size=1, max_size=4, unique=True),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
    seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_logprobs_are_of_the_distribution_over_the_tokens_that_the_guide_allows(choice, temperature, seed):
    texts = [text.encode() for text in choice]
    for generation in ask(Guide(choice=tuple(choice)), n=3, temperature=temperature, seed=seed):
        assert generation.text in choice
        expected = plain_logprobs(generation.tokens, texts, temperature)
        assert generation.logprobs == pytest.approx(expected, abs=2e-4)


def test_end_token_comes_only_where_the_guide_accepts_and_a_complete_one_ends_at_once():
    for generation in ask(Guide(regex="fo?x?"), n=30, seed=0):
        if generation.stop_reason is StopReason.EOS:
            assert generation.text in ("f", "fo", "fx")
            assert generation.tokens[-1] == TOKENIZER.eos
        else:
            assert (generation.text, generation.stop_match) == ("fox", None) or generation.text == "fx"
    for generation in ask(Guide(regex="fo?x?"), n=30, seed=0, ignore_eos=True):
        assert generation.stop_reason is StopReason.STOP
        assert generation.text in ("fx", "fox")


def test_limit_of_tokens_truncates_a_completion():
    (generation,) = ask(Guide(regex="[a-z]{50,}"), max_new_tokens=6)
    assert (generation.stop_reason, len(generation.tokens)) == (StopReason.LENGTH, 6)
    (generation,) = ask(Guide(choice=("x",)), max_new_tokens=1)
    assert generation.stop_reason is StopReason.STOP


@pytest.mark.parametrize("ahead", [False, True])
def test_free_rows_beside_guided_ones_have_the_same_bits_and_so_have_the_guided(ahead):
    free = [Request(PROMPT[:i], Sampling(seed=i, max_new_tokens=30), n=2) for i in range(1, 5)]
    held = [Request(PROMPT, Sampling(seed=i, guide=Guide(json=PERSON), **LONG)) for i in range(4)]
    alone, held_alone = ([result.generations for result in engine_of().run(part)] for part in (free, held))
    engine = engine_of(max_running=6, burst=4)
    engine._runner.ahead = ahead
    mixed = engine.run([request for pair in zip(free, held, strict=True) for request in pair])
    assert [result.generations for result in mixed[::2]] == alone
    assert [result.generations for result in mixed[1::2]] == held_alone


def test_a_row_that_is_preempted_and_computed_again_goes_on_within_its_guide():
    held = [Request(PROMPT, Sampling(seed=i, guide=Guide(regex="[a-f]{120}"), **LONG)) for i in range(6)]
    tight = engine_of(exact=False, kv_bytes=16 * 2 * 2 * 2 * 32 * 8 * 4)
    results = tight.run(held)
    assert tight.metrics()["preemptions"] > 0
    assert all(re.fullmatch("[a-f]{120}", result.generations[0].text) for result in results)


def test_stream_and_abort_of_a_guided_request():
    engine, streamed, aborted = engine_of(), Listener(streams=True), Listener()
    engine.submit(Request(PROMPT, Sampling(seed=3, guide=Guide(json=PERSON), **LONG), n=2), streamed)
    endless = Sampling(guide=Guide(regex="[a-z]+"), ignore_eos=True, **LONG)
    id = engine.submit(Request(PROMPT, endless, n=2), aborted)
    while len(streamed.chunks) < 8:
        engine.burst()
    engine.abort(id)
    while streamed.result is None or aborted.result is None:
        engine.burst()
    for index, generation in enumerate(streamed.result.generations):
        text = "".join(chunk.text for chunk in streamed.chunks if chunk.index == index)
        assert text == generation.text
        jsonschema.validate(json.loads(text), PERSON)
    for generation in aborted.result.generations:
        assert generation.stop_reason is StopReason.ABORT
        assert re.fullmatch("[a-z]+", generation.text)
    assert engine.metrics()["running"] == engine.metrics()["requests"] == 0


def test_guide_that_no_token_can_follow_fails_its_own_request_alone():
    tokenizer = small_tokenizer()  # letters, space, full stop
    model = small_model(vocab=tokenizer.vocab_size)
    engine, failed, ended, fine = engine_of(tokenizer=tokenizer, model=model), Listener(), Listener(), Listener()
    prompt = tuple(tokenizer.encode("abc"))
    engine.submit(Request(prompt, Sampling(guide=Guide(regex="ab#"), max_new_tokens=9), n=3), failed)
    stops = Sampling(guide=Guide(regex="abc"), stop_ids=tuple(tokenizer.encode("b")))
    engine.submit(Request(prompt, stops, n=3), ended)
    engine.submit(Request(prompt, Sampling(max_new_tokens=20, ignore_eos=True)), fine)
    with pytest.raises(UsageError, match=r"no token of the model continues .* but for those that end it"):
        engine.submit(Request(prompt, replace(stops, stop_ids=tuple(tokenizer.encode("a")))), Listener())
    while fine.result is None:
        engine.burst()
    for listener in (failed, ended):
        assert isinstance(listener.error, UsageError)
        assert "no token of the model continues" in str(listener.error)
    assert len(fine.result.generations[0].tokens) == 20
    assert engine.metrics()["running"] == engine.metrics()["requests"] == 0


def test_run_with_a_guide_that_no_token_can_follow_raises_and_leaves_nothing_behind():
    tokenizer = small_tokenizer()
    engine = engine_of(tokenizer=tokenizer, model=small_model(vocab=tokenizer.vocab_size))
    wrong, right = Sampling(guide=Guide(regex="ab#"), max_new_tokens=9), Sampling(max_new_tokens=9, ignore_eos=True)
    with pytest.raises(UsageError, match="no token of the model continues"):
        engine.run([Request((5, 6), right, n=9), Request((5, 6), wrong)])
    assert engine.metrics()["running"] == engine.metrics()["requests"] == 0
    assert len(engine.run([Request((5, 6), right)])[0].generations[0].tokens) == 9


def test_penalties_and_guide_together():
    bias = dict.fromkeys(TOKENIZER.encode("no"), 50.0)
    found = ask(Guide(choice=("yes", "no")), n=10, logit_bias=bias, repetition_penalty=1.1, seed=0)
    assert {generation.text for generation in found} == {"no"}


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"regex": "(a"}, "the guide's regex is invalid: unclosed group"),
        ({"regex": "(?!a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"regex": "ab\\\\\\"}, "it ends in the middle of an escape"),
        ({"regex": "a\ud800"}, "the guide's regex is not valid Unicode: character 1 is half a surrogate pair"),
        ({"regex": ""}, "allows nothing but the empty text"),
        ({"choice": ()}, "allows nothing but the empty text"),
        ({"json": {"type": "nothing"}}, "the guide's json is invalid: Invalid type: nothing"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"json": {"$ref": "http://elsewhere/x"}}, "does not fetch resources"),
        ({"grammar": "start: foo"}, '1\\(8\\): unknown name: "foo"'),
        ({"grammar": "start: " + "(" * 9999}, "too deeply nested"),
        ({"regex": "a" * 70_000}, "70,0.. characters: expected at most 65,536"),
        ({}, "a guide has exactly one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ("b",)}, "a guide has exactly one of"),
    ],
)  # fmt: skip
def test_bad_guides_are_refused_in_a_sentence(guide, message):
    with pytest.raises(UsageError, match=message):
        ask(Guide(**guide))


def test_minimum_of_tokens_or_no_tokenizer_with_a_guide_are_refused():
    with pytest.raises(UsageError, match="min_new_tokens: a guide says where a completion may end"):
        ask(Guide(regex="a+"), min_new_tokens=3)
    with pytest.raises(UsageError, match="a guide needs a tokenizer"):
        Engine(MODEL, eos=frozenset()).run([Request(PROMPT, Sampling(guide=Guide(regex="a")))])


def test_without_the_extra_a_guide_is_refused_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"pip install 'palestra\[guided\]'"):
        ask(Guide(regex="a"), engine=engine_of())


def test_mask_is_over_the_models_vocabulary_and_never_has_padding_or_special_tokens():
    allowed = ENGINE.compile(Guide(regex=r"(?s).+")).start(()).allowed
    assert allowed.shape == (VOCAB,)
    pieces = {token for token in range(TOKENIZER.vocab_size) if token not in TOKENIZER.special_ids}
    # Bytes that begin no character are in no text.
    assert set(np.flatnonzero(allowed)) <= pieces
    assert len(np.flatnonzero(allowed)) > len(pieces) / 2
