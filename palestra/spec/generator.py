"""Engines elsewhere that generate for a run: a server that is running, or one that the run starts."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from palestra.spec.base import listed
from palestra.spec.model import Conflict, Execution, Model
from palestra.spec.words import Words

Url = Annotated[str, Field(pattern=r"^https?://[^\s/@?#]+(/[^\s@?#]*)?$"), Words("a URL such as http://host:8000")]
Urls = Annotated[
    list[Url],
    BeforeValidator(listed, json_schema_input_type=Url | list[Url]),
    Field(min_length=1),
    Words("a URL such as http://host:8000, or a list of them"),
]


class EngineLaunch(Model):
    """A server that the run starts on a free port, and ends with itself; it prints to engine.log of the session."""

    python: str | None = Field(default=None, min_length=1)
    """The Python that has the engine installed, such as /opt/vllm/bin/python; null: this one."""
    args: list[str] = Field(default=[])
    """Further arguments of the server, such as --enforce-eager."""
    env: dict[str, str] = Field(default={})
    """Environment variables of the server, besides those of the run."""
    seconds: Execution[float] = Field(default=600.0, gt=0)
    """How long it may take to be ready."""


class GeneratorSpec(Model):
    """The engine that samples completions, where it is not the one in this process."""

    engine: Literal["vllm", "sglang", "palestra", "openai"]
    """What it speaks; `openai` is any server of OpenAI's protocol, for evaluation alone."""
    url: Execution[Urls | None] = None
    """Servers that are running already, and serve the model that is trained; null: `launch` one."""
    launch: Execution[EngineLaunch | None] = None
    """Start a server; null: join those of `url`."""
    model: str | None = Field(default=None, min_length=1)
    """Name of the model at an `openai` server; null: the only one that it serves."""
    api_key_env: Execution[str | None] = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable with the servers' API key; null: no key."""
    weights: Execution[Literal["folder", "shared_memory"]] = "folder"
    """How a vLLM or SGLang server gets new weights: in files, or (vLLM on this machine) in memory, by our plugin."""
    weights_folder: Execution[str | None] = Field(default=None, min_length=1)
    """Folder that run and servers share, for new weights of vLLM and SGLang, such as /dev/shm; null: the session's."""
    mismatch: float = Field(default=1e-3, gt=0)
    """Largest k3 between its log-probabilities and the trainer's, a mean over tokens, without a `correction`."""

    def conflicts(self) -> Iterator[Conflict]:
        """Neither or both of url and launch; fields of other engines."""
        if (self.url is None) == (self.launch is None):
            yield Conflict(("url",), "expected either `url` or `launch`")
        if self.engine == "openai" and self.launch is not None:
            yield Conflict(
                ("launch",), "expected null, because an openai server is any that is running: give its `url`"
            )
        if self.weights == "shared_memory" and self.engine != "vllm":
            yield Conflict(("weights",), f"expected folder, because {self.engine} has no plugin for it")
        if self.weights == "shared_memory" and self.weights_folder is not None:
            yield Conflict(("weights_folder",), "expected null, because `weights: shared_memory` needs none")
        if self.engine != "openai" and self.model is not None:
            yield Conflict(("model",), f"expected null, because a {self.engine} server has one model")
