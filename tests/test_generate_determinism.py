import random

import pytest
import torch
from conftest import BF16
from small_lm import small_model
from test_generate_engine import Listener, engine_of, prompt_of

from palestra.generate.types import Request, Sampling

# The widths of a real model: for small matrices every number of rows takes the same kernel.
REAL = {"width": 576, "heads": 9, "kv_heads": 3, "mlp": 1536, "vocab": 1024, "context": 640}
MOE = {"experts": 4, "active": 2, "mlp": 96}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def among_others(model, request, others, *, arrive=0, **settings):
    """The request's generations when other requests run, of which some arrive while it is at work."""
    engine, mine = engine_of(model, **settings), Listener()
    for other in others[arrive:]:
        engine.submit(other, Listener())
    engine.submit(request, mine)
    late = list(others[:arrive])
    while mine.result is None:
        engine.burst()
        if late:
            engine.submit(late.pop(), Listener())
    return mine.result.generations


def other_requests(count, longest, seed=0):
    choose = random.Random(seed)
    return [
        Request(
            prompt_of(choose.randint(1, longest), 100 + i),
            Sampling(seed=i, max_new_tokens=choose.randint(1, 8), top_p=choose.choice([1.0, 0.9]), logprobs=i % 2),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_tokens_and_logprobs_in_batches_of_1_7_and_64_are_the_same_bits(dtype, threads):
    model = small_model(deviation=0.05, dtype=dtype, **REAL)
    request = Request(prompt_of(40, 1), Sampling(seed=9, max_new_tokens=6), n=2)
    alone = among_others(model, request, [])
    assert len({generation.tokens for generation in alone}) == 2
    for others in (5, 62):
        assert among_others(model, request, other_requests(others, 15), max_running=64) == alone


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_prompt_in_chunks_while_others_come_and_go_gives_the_same_bits(dtype):
    model = small_model(deviation=0.05, dtype=dtype, **REAL)
    request = Request(prompt_of(300, 1), Sampling(seed=9, max_new_tokens=6))
    alone = among_others(model, request, [], prefill_tokens=4096)
    others = other_requests(10, 100)
    assert among_others(model, request, others, arrive=6, prefill_tokens=100, max_running=6, burst=3) == alone


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_mixture_of_experts_gives_the_same_bits_whatever_others_choose(dtype):
    model = small_model(deviation=0.1, dtype=dtype, moe=MOE, width=192, mlp=96, context=256, vocab=512)
    request = Request(prompt_of(40, 1), Sampling(seed=9, max_new_tokens=8))
    alone = among_others(model, request, [])
    for others in (6, 63):
        assert among_others(model, request, other_requests(others, 60), max_running=64) == alone


GPT_OSS = {"biases": True, "sinks": True, "moe": {**MOE, "activation": "clamped_swiglu"}}
GPT2 = {"biases": True, "norm": "layer", "positions": "learned", "activation": "gelu"}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
@pytest.mark.parametrize("shape", [GPT_OSS, GPT2], ids=["gpt-oss", "gpt2"])
def test_other_blocks_give_the_same_bits_whatever_others_run(shape, dtype):
    model = small_model(deviation=0.1, dtype=dtype, **{"width": 192, "mlp": 250, "context": 640, "vocab": 512}, **shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.copy_(torch.linspace(-2.0, 2.0, parameter.numel()).view(parameter.shape))
    request = Request(prompt_of(230, 1), Sampling(seed=9, max_new_tokens=12))  # past 256, with what sinks add before
    alone = among_others(model, request, [])
    assert among_others(model, request, other_requests(6, 60), max_running=64) == alone
    assert among_others(model, request, [Request(prompt_of(400, 2), Sampling(max_new_tokens=20))]) == alone


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_request_after_caches_were_computed_again_gives_the_same_bits(dtype):
    model = small_model(deviation=0.05, dtype=dtype, **REAL)
    request = Request(prompt_of(40, 1), Sampling(seed=9, max_new_tokens=6))
    alone = among_others(model, request, [])
    engine, mine = engine_of(model), Listener()
    engine.submit(Request(request.prompt, Sampling(seed=3, max_new_tokens=300)), Listener())
    for _ in range(10):
        engine.burst()
    engine.publish(model.state_dict(), 0, keep_cache=False)
    engine.burst()
    engine.submit(request, mine)
    while mine.result is None:
        engine.burst()
    assert mine.result.generations == alone
    assert engine.metrics()["shared_tokens"] == 39


def test_shared_prompt_copied_late_gives_the_same_bits():
    model = small_model(deviation=0.05, **REAL)
    request = Request(prompt_of(40, 1), Sampling(seed=9, max_new_tokens=6), n=5)
    alone = among_others(model, request, [])
    assert among_others(model, request, [], max_running=2) == alone  # later samples copy it, or compute it again


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)])
def test_prompt_that_begins_as_others_do_gives_the_same_bits(dtype):
    """Whatever of it others have computed: pages of one that has ended, of one at work, and of one admitted with it."""
    model = small_model(deviation=0.05, dtype=dtype, **REAL)
    prompt, sampling = prompt_of(150, 1), Sampling(seed=9, max_new_tokens=6)
    alone = among_others(model, Request(prompt, sampling), [])
    engine = engine_of(model, prefill_tokens=64)
    for length in (40, 97, 130, 149):
        engine.submit(
            Request((*prompt[:length], *prompt_of(20, length)), Sampling(seed=1, max_new_tokens=30)), Listener()
        )
        for _ in range(length % 4):
            engine.burst()
    mine = Listener()
    engine.submit(Request(prompt, sampling), mine)
    while mine.result is None:
        engine.burst()
    assert mine.result.generations == alone
    (again,) = engine.run([Request(prompt, sampling)])
    assert again.generations == alone
