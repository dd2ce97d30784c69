import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_lm import small_tokenizer
from test_generate_engine import Listener, engine_of

from palestra.data.tokenizers import train_bpe
from palestra.generate.engine.request import GrowingText, StopStrings
from palestra.generate.types import Request, Sampling, StopReason

few_letters = st.text("ab", max_size=12)


def first_stop(text, stops):
    """Where the first stop string to be complete begins, by trying every end."""
    for end in range(1, len(text) + 1):
        complete = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return min(complete)
    return None


@given(pieces=st.lists(few_letters, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_in_pieces_of_any_size_give_all_that_lies_before(pieces, stops):
    watch, given_out = StopStrings(stops), ""
    for piece in pieces:
        for letter in piece:
            given_out += watch.push(letter)
            if watch.found is not None:
                break
        if watch.found is not None:
            break
    text, expected = "".join(pieces), first_stop("".join(pieces), stops)
    if expected is None:
        assert watch.found is None
        assert given_out + watch.finish() == text
    else:
        assert watch.found == expected[1]
        assert given_out == text[: expected[0]]


@given(text=few_letters, stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_text_given_out_early_never_belongs_to_a_later_match(text, stops):
    watch, given_out = StopStrings(stops), ""
    for letter in text:
        given_out += watch.push(letter)
        if watch.found is not None:
            assert text.startswith(given_out + watch.found)
            return


def test_stop_string_ignored_at_first_counts_when_it_comes_again():
    watch = StopStrings(["ab", "abab."])
    assert watch.push("xabab", ignore=True) == "x"
    assert watch.push("c") == "ababc"
    assert watch.push("ab") == ""
    assert watch.found == "ab"


def test_stop_string_across_tokens_cuts_the_text_and_keeps_the_tokens():
    tokenizer = train_bpe(["the cat sat on the mat and the dog sat on the log"] * 20, 300)
    text = GrowingText(tokenizer, [" on the"])
    tokens = tokenizer.encode("the cat sat on the mat")
    used = []
    for token in tokens:
        used.append(token)
        text.push(token, ignore_stops=False)
        if text.stopped_by:
            break
    assert text.stopped_by == " on the"
    assert text.text == "the cat sat"
    assert text.finish() == ""
    assert tokenizer.decode(used) == "the cat sat on the"


def test_half_a_character_at_the_end_becomes_a_replacement_after_what_was_kept_back():
    tokenizer = train_bpe(["é"], 260)
    text = GrowingText(tokenizer, ["xyz"])
    for token in tokenizer.encode("axyé")[:-1]:
        assert "\ufffd" not in text.push(token, ignore_stops=False)
    text.finish()
    assert text.text == "axy" or text.text == "axy\ufffd"


@pytest.mark.parametrize("burst", [1, 2, 5])
@pytest.mark.parametrize("streams", [True, False])
def test_engine_stop_string_over_several_tokens_ends_with_the_token_that_completes_it(burst, streams):
    tokenizer = small_tokenizer()
    plain = Sampling(seed=4, max_new_tokens=40)
    whole = engine_of(tokenizer=tokenizer).run([Request((3, 4), plain)])[0].generations[0]
    # The model has more tokens than the tokenizer: some have no text.
    stop = whole.text[6:9]
    at = whole.text.index(stop)
    engine, listener = engine_of(tokenizer=tokenizer, burst=burst), Listener(streams)
    engine.submit(Request((3, 4), Sampling(seed=4, max_new_tokens=40, stop=("never there", stop))), listener)
    while engine.burst():
        pass
    found = listener.result.generations[0]
    assert (found.stop_reason, found.stop_match) == (StopReason.STOP, stop)
    assert found.text == whole.text[:at]
    assert found.tokens == whole.tokens[: len(found.tokens)]
    assert found.logprobs == whole.logprobs[: len(found.tokens)]
    assert len(found.versions) == len(found.tokens)
    assert tokenizer.decode(found.tokens).endswith(stop)
    assert not tokenizer.decode(found.tokens[:-1]).endswith(stop)
    if streams:
        assert "".join(chunk.text for chunk in listener.chunks) == found.text
        assert tuple(token for chunk in listener.chunks for token in chunk.tokens) == found.tokens


def test_engine_stop_string_before_the_minimum_is_passed_over():
    tokenizer = small_tokenizer()
    engine = engine_of(tokenizer=tokenizer)
    whole = engine.run([Request((3, 4), Sampling(seed=4, max_new_tokens=40))])[0].generations[0]
    stop = whole.text[1:3]
    sampling = Sampling(seed=4, max_new_tokens=40, min_new_tokens=20, stop=(stop,))
    found = engine.run([Request((3, 4), sampling)])[0].generations[0]
    assert len(found.tokens) >= 20
    assert found.tokens == whole.tokens[: len(found.tokens)]
    assert stop in found.text


def test_engine_streamed_text_is_that_of_the_result():
    tokenizer = small_tokenizer()
    engine, listener = engine_of(tokenizer=tokenizer, burst=2), Listener(streams=True)
    engine.submit(Request((3, 4), Sampling(seed=1, max_new_tokens=30, stop=("qqqqqq",)), n=3), listener)
    while engine.burst():
        pass
    for index, generation in enumerate(listener.result.generations):
        text = "".join(chunk.text for chunk in listener.chunks if chunk.index == index)
        assert text == generation.text == tokenizer.decode(generation.tokens)
