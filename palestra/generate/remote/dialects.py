"""What vLLM, SGLang and servers of OpenAI's protocol are sent, and what their responses mean."""

import asyncio
from pathlib import Path
from typing import Any

from palestra.errors import PalestraError
from palestra.generate.client import UNANSWERED, UNSENT
from palestra.generate.engine.request import MOST_ALTERNATIVES, Alternatives, EngineJob
from palestra.generate.remote.generator import Choice, Dialect, RemoteGenerator
from palestra.generate.types import EDITS

RESETS, RESET_SECONDS = 20, 0.25
"""Attempts to empty a prefix cache whose blocks are still held, and seconds between two."""


class Vllm(Dialect):
    """vLLM 0.32: `/inference/v1/generate`, and the routes of its development mode for new weights."""

    expected = (
        "a vLLM server with what a trainer needs: start it with VLLM_SERVER_DEV_MODE=1 in its environment, "
        "--enable-scale-out and --logprobs-mode processed_logprobs"
    )
    streams = True

    def __init__(self, *, memory: bool = False):
        """With `memory` new weights come through our own weight transfer engine, which its plugin registers."""
        self.memory = memory

    def call(self, job: EngineJob, index: int, before: list[int], version: int, *, stream: bool) -> tuple[str, Any]:
        sampling = job.sampling
        params = {
            "n": job.request.n,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p,
            "max_tokens": job.limit,
            "min_tokens": sampling.min_new_tokens,
            "seed": job.seed,
            "stop": list(sampling.stop),
            # All end tokens are named: its own may be others.
            "stop_token_ids": list(job.ends),
            "ignore_eos": True,
            # One more than asked for: the sampled token takes a place.
            "logprobs": min(sampling.logprobs + 1, MOST_ALTERNATIVES) if sampling.logprobs else 0,
            "detokenize": bool(sampling.stop),
            "logit_bias": sampling.logit_bias,
            "repetition_penalty": sampling.repetition_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "structured_outputs": None if sampling.guide is None else vars(sampling.guide),
        }
        body = {"request_id": job.id, "token_ids": list(job.request.prompt), "sampling_params": params}
        # Salted by the version, no prompt is continued from keys and values that other weights have cached.
        return "/inference/v1/generate", {**body, "stream": stream, "cache_salt": f"version {version}"}

    def choices(self, data: Any) -> list[Choice]:
        if "error" in data:
            raise PalestraError(f"vLLM failed a request: {data['error']}")
        return [self._choice(choice) for choice in data["choices"]]

    def _choice(self, choice: dict[str, Any]) -> Choice:
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        spans = choice.get("weight_versions")
        versions = None if spans is None else [v for span in spans for v in [_version(span["version"])] * _length(span)]
        top = [_alternatives(entry["top_logprobs"], len(entry["top_logprobs"]) - 1) for entry in content]
        logprobs = [entry["logprob"] for entry in content]
        return Choice(choice["index"], tokens, logprobs, versions, choice["finish_reason"], top)

    async def abort(self, server: RemoteGenerator, job: EngineJob) -> None:
        await server.order("POST", "/inference/v1/abort_requests", json={"request_ids": [f"generate-tokens-{job.id}"]})

    async def pause(self, server: RemoteGenerator) -> None:
        await server.order("POST", "/pause", params={"mode": "keep"})

    async def resume(self, server: RemoteGenerator) -> None:
        await server.order("POST", "/resume")

    async def load(self, server: RemoteGenerator, folder: Path, version: int, *, keep_cache: bool) -> None:
        await self.pause(server)
        if self.memory:
            await server.order("POST", "/init_weight_transfer_engine", json={"init_info": {"folder": str(folder)}})
            await server.order("POST", "/start_weight_update")
            await server.order("POST", "/update_weights", json={"update_info": {"version": version}})
            await server.order("POST", "/finish_weight_update", json={"weight_version": str(version)})
        else:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.order("POST", "/collective_rpc", json=call)
        if not keep_cache or not server.busy:  # else the salt alone keeps later requests from what is cached
            await self._reset(server, running=not keep_cache)
        await server.order("POST", "/update_weight_version", json={"new_version": str(version)})
        _check_version(server, (await server.ask("GET", "/weight_info"))["weight_version"], version)

    async def _reset(self, server: RemoteGenerator, *, running: bool) -> None:
        for _ in range(RESETS):
            params = {"reset_running_requests": str(running).lower()}
            if (await server.ask("POST", "/reset_prefix_cache", params=params))["success"]:
                return
            await asyncio.sleep(RESET_SECONDS)
        raise PalestraError(
            f"{server.base_url} did not empty its prefix cache in {RESETS} attempts: blocks of it are held by requests "
            "of others. Give the run a server of its own, or start it with --no-enable-prefix-caching"
        )


class Sglang(Dialect):
    """SGLang: `/generate`. A response has one version: an update aborts what runs, which goes on from its tokens."""

    expected = "an SGLang server"
    groups = False

    fixed = ("top_k", "top_p", "min_p", *EDITS)
    fixed_because = "SGLang's log-probabilities are not known to be of the distribution after it, which is trained on"

    def call(self, job: EngineJob, index: int, before: list[int], version: int, *, stream: bool) -> tuple[str, Any]:
        sampling = job.sampling
        params = {
            "temperature": sampling.temperature,
            "max_new_tokens": job.limit - len(before),
            "min_new_tokens": max(0, sampling.min_new_tokens - len(before)),
            "stop": list(sampling.stop),
            "stop_token_ids": list(job.ends),
            "ignore_eos": True,
            "no_stop_trim": True,
            "sampling_seed": (job.seed + index) % 2**31,
        }
        body = {"input_ids": [*job.request.prompt, *before], "sampling_params": params, "return_logprob": True}
        more = {"logprob_start_len": -1, "top_logprobs_num": sampling.logprobs, "stream": stream}
        return "/generate", {**body, **more, "rid": _rid(job, index)}

    def choices(self, data: Any) -> list[Choice]:
        meta = data["meta_info"]
        sampled = meta["output_token_logprobs"]
        tops = meta.get("output_top_logprobs")
        top = [_alternatives([{"token_id": id, "logprob": lp} for lp, id, *_ in row], len(row)) for row in tops or ()]
        tokens, logprobs = [entry[1] for entry in sampled], [entry[0] for entry in sampled]
        versions = [_version(meta["weight_version"])] * len(tokens)
        return [Choice(0, tokens, logprobs, versions, meta["finish_reason"]["type"], top or None)]

    async def abort(self, server: RemoteGenerator, job: EngineJob) -> None:
        for index in range(job.request.n):
            await server.order("POST", "/abort_request", json={"rid": _rid(job, index)})

    async def pause(self, server: RemoteGenerator) -> None:
        await server.order("POST", "/pause_generation", json={"mode": "in_place"})

    async def resume(self, server: RemoteGenerator) -> None:
        await server.order("POST", "/continue_generation", json={"torch_empty_cache": True})

    async def load(self, server: RemoteGenerator, folder: Path, version: int, *, keep_cache: bool) -> None:
        await server.order("POST", "/pause_generation", json={"mode": "abort"})
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        done = await server.ask("POST", "/update_weights_from_disk", json={**body, "abort_all_requests": False})
        if not done["success"]:
            raise PalestraError(f"{server.base_url} could not load the weights in {folder}: {done['message']}")
        _check_version(server, (await server.ask("GET", "/model_info"))["weight_version"], version)


class OpenAi(Dialect):
    """Any server of OpenAI's `/v1/completions` with the model's tokenizer: text alone, for evaluation."""

    expected = "a server of OpenAI's /v1/completions"
    fixed = (
        "top_k", "min_p", "min_new_tokens", "stop_ids", "ignore_eos", "logprobs", "repetition_penalty", "guide",
    )  # fmt: skip
    fixed_because = "not in OpenAI's protocol"
    # A completion may be asked for twice: nothing is trained on it, and rate limits are of a minute.
    again = (*UNSENT, *UNANSWERED)
    retried = (408, 429, 500, 502, 503, 504, 529)
    waits = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0)

    def __init__(self, model: str):
        self.model = model

    def call(self, job: EngineJob, index: int, before: list[int], version: int, *, stream: bool) -> tuple[str, Any]:
        sampling = job.sampling
        body: dict[str, Any] = {"model": self.model, "prompt": list(job.request.prompt), "n": job.request.n}
        body |= {"max_tokens": job.limit, "temperature": sampling.temperature, "top_p": sampling.top_p}
        body |= {"seed": job.seed % 2**31, "stop": list(sampling.stop) or None}
        for name in sampling.given(("logit_bias", "frequency_penalty", "presence_penalty")):
            body[name] = getattr(sampling, name)
        return "/v1/completions", body

    def choices(self, data: Any) -> list[Choice]:
        return [
            Choice(choice["index"], [], [], None, choice["finish_reason"], text=choice["text"])
            for choice in data["choices"]
        ]


def _rid(job: EngineJob, index: int) -> str:
    return f"{job.id}-{index}"


def _length(span: dict[str, Any]) -> int:
    return span["end"] - span["start"]


def _version(told: str) -> int:
    """A version that was published; a server that has its first weights calls theirs otherwise."""
    return int(told) if told.lstrip("-").isdigit() else 0


def _check_version(server: RemoteGenerator, told: str, version: int) -> None:
    if told != str(version):
        raise PalestraError(f"{server.base_url} has weights of version {told} after an update to version {version}")


def _alternatives(entries: list[dict[str, Any]], most: int) -> Alternatives:
    """The most likely tokens, in their order."""
    ranked = sorted(entries, key=lambda entry: -entry["logprob"])[:most]
    return tuple((_token(entry), entry["logprob"]) for entry in ranked)


def _token(entry: dict[str, Any]) -> int:
    """The token of an entry; before 0.31 vLLM sent it as OpenAI's text, `token_id:7`."""
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))
