import traceback

import pytest
import torch
import transformers
from small_lm import CONTEXT, VOCAB, overflowing, small_model, small_tokenizer
from tiny_models import FAMILIES, tiny_checkpoint

from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine, EngineFailed, PromptTooLong, QueueFull
from palestra.generate.engine.pages import PAGE, pages_for
from palestra.generate.types import Chunk, Request, Result, Sampling, StopReason
from palestra.lm.batch import Batch, score


def prompt_of(length, seed=0):
    return tuple(torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def engine_of(model=None, **settings):
    return Engine(model or small_model(), eos=settings.pop("eos", frozenset()), **settings)


def scored(model, result, index=0, temperature=1.0):
    """Log-probabilities of a generation's tokens by the trainer's forward pass."""
    tokens = result.generations[index].tokens
    batch = Batch.pack([[*result.prompt, *tokens]], [[0.0] * len(result.prompt) + [1.0] * len(tokens)])
    return score(model, batch, temperature=temperature).logprobs[len(result.prompt) :]


class Listener:
    """Keeps all that becomes of a request."""

    def __init__(self, streams=False):
        self.streams, self.chunks, self.result, self.error = streams, [], None, None

    def put(self, item):
        if isinstance(item, Chunk):
            self.chunks.append(item)
        elif isinstance(item, Result):
            assert self.result is None
            self.result = item
        else:
            self.error = item


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_of_every_family_equals_transformers_token_for_token(family, tmp_path):
    folder = tiny_checkpoint(family, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine.from_folder(folder)
    prompts = [prompt_of(length, seed=length) for length in (1, 9, 30)]
    results = engine.run([Request(p, Sampling(temperature=0.0, max_new_tokens=16)) for p in prompts])
    for prompt, result in zip(prompts, results, strict=True):
        with torch.inference_mode():
            expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :]
        assert list(result.generations[0].tokens) == expected.tolist()


def test_mismatch_over_ten_thousand_tokens_is_rounding_alone():
    model, worst, total, count = small_model(seed=1), 0.0, 0.0, 0
    engine = engine_of(model, max_running=48, burst=3, prefill_tokens=200)
    for temperature in (1.0, 0.6):
        sampling = Sampling(temperature=temperature, max_new_tokens=70)
        for result in engine.run([Request(prompt_of(1 + i % 20, i), sampling, n=2) for i in range(40)]):
            for index, generation in enumerate(result.generations):
                gap = (torch.tensor(generation.logprobs) - scored(model, result, index, temperature)).abs()
                worst, total, count = max(worst, gap.max().item()), total + gap.sum().item(), count + len(gap)
    print(f"mismatch over {count} tokens: max {worst:.2e}, mean {total / count:.2e}")
    assert count > 10_000
    assert worst <= 1e-4
    assert total / count <= 1e-6


def test_seed_same_gives_same_tokens_and_samples_of_a_group_differ():
    request = Request(prompt_of(5), Sampling(seed=3, max_new_tokens=12), n=4)
    first, second = engine_of().run([request]), engine_of().run([request])
    assert first[0].generations == second[0].generations
    assert len({generation.tokens for generation in first[0].generations}) == 4
    other = engine_of().run([Request(request.prompt, Sampling(seed=4, max_new_tokens=12))])
    assert other[0].generations[0].tokens != first[0].generations[0].tokens


def test_seed_samples_of_a_smaller_group_are_the_first_of_a_larger_one():
    small, large = (
        engine_of().run([Request(prompt_of(5), Sampling(seed=3, max_new_tokens=12), n=n)])[0] for n in (2, 5)
    )
    assert small.generations == large.generations[:2]


def test_seed_missing_gives_different_tokens_each_time():
    request = Request(prompt_of(5), Sampling(max_new_tokens=12))
    engine = engine_of()
    assert engine.run([request])[0].generations != engine.run([request])[0].generations


def test_group_prompt_is_computed_once_and_shared_by_equal_prompts():
    engine = engine_of()
    engine.run([Request(prompt_of(21), Sampling(max_new_tokens=5), n=6), Request(prompt_of(21), n=2)])
    metrics = engine.metrics()
    assert metrics["prefill_tokens"] == 20
    assert metrics["shared_tokens"] == 7 * 20


def test_group_larger_than_the_slots_finishes_and_equals_one_with_room():
    request = Request(prompt_of(9), Sampling(seed=1, max_new_tokens=8), n=11)
    tight, roomy = engine_of(max_running=3), engine_of()
    assert tight.run([request])[0].generations == roomy.run([request])[0].generations


def test_kv_budget_of_one_sequence_still_finishes_everything():
    one = 2 * 2 * 2 * pages_for(CONTEXT) * PAGE * 8 * 4  # keys and values, layers, heads, positions, dim, bytes
    engine = engine_of(kv_bytes=one + 100)
    assert engine.metrics()["pages"] == pages_for(CONTEXT)
    requests = [Request(prompt_of(3 + i, i), Sampling(seed=i, max_new_tokens=6)) for i in range(5)]
    assert [r.generations for r in engine.run(requests)] == [r.generations for r in engine_of().run(requests)]
    with pytest.raises(UsageError, match="a sequence of 96 tokens needs"):
        engine_of(kv_bytes=one - 1)


def test_length_limits_of_request_and_context_end_a_generation():
    engine = engine_of()
    short, long = engine.run(
        [Request(prompt_of(4), Sampling(max_new_tokens=7)), Request(prompt_of(90), Sampling(max_new_tokens=50))]
    )
    assert len(short.generations[0].tokens) == 7
    assert len(long.generations[0].tokens) == CONTEXT - 90
    assert short.generations[0].stop_reason == long.generations[0].stop_reason == StopReason.LENGTH
    (last,) = engine.run([Request(prompt_of(CONTEXT - 1))])
    assert len(last.generations[0].tokens) == 1


def end_of(engine, request):
    """A token of the request's generation to end with, and the tokens up to and with its first occurrence."""
    tokens = engine.run([request])[0].generations[0].tokens
    return tokens[9], tokens[: tokens.index(tokens[9]) + 1]


def test_eos_drawn_is_kept_as_the_last_token():
    request = Request(prompt_of(6), Sampling(seed=2, max_new_tokens=30))
    token, expected = end_of(engine_of(), request)
    found = engine_of(eos=frozenset({token})).run([request])[0].generations[0]
    assert found.tokens == expected
    assert len(found.logprobs) == len(found.versions) == len(expected)
    assert (found.stop_reason, found.stop_match) == (StopReason.EOS, token)


@pytest.mark.parametrize("burst", [1, 3, 8])
def test_stop_id_drawn_in_a_burst_of_any_length_ends_there(burst):
    plain = Sampling(seed=2, max_new_tokens=30)
    token, expected = end_of(engine_of(), Request(prompt_of(6), plain))
    sampling = Sampling(seed=2, max_new_tokens=30, stop_ids=(token,), ignore_eos=True)
    engine = engine_of(eos=frozenset({expected[0]}), burst=burst)
    found = engine.run([Request(prompt_of(6), sampling)])[0].generations[0]
    assert found.tokens == expected  # the model's own end token comes first and is ignored
    assert (found.stop_reason, found.stop_match) == (StopReason.STOP, token)


def test_min_new_tokens_holds_end_tokens_back_and_reports_what_was_drawn_from():
    model, minimum = small_model(), 12
    eos = frozenset(range(0, VOCAB, 2))
    engine = engine_of(model, eos=frozenset(sorted(eos)[:16]))
    sampling = Sampling(seed=5, max_new_tokens=30, min_new_tokens=minimum)
    (result,) = engine.run([Request(prompt_of(6), sampling, n=8)])
    for index, generation in enumerate(result.generations):
        assert len(generation.tokens) >= minimum
        assert not set(generation.tokens[: minimum - 1]) & engine.eos
        raw = scored(model, result, index)
        # Renormalized over fewer tokens: likelier than by the whole distribution, and equal after the minimum.
        assert (torch.tensor(generation.logprobs)[: minimum - 1] > raw[: minimum - 1] - 1e-5).all()
        torch.testing.assert_close(torch.tensor(generation.logprobs)[minimum:], raw[minimum:], rtol=0, atol=1e-4)


def test_alternatives_asked_for_begin_with_the_likeliest_and_fit_the_logprob():
    engine = engine_of()
    (result,) = engine.run([Request(prompt_of(6), Sampling(seed=1, max_new_tokens=10, logprobs=5))])
    generation = result.generations[0]
    assert len(generation.top) == 10
    for token, logprob, top in zip(generation.tokens, generation.logprobs, generation.top, strict=True):
        assert len(top) == 5
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
    mixed = engine.run(
        [
            Request(prompt_of(6), Sampling(seed=1, max_new_tokens=4, logprobs=2)),
            Request(prompt_of(3), Sampling(max_new_tokens=3)),
        ]
    )
    assert [len(top) for top in mixed[0].generations[0].top] == [2] * 4
    assert mixed[1].generations[0].top == ()
    (narrow,) = engine.run([Request(prompt_of(6), Sampling(top_k=2, max_new_tokens=4, logprobs=5))])
    assert [len(top) for top in narrow.generations[0].top] == [2] * 4


def test_alternatives_more_than_the_vocabulary_are_all_of_it():
    engine = engine_of(small_model(vocab=12))
    (result,) = engine.run([Request((1, 2), Sampling(seed=1, max_new_tokens=3, logprobs=20))])
    for top in result.generations[0].top:
        assert sorted(token for token, _ in top) == list(range(12))


@pytest.mark.parametrize("extreme", [{"temperature": 1e-4}, {"temperature": 1e4}, {"top_p": 1e-6}])
def test_sampling_at_the_bounds_draws_and_reports_numbers(extreme):
    (result,) = engine_of().run([Request(prompt_of(6), Sampling(seed=1, max_new_tokens=20, **extreme), n=3)])
    for generation in result.generations:
        assert all(-20 < logprob <= 1e-6 for logprob in generation.logprobs)


def test_min_new_tokens_beyond_the_limit_is_the_limit():
    sampling = Sampling(seed=1, max_new_tokens=9, min_new_tokens=2**70)
    (result,) = engine_of(eos=frozenset(range(10))).run([Request(prompt_of(6), sampling)])
    assert result.generations[0].stop_reason == StopReason.LENGTH
    assert len(result.generations[0].tokens) == 9


def test_text_of_a_result_is_that_of_its_tokens():
    tokenizer = small_tokenizer()
    engine = engine_of(tokenizer=tokenizer)
    prompt = tuple(tokenizer.encode("Once upon a time"))
    (result,) = engine.run([Request(prompt, Sampling(seed=1, max_new_tokens=20))])
    assert result.generations[0].text == tokenizer.decode(result.generations[0].tokens)
    assert engine_of().run([Request(prompt, Sampling(max_new_tokens=2))])[0].generations[0].text is None


def test_publish_between_bursts_stamps_versions_and_uses_the_new_weights():
    old, new = small_model(0), small_model(1)
    for keep_cache in (True, False):
        engine = engine_of(old, burst=2)
        listener = Listener()
        engine.submit(Request(prompt_of(6), Sampling(seed=1, max_new_tokens=10)), listener)
        for _ in range(2):
            engine.burst()
        engine.publish(new.state_dict(), 7, keep_cache=keep_cache)
        while listener.result is None:
            engine.burst()
        generation = listener.result.generations[0]
        assert generation.versions == (0,) * 4 + (7,) * 6
        by_old, by_new = (scored(model, listener.result) for model in (old, new))
        logprobs = torch.tensor(generation.logprobs)
        torch.testing.assert_close(logprobs[:4], by_old[:4], rtol=0, atol=1e-4)
        if keep_cache:
            assert (logprobs[4:] - by_new[4:]).abs().max() > 1e-3  # the old weights' keys are still read
        else:
            torch.testing.assert_close(logprobs[4:], by_new[4:], rtol=0, atol=1e-4)
        assert engine.metrics()["version"] == 7


def test_publish_of_the_same_weights_without_caches_changes_no_token():
    model = small_model()
    request = Request(prompt_of(6), Sampling(seed=1, max_new_tokens=20))
    engine, listener = engine_of(model, burst=2), Listener()
    engine.submit(request, listener)
    for version in range(1, 5):
        engine.burst()
        engine.publish(model.state_dict(), version, keep_cache=False)
    while listener.result is None:
        engine.burst()
    (expected,) = engine_of(model).run([request])
    assert listener.result.generations[0].tokens == expected.generations[0].tokens
    assert listener.result.generations[0].logprobs == pytest.approx(expected.generations[0].logprobs, abs=1e-4)


def test_rows_that_move_when_others_end_go_on_where_they_were():
    engine = engine_of(max_running=5, burst=3)
    requests = [Request(prompt_of(4 + i, i), Sampling(seed=i, max_new_tokens=1 + 7 * i % 23)) for i in range(12)]
    for request, result in zip(requests, engine.run(requests), strict=True):
        assert result.generations == engine_of().run([request])[0].generations


def test_publish_with_caches_kept_lets_no_new_request_share_old_keys():
    old, new = small_model(0), small_model(1)
    engine, first = engine_of(old, burst=1), Listener()
    engine.submit(Request(prompt_of(12), Sampling(seed=1, max_new_tokens=40)), first)
    engine.burst()
    engine.publish(new.state_dict(), 1, keep_cache=True)
    (result,) = engine.run([Request(prompt_of(12), Sampling(seed=2, max_new_tokens=5))])
    logprobs = torch.tensor(result.generations[0].logprobs)
    torch.testing.assert_close(logprobs, scored(new, result), rtol=0, atol=1e-4)


def test_publish_in_the_middle_of_a_long_prompt_without_caches_starts_it_again():
    old, new = small_model(0, context=800), small_model(1, context=800)
    engine, listener = engine_of(old, prefill_tokens=256), Listener()
    engine.submit(Request(prompt_of(700), Sampling(seed=1, max_new_tokens=5), n=2), listener)
    engine.burst()
    engine.publish(new.state_dict(), 1, keep_cache=False)
    while listener.result is None:
        engine.burst()
    for index, generation in enumerate(listener.result.generations):
        assert generation.versions == (1,) * 5
        gap = torch.tensor(generation.logprobs) - scored(new, listener.result, index)
        assert gap.abs().max() < 1e-4


def test_weights_that_are_not_finite_in_the_engines_precision_are_refused():
    weights = {**small_model().state_dict(), "norm.weight": torch.full((32,), 1e6)}
    engine_of().publish(weights, 1)
    with pytest.raises(UsageError, match=r"norm\.weight .*not finite in torch\.float16"):
        engine_of(dtype=torch.float16).publish(weights, 1)


def test_weights_that_overflow_end_the_engine_with_a_message():
    engine, waiting = engine_of(), Listener()
    engine.publish(overflowing(small_model()), 3)
    engine.submit(Request(prompt_of(4)), waiting)
    with pytest.raises(PalestraError, match="non-finite log-probabilities with weights version 3"):
        engine.burst()
    assert isinstance(waiting.error, EngineFailed)
    assert waiting.error.__cause__ is engine.failure


def test_failure_told_many_times_is_a_new_error_each_time():
    engine = engine_of()
    engine.publish(overflowing(small_model()), 3)
    with pytest.raises(PalestraError, match="version 3"):
        engine.run([Request(prompt_of(4))])
    before, told = traceback.extract_tb(engine.failure.__traceback__), []
    for call in (lambda: engine.submit(Request(prompt_of(4)), Listener()), engine.burst) * 2:
        with pytest.raises(EngineFailed, match="version 3") as caught:
            call()
        told.append(caught.value)
    assert len(set(map(id, told))) == 4
    assert traceback.extract_tb(engine.failure.__traceback__) == before


class Interrupts(Listener):
    """Someone presses Ctrl-C while its chunk is delivered."""

    def put(self, item):
        if isinstance(item, Chunk):
            raise KeyboardInterrupt
        super().put(item)


def test_burst_interrupted_ends_what_is_at_work_and_not_the_engine():
    engine, other = engine_of(max_running=3, burst=2), Listener()
    engine.submit(Request(prompt_of(5), Sampling(max_new_tokens=50), n=2), other)
    engine.burst()
    engine.submit(Request(prompt_of(6), Sampling(max_new_tokens=50), n=2), Interrupts(streams=True))
    with pytest.raises(KeyboardInterrupt):
        engine.burst()
    assert engine.failure is None
    assert isinstance(other.error, PalestraError)
    metrics = engine.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["requests"], metrics["free_slots"]) == (0, 0, 0, 3)
    request = Request(prompt_of(9), Sampling(seed=1, max_new_tokens=8), n=5)
    assert engine.run([request])[0].generations == engine_of().run([request])[0].generations


def test_run_that_raises_leaves_no_request_behind():
    def left(engine, requests, error, message):
        with pytest.raises(error, match=message):
            engine.run(requests)
        metrics = engine.metrics()
        assert engine.failure is None
        return metrics["running"], metrics["waiting"], metrics["requests"]

    good, bad = Request(prompt_of(5), Sampling(seed=1, max_new_tokens=50), n=2), Request((VOCAB,))
    engine = engine_of(max_waiting=2, max_running=1)
    assert left(engine, [good, bad], UsageError, "vocabulary") == (0, 0, 0)
    engine.pause()
    assert left(engine, [good], PalestraError, "paused") == (0, 0, 0)
    engine.resume()
    engine.submit(Request(prompt_of(4)), Interrupts(streams=True))
    assert left(engine, [good], KeyboardInterrupt, None) == (0, 0, 0)
    other = Listener()
    engine.submit(Request(prompt_of(3), Sampling(seed=1, max_new_tokens=4)), other)
    assert left(engine, [good, good], QueueFull, "2 waiting requests") == (0, 1, 1)
    assert engine.run([good])[0].generations == engine_of().run([good])[0].generations
    assert len(other.result.generations[0].tokens) == 4


def test_trained_weights_changed_later_do_not_reach_the_engine():
    model = small_model()
    engine = engine_of(model)
    request = Request(prompt_of(6), Sampling(seed=1, max_new_tokens=6))
    before = engine.run([request])[0].generations
    for parameter in model.parameters():
        parameter.zero_()
    assert engine.run([request])[0].generations == before


def test_stream_gets_token_by_token_with_its_text():
    engine, listener, other = engine_of(tokenizer=small_tokenizer()), Listener(streams=True), Listener()
    engine.submit(Request(prompt_of(6), Sampling(seed=1, max_new_tokens=12)), listener)
    engine.submit(Request(prompt_of(6), Sampling(seed=1, max_new_tokens=12)), other)
    while other.result is None or listener.result is None:
        engine.burst()
    (whole,) = other.result.generations
    assert [chunk.tokens for chunk in listener.chunks] == [(token,) for token in whole.tokens]
    assert [chunk.logprobs for chunk in listener.chunks] == [(value,) for value in whole.logprobs]
    assert "".join(chunk.text for chunk in listener.chunks) == whole.text


def test_abort_mid_way_gives_what_there_is_and_frees_the_slots():
    engine, listener, other = engine_of(max_running=4, burst=2), Listener(streams=True), Listener()
    id = engine.submit(Request(prompt_of(6), Sampling(seed=1, max_new_tokens=50), n=3), listener)
    other_id = engine.submit(Request(prompt_of(5), Sampling(seed=1, max_new_tokens=20), n=8, id="mine"), other)
    assert other_id == "mine"
    for _ in range(3):
        engine.burst()
    assert engine.metrics()["running"] == 4
    engine.abort(id)
    engine.abort("nobody's")
    engine.burst()
    assert [g.stop_reason for g in listener.result.generations] == [StopReason.ABORT] * 3
    for index, generation in enumerate(listener.result.generations):
        assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions) == 3
        sent = [token for chunk in listener.chunks if chunk.index == index for token in chunk.tokens]
        assert tuple(sent) == generation.tokens
        assert [c.stop_reason for c in listener.chunks if c.index == index][-1] == StopReason.ABORT
    engine.abort("mine")
    engine.burst()
    assert [len(g.tokens) > 0 for g in other.result.generations][-1] is False  # some never had a slot
    assert {g.stop_reason for g in other.result.generations} == {StopReason.ABORT}
    metrics = engine.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["requests"], metrics["free_slots"]) == (0, 0, 0, 4)
    expected = engine_of().run([Request(prompt_of(6), Sampling(seed=1, max_new_tokens=50), n=3)])[0]
    for aborted, whole in zip(listener.result.generations, expected.generations, strict=True):
        assert aborted.tokens == whole.tokens[: len(aborted.tokens)]


def test_abort_while_a_long_prompt_is_computed_leaves_the_next_whole():
    engine = engine_of(small_model(context=1200), prefill_tokens=256)
    first, second = Listener(), Listener()
    request = Request(prompt_of(1000), Sampling(seed=1, max_new_tokens=6), n=2)
    id = engine.submit(request, first)
    engine.submit(request, second)
    engine.burst()
    assert engine.metrics()["prefill_tokens"] == 256
    engine.abort(id)
    while second.result is None:
        engine.burst()
    (alone,) = engine_of(small_model(context=1200)).run([request])
    assert second.result.generations == alone.generations
    assert [g.tokens for g in first.result.generations] == [(), ()]
    assert engine.metrics()["prefill_tokens"] == 999  # the pages that were complete serve the second request


def test_pause_keeps_requests_where_they_are_until_resume():
    engine, listener = engine_of(burst=1), Listener(streams=True)
    engine.submit(Request(prompt_of(6), Sampling(seed=1, max_new_tokens=5)), listener)
    engine.burst()
    engine.pause()
    before = len(listener.chunks)
    assert engine.burst() is False
    assert len(listener.chunks) == before
    with pytest.raises(PalestraError, match="paused"):
        engine.run([Request(prompt_of(3))])
    engine.resume()
    while engine.burst():
        pass
    assert len(listener.result.generations[0].tokens) == 5


def test_burst_without_anything_to_do_says_so():
    engine = engine_of()
    assert engine.burst() is False
    engine.run([Request(prompt_of(3), Sampling(max_new_tokens=2))])
    assert engine.burst() is False


def test_requests_that_cannot_be_done_are_refused_by_name():
    engine = engine_of(max_waiting=2, eos=frozenset(range(10)))

    def submit(prompt=(1, 2), n=1, id=None, **sampling):
        engine.submit(Request(prompt, Sampling(**sampling), n=n, id=id), Listener())

    with pytest.raises(PromptTooLong, match="96 tokens, but prompt and completion share a context of 96"):
        submit(prompt_of(CONTEXT))
    for wrong, message in (
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, VOCAB)}, f"token {VOCAB} is not in the model's vocabulary"),
        ({"prompt": (-1,)}, "token -1"),
        ({"stop_ids": (999,)}, "token 999"),
        ({"n": 0}, "n = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": 1e300}, "temperature = 1e[+]300: expected 0, or 0.0001 to 10000"),
        ({"temperature": 1e-39}, "temperature = 1e-39"),
        ({"temperature": 1e-46}, "temperature = 1e-46"),
        ({"top_p": 1e-60}, "top_p = 1e-60: expected 1e-06 to 1"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"min_new_tokens": -1}, "min_new_tokens = -1"),
        ({"logprobs": 21}, "logprobs = 21: expected 0 to 20"),
        ({"stop": ("x",)}, "stop strings need a tokenizer"),
        ({"stop": ("x", "")}, "stop string is empty"),
        ({"stop": ("x",) * 17}, "17 stop strings: expected at most 16"),
        ({"stop": ("x\ud800",)}, "a stop string is not valid Unicode: character 1 is half a surrogate pair"),
        ({"stop": ("x" * 1001,)}, "stop string has 1001 characters: expected at most 1000"),
        ({"stop_ids": tuple(range(20, 30))}, "20 end tokens: expected at most 16"),
    ):
        with pytest.raises(UsageError, match=message):
            submit(**wrong)
    submit(id="a")
    with pytest.raises(UsageError, match="'a' is already in flight"):
        submit(id="a")
    submit()
    with pytest.raises(QueueFull, match="2 waiting requests"):
        submit()
    while engine.burst():
        pass
    submit(id="a")


def test_run_of_more_requests_than_may_wait_finishes_all_in_order():
    engine = engine_of(max_waiting=3, max_running=2)
    requests = [Request(prompt_of(2 + i % 7, i), Sampling(seed=i, max_new_tokens=3)) for i in range(10)]
    assert [r.prompt for r in engine.run(requests)] == [request.prompt for request in requests]
