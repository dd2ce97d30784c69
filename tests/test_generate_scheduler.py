import random
import sys
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_lm import small_model
from test_generate_engine import Listener, engine_of, prompt_of

from palestra.generate.engine.batch import PATIENCE, TURN, BatchRows
from palestra.generate.engine.pages import PAGE, pages_for
from palestra.generate.types import Request, Sampling, StopReason


def check_rows(engine):
    """Running samples fill the first rows, each its own; what the device would see agrees."""
    rows, host = engine._scheduler.rows, engine._runner.host
    assert [sample.row for sample in rows] == list(range(len(rows)))
    assert len(rows) <= engine.slots
    assert len({(sample.job.id, sample.index) for sample in rows}) == len(rows)
    assert host.active[len(rows) :].sum() == 0
    assert host.tables[len(rows) :].sum() == 0
    for sample in rows:
        if sample.ahead:  # the device is further than the host has seen
            assert host.length[sample.row] >= sample.due
            continue
        assert bool(host.active[sample.row]) == sample.active
        table = host.tables[sample.row].tolist()
        if sample.active:
            assert sample.cached == sample.due == host.length[sample.row]
            assert host.token[sample.row] == sample.sequence[sample.due]
            assert host.remaining[sample.row] == sample.remaining
            assert table == sample.pages + [0] * (len(table) - len(sample.pages))
        else:
            assert not any(table)
    check_pages(engine)


def check_pages(engine):
    """A page belongs to those who have it and no other; what a sequence still writes to is its own."""
    scheduler = engine._scheduler
    pool, owners = scheduler.pool, Counter(page for sample in scheduler.rows for page in sample.pages)
    assert all(pool._users[page] == count for page, count in owners.items())
    held, free, idle = set(owners), set(pool._free), set(pool._idle)
    assert sum(pool._users) == owners.total()
    assert len(held) + len(free) + len(idle) == pool.size == len(held | free | idle)
    assert 0 not in held | free | idle
    assert {page for page in pool._keys if page not in held} == idle
    assert set(pool._known.values()) == set(pool._keys)
    assert scheduler._computing <= held
    for sample in scheduler.rows:
        assert len(set(sample.pages)) == len(sample.pages) >= pages_for(sample.due)
        assert all(owners[page] == 1 for page in sample.pages[sample.due // PAGE :])
    assert all(not sample.pages and sample.row == -1 for sample in scheduler.preempted)


@given(seed=st.integers(0, 10**6))
@example(seed=52391)  # pages ran out while a burst was in flight
@settings(max_examples=10, deadline=None)
def test_slots_any_order_of_submits_aborts_bursts_and_publications_never_leak_or_overlap(seed):
    choose = random.Random(seed)
    model = small_model(layers=1, width=16, heads=2, kv_heads=1, mlp=16, context=160)
    most = pages_for(model.shape.context)
    engine = engine_of(
        model,
        max_running=choose.randint(1, 6),
        burst=choose.randint(1, 40),
        prefill_tokens=choose.choice([1, 20, 300]),
        eos=frozenset(range(4)),
        exact=choose.random() < 0.5,
        kv_bytes=2 * PAGE * 8 * 4 * choose.randint(most, 3 * most),
    )
    engine._runner.ahead = choose.random() < 0.5
    engine._runner.portion = (sys.maxsize, 30, 100)[seed % 3]
    listeners = {}
    for step in range(30):
        match choose.choice(["submit", "submit", "burst", "burst", "burst", "abort", "publish"]):
            case "submit":
                sampling = Sampling(seed=step, max_new_tokens=choose.randint(1, 60))
                shared = prompt_of(choose.randint(1, 70), choose.randint(0, 1))
                prompt = (*shared, *prompt_of(choose.randint(1, 60), choose.randint(0, 3)))
                request = Request(prompt, sampling, choose.randint(1, 5))
                listener = Listener(streams=choose.random() < 0.5)
                listeners[engine.submit(request, listener)] = (request, listener)
            case "abort" if listeners:
                engine.abort(choose.choice(list(listeners)))
            case "publish":
                engine.publish(model.state_dict(), step, keep_cache=choose.random() < 0.5)
            case _:
                engine.burst()
        check_rows(engine)
    while engine.burst():
        check_rows(engine)
    metrics = engine.metrics()
    assert (metrics["running"], metrics["waiting"], metrics["requests"]) == (0, 0, 0)
    for request, listener in listeners.values():
        assert len(listener.result.generations) == request.n
        for index, generation in enumerate(listener.result.generations):
            assert len(generation.tokens) == len(generation.logprobs) == len(generation.versions)
            assert list(generation.versions) == sorted(generation.versions)
            if listener.streams:
                chunks = [chunk for chunk in listener.chunks if chunk.index == index]
                assert tuple(token for chunk in chunks for token in chunk.tokens) == generation.tokens
                assert tuple(value for chunk in chunks for value in chunk.logprobs) == generation.logprobs
                assert [c.stop_reason for c in chunks] == [None] * (len(chunks) - 1) + [generation.stop_reason]


@pytest.mark.parametrize(("exact", "room"), [(True, None), (False, 10)])
def test_burst_started_before_the_last_is_read_changes_no_token(exact, room):
    model = small_model(context=256)
    kv_bytes = None if room is None else 2 * 2 * 2 * PAGE * 8 * 4 * room
    asked = [Request(prompt_of(5 + i, i), Sampling(seed=i, max_new_tokens=5 + 12 * i), n=2) for i in range(12)]
    found = []
    for ahead in (False, True):
        engine = engine_of(model, max_running=7, burst=4, exact=exact, kv_bytes=kv_bytes, eos=frozenset({3}))
        engine._runner.ahead = ahead
        results = engine.run(asked)
        check_rows(engine)
        assert (engine.metrics()["preemptions"] > 0) == (room is not None)
        found.append([(g.tokens, g.stop_reason) for result in results for g in result.generations])
    assert found[0] == found[1]


def noting(events, name, method):
    """The method, each call of which leaves its name."""
    return lambda *what: (events.append(name), method(*what))[1]


@pytest.mark.parametrize("n", [1, 3])
def test_prompts_are_begun_while_others_are_admitted_and_no_token_changes(n, monkeypatch):
    model, found = small_model(context=256), []
    asked = [Request(prompt_of(40 + i % 3, i), Sampling(seed=i, max_new_tokens=12), n=n) for i in range(14)]
    for portion in (sys.maxsize, 100):
        engine, events = engine_of(model, max_running=14 * n, burst=4, eos=frozenset()), []
        runner = engine._runner
        runner.ahead, runner.portion = True, portion
        for owner, method in ((engine, "submit"), (runner, "prefill"), (runner, "start")):
            monkeypatch.setattr(owner, method, noting(events, method, getattr(owner, method)))
        found.append([(g.tokens, g.logprobs) for result in engine.run(asked) for g in result.generations])
        assert engine.metrics()["prefill_tokens"] == sum(len(request.prompt) - 1 for request in asked)
        first = events.index("start")
        assert (events[:first].count("submit"), "prefill" in events[first:], events.count("start")) == (14, False, 3)
        # A prompt of 39 to 41 tokens is a quarter of a portion, with which the device begins, and three are one; the
        # last one, alone, does not wait for others.
        assert [events[:first].count("prefill"), events.index("prefill")] == ([1, 14] if portion > 100 else [6, 1])
    assert found[0] == found[1]


@pytest.mark.parametrize(("ahead", "streams", "later", "bursts"), [
    (True, False, 1, PATIENCE + 1),  # few beside many wait for others, but not for ever
    (True, False, 3, 1),
    (True, True, 1, 1),
    (False, False, 1, 1),
])  # fmt: skip
def test_few_requests_beside_many_that_run_wait_for_others_where_prefills_are_launched(ahead, streams, later, bursts):
    engine = engine_of(small_model(context=256), max_running=16, burst=2, eos=frozenset())
    engine._runner.ahead = ahead
    engine.submit(Request(prompt_of(5, 0), Sampling(max_new_tokens=200), n=8), Listener())
    engine.burst()
    listener = Listener(streams=streams)
    asked = Request(prompt_of(6, 1), Sampling(seed=1, max_new_tokens=4), n=later)
    engine.submit(asked, listener)
    waited = 0
    while engine.metrics()["waiting"]:
        engine.burst()
        waited += 1
    assert waited == bursts
    while listener.result is None:
        engine.burst()
    (alone,) = engine_of(small_model(context=256), burst=2, eos=frozenset()).run([asked])
    assert [g.tokens for g in listener.result.generations] == [g.tokens for g in alone.generations]


def test_rows_go_on_from_where_the_device_left_them_and_those_of_the_host_begin():
    host, device = (BatchRows.empty(5, 64, torch.device("cpu")) for _ in range(2))
    host.stop_all()
    host.integers[:8, :4] = torch.arange(32).view(8, 4) + 100  # four rows start
    device.follow(host.integers)
    assert torch.equal(device.integers[:8, :4], host.integers[:8, :4])
    host.go_on()
    device.integers[:5, :4] += 1000  # a burst; meanwhile the host ends row 1, and another takes its place
    host.stop(3, 4, [(3, 1)])
    host.integers[5:8, 1] = 7
    left = device.integers.clone()
    device.follow(host.integers)
    assert torch.equal(device.integers[:5, [0, 1, 2]], left[:5, [0, 3, 2]])
    assert device.integers[5:8, 1].tolist() == [7, 7, 7]  # what steps do not change is the host's
    assert device.active[3:].tolist() == [0, 0]
    host.go_on()
    host.stop(1, 3, [(1, 0)])  # moved again, by the row it has had since
    left = device.integers.clone()
    device.follow(host.integers)
    assert torch.equal(device.integers[:5, 0], left[:5, 1])


def test_queue_is_first_come_first_served():
    engine, ended = engine_of(max_running=1), []
    for i in range(4):
        listener = Listener()
        listener.put = lambda item, i=i: ended.append(i)
        engine.submit(Request(prompt_of(3, i), Sampling(max_new_tokens=2)), listener)
    while engine.burst():
        pass
    assert ended == [0, 1, 2, 3]


def test_request_of_many_samples_lets_the_next_start_after_a_turn():
    engine, many, one = engine_of(max_running=4, burst=4), Listener(), Listener()
    engine.submit(Request(prompt_of(3), Sampling(max_new_tokens=4), n=200), many)
    engine.submit(Request(prompt_of(4), Sampling(max_new_tokens=4)), one)
    bursts = 0
    while one.result is None:
        engine.burst()
        bursts += 1
    assert bursts <= TURN // 4 + 1  # four samples end in each burst
    assert many.result is None
    while many.result is None:
        engine.burst()
    assert {g.stop_reason for g in many.result.generations} == {StopReason.LENGTH}


def test_group_of_usual_size_starts_before_later_requests():
    engine = engine_of(max_running=12)
    first = engine.submit(Request(prompt_of(3), n=8), Listener())
    engine.submit(Request(prompt_of(4), n=8), Listener())
    engine.burst()
    assert [sample.job.id for sample in engine._scheduler.rows].count(first) == 8


def test_long_prompts_do_not_stop_running_requests():
    engine = engine_of(small_model(context=3000), burst=1, prefill_tokens=256)
    running, long = Listener(streams=True), Listener()
    engine.submit(Request(prompt_of(4), Sampling(max_new_tokens=200)), running)
    engine.burst()
    engine.submit(Request(prompt_of(2000), Sampling(max_new_tokens=1)), long)
    bursts = 0
    while long.result is None:
        before = len(running.chunks)
        engine.burst()
        bursts += 1
        assert len(running.chunks) == before + 1
    assert bursts == 8  # 1,999 tokens of the prompt, 256 at a time, and the first token with the last of them


def test_requests_that_end_together_are_freed_together_and_cost_the_host_little(monkeypatch):
    """Python's own calls of the engine for one request more: they do not depend on the clock, or on the device."""
    stops, calls = [], Counter()
    stop = BatchRows.stop
    monkeypatch.setattr(BatchRows, "stop", lambda rows, *what: (stops.append(what), stop(rows, *what)))

    def note(frame, event, _):
        if event == "call" and "/generate/" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    totals = []
    for count in (20, 40):
        model = small_model(layers=1, width=16, heads=2, kv_heads=1, mlp=16, context=192)
        engine = engine_of(model, max_running=40, burst=16, exact=False, eos=frozenset())
        engine._runner.ahead = True
        asked = [Request(prompt_of(70, i), Sampling(seed=i, max_new_tokens=64)) for i in range(count)]
        engine.run(asked[:1])
        calls.clear(), stops.clear()
        sys.setprofile(note)
        try:
            engine.run(asked)
        finally:
            sys.setprofile(None)
        totals.append(calls.total())
        assert stops == [(0, count, [])]
    assert (totals[1] - totals[0]) / 20 < 205  # 194 with four bursts; 233 when rows were freed one by one
