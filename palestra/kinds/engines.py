"""Engines of other programs in a run: servers joined or started, and the folder through which they get weights."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from palestra.cluster.memory import SharedMemory
from palestra.errors import Interrupted, UsageError
from palestra.generate.client import HttpGenerator, httpx
from palestra.generate.remote.dialects import OpenAi, Sglang, Vllm
from palestra.generate.remote.driven import RemoteEngines
from palestra.generate.remote.generator import Dialect, RemoteGenerator, WeightFolder, WeightMemory
from palestra.generate.remote.launch import api_key, check_running, launch
from palestra.kinds.models import Start
from palestra.lm.hf_config import family_of
from palestra.rollout.event_loop import LoopThread
from palestra.runs.session import Session
from palestra.spec.generator import GeneratorSpec


def check_engines(spec: GeneratorSpec, start: Start) -> None:
    """Refuse servers that are not there, a key that is not set, and a model that only our engine knows."""
    api_key(spec)
    if spec.engine != "palestra" and family_of(start.shape, start.config.get("model_type")) is None:
        raise UsageError(
            f"generator.engine: {spec.engine} does not know this model, whose shape is of no family of Hugging Face: "
            "use palestra, or the engine in this process"
        )
    for url in spec.url or () if spec.engine != "openai" else ():
        check_running(url)


def open_engines(
    spec: GeneratorSpec,
    session: Session,
    start: Start,
    stack: ExitStack,
    *,
    context: int,
    weights: Mapping[str, Tensor] | None = None,
) -> RemoteEngines:
    """The generators of a spec; those of `weights` can be sent new ones. `stack` ends them."""
    check_engines(spec, start)
    key, check, folder = api_key(spec), _running, None
    if weights is not None and (spec.launch is not None or spec.engine != "palestra"):
        name = "-".join(session.path.absolute().parts[-4:])  # of run, trial and seed
        path = session.path / "weights" if spec.weights_folder is None else Path(spec.weights_folder, name)
        # On the CPU vLLM 0.32 packs a tied output matrix once, and keeps it when weights are reloaded.
        about = (path, start.shape, start.tokenizer, start.eos, start.config)
        untied = spec.engine == "vllm"
        if spec.weights == "shared_memory":
            folder = WeightMemory(*about, untied=untied, channel=SharedMemory())
        else:
            folder = WeightFolder(*about, untied=untied)
        stack.callback(folder.remove)
    urls = spec.url or []
    if spec.launch is not None:
        model = start.folder if folder is None or weights is None else folder.initial(weights)
        assert model is not None  # what is evaluated has a folder
        log, memory = session.path / "engine.log", isinstance(folder, WeightMemory)
        url, check = launch(spec.engine, spec.launch, memory, model, context, log, stack, lambda: _stop(session))
        urls = [url]
    members = [_member(spec, url, key, start, context, folder) for url in urls]
    loop = stack.enter_context(LoopThread("engines"))
    return stack.enter_context(RemoteEngines(members, loop.start, check))


def _member(
    spec: GeneratorSpec, url: str, key: str | None, start: Start, context: int, folder: WeightFolder | None
) -> HttpGenerator:
    if spec.engine == "palestra":
        return HttpGenerator(url, key, ends=start.eos)
    makers: dict[str, Callable[[], Dialect]] = {
        "vllm": lambda: Vllm(memory=spec.weights == "shared_memory"),
        "sglang": Sglang,
        "openai": lambda: OpenAi(spec.model or _only_model(url, key)),
    }
    sizes = {"eos": frozenset(start.eos), "context": context, "vocab": start.shape.vocab or 0}
    return RemoteGenerator(url, makers[spec.engine](), start.tokenizer, weights=folder, api_key=key, **sizes)


def _only_model(url: str, key: str | None) -> str:
    """The one model that a server has."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).raise_for_status()
        names = [model["id"] for model in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"generator.url: {url} does not list its models ({error}): name one as `model`") from error
    if len(names) != 1:
        raise UsageError(f"generator.model: {url} serves {', '.join(names) or 'no model'}: name one of them")
    return names[0]


def _stop(session: Session) -> None:
    if session.stop_requested:
        raise Interrupted("stopped while the engine was starting: nothing was trained yet")


def _running() -> None:
    """Of servers that others have started, a call finds out."""
