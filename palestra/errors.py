"""The errors that users see: one paragraph each, with the exit code of the command."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """A hint at the nearest of the known names, or else `otherwise`."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"Did you mean '{near[0]}'?" if near else otherwise


class PalestraError(Exception):
    """An error that its message explains; the command exits with `exit_code`."""

    exit_code = 1


class UsageError(PalestraError):
    """The command or the spec is invalid."""

    exit_code = 2


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str):
        super().__init__(f"{what} needs an optional dependency: pip install 'palestra[{extra}]'")


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Around imports of optional dependencies: one that fails is a `MissingExtra`."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra(what, extra) from error


class Interrupted(PalestraError):
    """A run stopped on request (SIGINT, SIGTERM) after saving its state."""

    exit_code = 130


class RunBusy(UsageError):
    """Another process owns the folder."""


class LeaseLost(PalestraError):
    """Another process took over the lease."""
