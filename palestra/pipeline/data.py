"""The built-in data steps: `from palestra.pipeline.data import download, tokenize`."""

from collections.abc import Callable
from pkgutil import resolve_name

from palestra.data.steps import STEPS
from palestra.errors import UsageError
from palestra.pipeline.step import Step, step


def data_step(name: str) -> Callable[..., Step]:
    """The built-in step of that name in `STEPS`, as a function that makes a `Step`."""
    if name not in STEPS:
        raise UsageError(f"no data step {name!r}; there are {', '.join(STEPS)}")
    return step(resolve_name(STEPS[name]), name=name, resumes=True)


def __getattr__(name: str) -> Callable[..., Step]:
    if name not in STEPS:
        raise AttributeError(f"{__name__} has no data step {name!r}; there are {', '.join(STEPS)}")
    return data_step(name)
