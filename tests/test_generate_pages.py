"""Pages of the cache: who has them, what is shared between requests, and what happens when they run out."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_lm import small_model
from test_generate_engine import Listener, engine_of, prompt_of, scored
from test_generate_scheduler import check_rows

from palestra.generate.engine.pages import PAGE, PagePool, pages_for
from palestra.generate.types import Request, Sampling

WORDS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4)
"""Pages that repeat one token."""


def tokens_of(words):
    return tuple(word for word in words for _ in range(PAGE))


@given(sequences=st.lists(st.tuples(WORDS, st.booleans()), min_size=1, max_size=25), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_pool_matches_exactly_the_prefixes_it_remembers(sequences, seed):
    """Beside a plain dictionary of prefixes, while sequences come and go and pages run short."""
    pool, choose, running = PagePool(12), random.Random(seed), []
    contents: dict[int, tuple[int, ...]] = {}
    for words, forget in sequences:
        while pool.available < len(words) and running:
            pool.release(running.pop(choose.randrange(len(running))))
        if pool.available < len(words):
            continue
        tokens = tokens_of(words)
        shared = pool.match(tokens, len(tokens))
        for place, page in enumerate(shared):
            assert contents[page] == tokens[: (place + 1) * PAGE]  # all before it too, not only its own
        pool.share(shared)
        if len(words) - len(shared) > pool.available:
            pool.release(shared)
            continue
        pages = [*shared, *pool.take(len(words) - len(shared))]
        for place, page in enumerate(pages[len(shared) :], start=len(shared)):
            contents[page] = tokens[: (place + 1) * PAGE]
        pool.remember(pages, tokens, len(tokens))
        assert pool.match(tokens, len(tokens)) == pages
        assert pool.match(tokens, len(tokens) - 1) == pages[:-1]
        running.append(pages)
        if forget:
            pool.forget()
            assert pool.match(tokens, len(tokens)) == []
    for pages in running:
        pool.release(pages)
    assert pool.available == pool.size == 11


def test_pool_forgets_the_longest_unused_first_and_of_a_sequence_its_end():
    pool = PagePool(5)
    for word in (0, 1):
        pages = pool.take(2)
        pool.remember(pages, tokens_of([word, 9]), 2 * PAGE)
        pool.release(pages)
    pool.take(1)
    assert len(pool.match(tokens_of([0, 9]), 64)) == 1
    assert len(pool.match(tokens_of([1, 9]), 64)) == 2
    few = PagePool(9, most_idle=1)
    pages = few.take(3)
    few.remember(pages, tokens_of([1, 2, 3]), 3 * PAGE)
    few.release(pages)
    assert few.match(tokens_of([1, 2, 3]), 96) == pages[:1]
    assert few.available == 8


def test_prompts_that_begin_alike_are_computed_once():
    engine, start = engine_of(small_model(context=512)), prompt_of(200)
    engine.run([Request((*start, 5, 6, 7), Sampling(max_new_tokens=4))])
    assert (engine.metrics()["prefill_tokens"], engine.metrics()["shared_tokens"]) == (202, 0)
    engine.run([Request((*start, *prompt_of(30, i)), Sampling(max_new_tokens=4)) for i in range(5)])
    whole = 200 // PAGE * PAGE
    assert engine.metrics()["shared_tokens"] == 5 * whole
    assert engine.metrics()["prefill_tokens"] == 202 + 5 * (229 - whole)
    # Also where all arrive at once, and nothing has been computed.
    fresh = engine_of(small_model(context=512))
    fresh.run([Request((*start, *prompt_of(30, i)), Sampling(max_new_tokens=4)) for i in range(5)])
    assert fresh.metrics()["prefill_tokens"] == 229 + 4 * (229 - whole)


@pytest.mark.parametrize("exact", [True, False])
def test_next_turn_of_a_conversation_finds_what_was_generated_unless_bits_count(exact):
    engine = engine_of(small_model(context=512), exact=exact)
    (first,) = engine.run([Request(prompt_of(40), Sampling(seed=1, max_new_tokens=70))])
    history = (*first.prompt, *first.generations[0].tokens)
    (second,) = engine.run([Request((*history, *prompt_of(10, 1)), Sampling(seed=2, max_new_tokens=20))])
    assert engine.metrics()["shared_tokens"] == (32 if exact else 96)
    gap = torch.tensor(second.generations[0].logprobs) - scored(small_model(context=512), second)
    assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_no_request_finds_keys_of_older_weights(keep_cache, exact):
    """Neither those of prompts that have ended, nor of those at work, nor what ends after the publication."""
    old, new = small_model(0, context=512), small_model(1, context=512)
    engine, running = engine_of(old, burst=4, exact=exact), Listener()
    prompt = prompt_of(130)
    engine.run([Request(prompt, Sampling(seed=0, max_new_tokens=4))])
    engine.submit(Request(prompt, Sampling(seed=1, max_new_tokens=30)), running)
    engine.burst()
    engine.publish(new.state_dict(), 1, keep_cache=keep_cache)
    requests = [Request((*prompt, *prompt_of(i, i)), Sampling(seed=i, max_new_tokens=9)) for i in range(3)]
    for _ in range(2):
        for result in engine.run(requests):
            gap = torch.tensor(result.generations[0].logprobs) - scored(new, result)
            assert gap.abs().max() < 1e-4
    while running.result is None:
        engine.burst()
    (later,) = engine.run([Request((*prompt, *running.result.generations[0].tokens), Sampling(max_new_tokens=9))])
    assert (torch.tensor(later.generations[0].logprobs) - scored(new, later)).abs().max() < 1e-4


def test_pages_that_run_out_are_given_back_and_computed_again():
    model = small_model(context=256)
    room = 2 * 2 * 2 * PAGE * 8 * 4 * 20
    requests = [Request(prompt_of(10 + i, i), Sampling(seed=i, max_new_tokens=150), n=2) for i in range(8)]
    tight, roomy = engine_of(model, kv_bytes=room, exact=False), engine_of(model)
    listeners = [Listener(streams=True) for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        tight.submit(request, listener)
    most = 0
    while tight.burst():
        check_rows(tight)
        most = max(most, tight.metrics()["running"])
    assert tight.metrics()["preemptions"] > 0
    assert most > 20 // pages_for(180)  # more than where each keeps the pages of all it may generate
    for result, listener in zip(roomy.run(requests), listeners, strict=True):
        for expected, found in zip(result.generations, listener.result.generations, strict=True):
            assert found.tokens == expected.tokens
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        for index in range(2):
            streamed = [token for chunk in listener.chunks if chunk.index == index for token in chunk.tokens]
            assert tuple(streamed) == listener.result.generations[index].tokens


def test_exact_engine_never_gives_pages_back_and_has_the_same_bits():
    model = small_model(context=256)
    requests = [Request(prompt_of(10 + i, i), Sampling(seed=i, max_new_tokens=150), n=2) for i in range(8)]
    tight, roomy = engine_of(model, kv_bytes=2 * 2 * 2 * PAGE * 8 * 4 * 20), engine_of(model)
    assert [r.generations for r in tight.run(requests)] == [r.generations for r in roomy.run(requests)]
    assert tight.metrics()["preemptions"] == 0


def test_abort_of_a_request_that_waits_for_pages_again_delivers_what_it_has():
    engine = engine_of(small_model(context=256), kv_bytes=2 * 2 * 2 * PAGE * 8 * 4 * 12, exact=False)
    listeners = {}
    for i in range(6):
        listener = Listener()
        listeners[engine.submit(Request(prompt_of(10, i), Sampling(max_new_tokens=200)), listener)] = listener
    while not engine._scheduler.preempted:
        engine.burst()
    job = engine._scheduler.preempted[0].job
    engine.abort(job.id)
    engine.burst()
    assert len(listeners[job.id].result.generations[0].tokens) > 0
    while engine.burst():
        check_rows(engine)
    assert all(listener.result is not None for listener in listeners.values())
    assert engine.metrics()["requests"] == engine.metrics()["waiting"] == 0


@pytest.mark.parametrize("exact", [True, False])
def test_beginning_that_others_share_is_computed_once_also_where_the_first_is_aborted(exact):
    model, prompt = small_model(context=600), prompt_of(400)
    engine, listeners = engine_of(model, prefill_tokens=100, exact=exact), [Listener() for _ in range(3)]
    id = engine.submit(Request(prompt, Sampling(max_new_tokens=5)), Listener())
    engine.burst()  # 128 tokens
    asked = [Request((*prompt[: 390 - 100 * i], *prompt_of(30, i)), Sampling(seed=i, max_new_tokens=5)) for i in (0, 1)]
    for request, listener in zip([*asked, asked[0]], listeners, strict=True):
        engine.submit(request, listener)
    engine._take_in()
    engine._scheduler.admit(10**6)
    engine.abort(id)
    while engine.burst():
        check_rows(engine)
    whole, half = 390 // PAGE * PAGE, 290 // PAGE * PAGE
    assert engine.metrics()["prefill_tokens"] == 419 + 319 - half
    before = engine.metrics()["prefill_tokens"]
    (later,) = engine.run([Request((*prompt[:390], 5, 6), Sampling(seed=2, max_new_tokens=5))])
    assert engine.metrics()["prefill_tokens"] - before == 391 - whole
    for request, found in zip([*asked, asked[0], Request(later.prompt, Sampling(seed=2, max_new_tokens=5))],
                              [*(listener.result for listener in listeners), later], strict=True):  # fmt: skip
        assert found.generations == engine_of(model).run([request])[0].generations


def test_one_that_shares_a_prompt_that_is_aborted_computes_the_rest_itself():
    model = small_model(context=600)
    engine, first, second = engine_of(model, prefill_tokens=300), Listener(), Listener()
    prompt = prompt_of(400)
    id = engine.submit(Request(prompt, Sampling(seed=1, max_new_tokens=5)), first)
    engine.submit(Request(prompt_of(20, 3), Sampling(seed=1, max_new_tokens=50)), Listener())
    engine.burst()  # 320 tokens of the first prompt; the others are not admitted yet, or wait
    shared = Request((*prompt[:390], 5, 6), Sampling(seed=2, max_new_tokens=5))
    engine.submit(shared, second)
    engine._take_in()
    engine._scheduler.admit(10**6)
    check_rows(engine)
    engine.abort(id)
    while second.result is None:
        engine.burst()
        check_rows(engine)
    (alone,) = engine_of(model).run([shared])
    assert second.result.generations == alone.generations
