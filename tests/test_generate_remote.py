"""Generators over other programs' servers; test_contract_generator.py has what all generators share."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_servers import remote, shared_tensors, vllm_server
from small_lm import small_model, small_tokenizer
from test_contract_generator import PROMPT
from tiny_server import KEY, NAME, serving, tiny_engine, tiny_model

from palestra.cluster.memory import SharedMemory
from palestra.errors import PalestraError, UsageError
from palestra.generate.engine.engine import Engine
from palestra.generate.remote import dialects
from palestra.generate.remote.dialects import OpenAi, Vllm
from palestra.generate.remote.driven import RemoteEngines
from palestra.generate.remote.generator import RemoteGenerator, WeightFolder
from palestra.generate.remote.launch import PLUGIN
from palestra.generate.types import Generator, Request, Sampling, StopReason
from palestra.lm.hf import load_pretrained
from palestra.rollout.event_loop import LoopThread

SHORT = Sampling(max_new_tokens=6, seed=2, temperature=0.7)


def run(
    address: str, dialect: Any, work: Callable[[RemoteGenerator], Coroutine[Any, Any, None]], **settings: Any
) -> None:
    async def opened() -> None:
        with remote(address, dialect, **settings) as generator:
            async with generator:
                await work(generator)

    asyncio.run(opened())


def test_logprobs_as_vllm_sent_them_before_are_read_too() -> None:
    entry = {"token": "token_id:7", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    top = [{"token": "token_id:7", "logprob": -0.5}, {"token": "token_id:9", "logprob": -0.25}]
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    choice = {
        "index": 0,
        "token_ids": [7, 8],
        "logprobs": {
            "content": [{**entry, "top_logprobs": top}, {"token_id": 8, "logprob": -1.0, "top_logprobs": top}]
        },
        "finish_reason": "length",
        "weight_versions": spans,
    }
    (found,) = Vllm().choices({"choices": [choice]})
    assert (found.tokens, found.logprobs, found.versions) == ([7, 8], [-0.5, -1.0], [3, 4])
    assert found.top == [((9, -0.25),), ((9, -0.25),)]


def test_prefix_cache_that_stays_full_is_an_error_and_one_that_is_emptied_later_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialects, "RESET_SECONDS", 0.0)
    weights = dict(tiny_model(1).named_parameters())

    async def fails(generator: RemoteGenerator) -> None:
        with pytest.raises(PalestraError, match="prefix cache"):
            await generator.publish(weights, 1)
        assert generator.version == 0

    async def works(generator: RemoteGenerator) -> None:
        await generator.publish(weights, 1)
        (one,) = (await generator.generate(Request(PROMPT, SHORT))).generations
        assert set(one.versions) == {1}

    for held, check in ((dialects.RESETS, fails), (dialects.RESETS - 1, works)):
        with vllm_server(tiny_engine(), held=held) as (address, problems):
            run(address, Vllm(), check)
        assert not problems


def test_server_that_loaded_another_version_is_refused() -> None:
    class Forgetful(Vllm):
        async def load(self, server: RemoteGenerator, *args: Any, **settings: Any) -> None:
            order = server.order

            async def without_version(method: str, path: str, **options: Any) -> None:
                if path != "/update_weight_version":
                    await order(method, path, **options)

            server.order = without_version  # type: ignore[method-assign]
            await super().load(server, *args, **settings)

    async def check(generator: RemoteGenerator) -> None:
        with pytest.raises(PalestraError, match="version 0 after an update to version 5"):
            await generator.publish(dict(tiny_model().named_parameters()), 5)

    with vllm_server(tiny_engine(), held=0) as (address, _):
        run(address, Forgetful(), check)


def test_server_without_the_routes_is_told_how_to_start() -> None:
    async def check(generator: RemoteGenerator) -> None:
        with pytest.raises(PalestraError, match="VLLM_SERVER_DEV_MODE=1"):
            await generator.publish(dict(tiny_model().named_parameters()), 1)

    with serving(api_key=None) as (address, _):  # it has no /collective_rpc
        run(address, Vllm(), check)


def test_server_that_is_gone_fails_its_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def check(generator: RemoteGenerator) -> None:
        with pytest.raises(PalestraError, match=address):
            await generator.generate(Request(PROMPT, SHORT))
        assert not generator.busy

    run(address, Vllm(), check, waits=(0.01,))


def test_several_servers_share_requests_and_all_get_weights() -> None:
    other, engines = tiny_model(1), [tiny_engine(), tiny_engine()]
    request = Request(PROMPT, SHORT, n=2)
    with (
        vllm_server(engines[0], held=0) as (first, _),
        vllm_server(engines[1], held=0) as (second, _),
        remote(first, Vllm()) as one,
        remote(second, Vllm()) as two,
        LoopThread() as loop,
        RemoteEngines([one, two], loop.start) as generator,
        ThreadPoolExecutor() as pool,
    ):
        generator.load(dict(other.named_parameters()), 3)

        def ask() -> list[tuple[int, ...]]:  # each from an event loop of its own
            async def both() -> list[tuple[int, ...]]:
                results = await asyncio.gather(generator.generate(request), generator.generate(request))
                return [one.versions for result in results for one in result.generations]

            return asyncio.run(both())

        found = [versions for part in pool.map(lambda _: ask(), range(2)) for versions in part]
        assert {version for versions in found for version in versions} == {3}
        assert generator.generated == sum(map(len, found))
        assert all(engine.metrics()["generated_tokens"] > 0 for engine in engines)

        async def streamed() -> list[int]:
            return [token async for chunk in generator.stream(request) for token in chunk.tokens if chunk.index == 0]

        assert tuple(asyncio.run(streamed())) == asyncio.run(generator.generate(request)).generations[0].tokens
        assert not generator.work(0.0)
        generator.wake()
        assert generator.work(60.0)


def test_server_that_has_ended_is_noticed_while_it_is_waited_for() -> None:
    def gone() -> None:
        raise PalestraError("the server ended")

    with (
        LoopThread() as loop,
        RemoteEngines([], loop.start, gone) as generator,
        pytest.raises(PalestraError, match="the server ended"),
    ):
        generator.work(60.0)


def test_openai_server_gives_text_and_takes_nothing_else() -> None:
    request = Request(PROMPT, Sampling(max_new_tokens=12, temperature=0.0))
    (expected,) = tiny_engine().run([request])[0].generations

    async def check(generator: Generator) -> None:
        (found,) = (await generator.generate(request)).generations
        assert (found.text, found.stop_reason) == (expected.text, expected.stop_reason)
        with pytest.raises(UsageError, match="top_k, logprobs"):
            await generator.generate(Request(PROMPT, Sampling(top_k=3, logprobs=1)))
        with pytest.raises(UsageError, match="cannot take new weights"):
            await generator.publish(dict(tiny_model().named_parameters()), 1)

    async def fails(generator: Generator) -> None:
        with pytest.raises(UsageError, match="'other' is not served here"):
            await generator.generate(request)

    with serving() as (address, _):
        run(address, OpenAi(NAME), check, api_key=KEY)
        run(address, OpenAi("other"), fails, api_key=KEY)


def test_token_route_has_vllms_json() -> None:
    body = {
        "token_ids": list(PROMPT),
        "sampling_params": {"max_tokens": 5, "temperature": 0.7, "seed": 1, "n": 2, "logprobs": 2, "top_k": -1},
        "request_id": "a",
    }
    sampling = Sampling(max_new_tokens=5, temperature=0.7, seed=1, logprobs=2)
    expected = tiny_engine().run([Request(PROMPT, sampling, n=2)])[0].generations
    with serving(api_key=None) as (address, engine), httpx.Client(base_url=address) as client:
        engine.version = 4
        data = client.post("/inference/v1/generate", json=body).json()
        assert data["request_id"] == "generate-tokens-a"
        assert data["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 10,
            "total_tokens": len(PROMPT) + 10,
        }
        for choice, one in zip(data["choices"], expected, strict=True):
            assert choice["token_ids"] == list(one.tokens)
            assert choice["finish_reason"] == "length"
            assert choice["weight_versions"] == [{"version": "4", "start": 0, "end": 5}]
            for entry, token, logprob in zip(choice["logprobs"]["content"], one.tokens, one.logprobs, strict=True):
                assert (entry["token_id"], entry["logprob"]) == (token, logprob)
                assert entry["top_logprobs"][0] == pytest.approx(
                    {key: entry[key] for key in ("token_id", "logprob", "rank")}
                )
                assert len(entry["top_logprobs"]) == 2
        last = expected[0].tokens[3]
        params = {"max_tokens": 5, "temperature": 0.7, "seed": 1, "stop_token_ids": [last]}
        plain = {"token_ids": list(PROMPT), "sampling_params": params}
        choice = client.post("/inference/v1/generate", json=plain).json()["choices"][0]
        assert (choice["logprobs"], choice["finish_reason"], choice["stop_reason"]) == (None, "stop", last)
        for wrong, named in (
            ({"token_ids": []}, "token_ids"),
            ({"sampling_params": {"presence_penalty": 3.0}}, "presence_penalty"),
            ({"sampling_params": {"structured_outputs": {"regex": "(a"}}}, "unclosed group"),
            ({"sampling_params": {"stream": True}}, "stream"),
            ({"priority": 3}, "priority"),
            ({"output_mode": "text"}, "output_mode"),
            ({"features": {}}, "features"),
            ({"model": "other"}, "other"),
        ):
            refused = client.post("/inference/v1/generate", json={**body, **wrong})
            assert refused.status_code in (400, 404)
            assert named in refused.json()["error"]["message"]


def test_stop_string_that_the_server_does_not_know_is_found_here() -> None:
    class Deaf(Vllm):
        def call(self, *args: Any, **settings: Any) -> tuple[str, Any]:
            path, body = super().call(*args, **settings)
            body["sampling_params"]["stop"] = []
            return path, body

    sampling = Sampling(max_new_tokens=30, seed=3, ignore_eos=True)
    (plain,) = tiny_engine().run([Request(PROMPT, sampling)])[0].generations
    assert plain.text is not None
    stop = plain.text[12:14]

    async def check(generator: RemoteGenerator) -> None:
        asked = Sampling(max_new_tokens=30, seed=3, ignore_eos=True, stop=(stop,))
        (found,) = (await generator.generate(Request(PROMPT, asked))).generations
        assert (found.text, found.stop_reason, found.stop_match) == (plain.text[:12], StopReason.STOP, stop)
        assert (found.tokens, found.versions) == (plain.tokens[:14], plain.versions[:14])

    with vllm_server(tiny_engine()) as (address, _):
        run(address, Deaf(), check)


def test_untied_folder_is_the_same_model_and_old_versions_are_removed(tmp_path: Path) -> None:
    model, tokenizer = small_model(tied=True), small_tokenizer()
    folder = WeightFolder(tmp_path / "weights", model.shape, tokenizer, [0], {}, untied=True)
    for version in range(4):
        folder.put(model.state_dict(), version)
    assert sorted(each.name for each in folder.path.iterdir()) == ["2", "3"]
    loaded = load_pretrained(folder.put(model.state_dict(), 3)).model
    assert loaded.head is not None
    assert torch.equal(loaded.head, model.embed)
    request = Request((1, 2, 3), Sampling(max_new_tokens=8, temperature=0.0))
    first, second = (Engine(one, eos=frozenset()).run([request])[0].generations[0] for one in (model, loaded))
    assert first == second
    folder.remove()
    assert not folder.path.exists()


def test_plugin_of_vllm_is_found_and_reads_what_was_published() -> None:
    (point,) = metadata.Distribution.at(PLUGIN / "palestra_vllm-1.dist-info").entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "palestra_vllm:register")
    channel = SharedMemory()
    try:
        for version in range(3):
            sent = {"a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.randn(0)}
            sent["d"] = torch.ones((), dtype=torch.bfloat16)
            channel.publish(version, sent)
            read = dict(shared_tensors(channel.address.removeprefix("shm:"), version))
            assert read.keys() == sent.keys()
            assert all(torch.equal(read[name], tensor) for name, tensor in sent.items())
            assert all(read[name].dtype == tensor.dtype for name, tensor in sent.items())
        with pytest.raises(FileNotFoundError):
            next(shared_tensors(channel.address.removeprefix("shm:"), 7))
    finally:
        channel.close()
