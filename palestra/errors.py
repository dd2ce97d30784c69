"""The errors that users see: one paragraph each, with the exit code of the command."""


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


class Interrupted(PalestraError):
    """A run stopped on request (SIGINT, SIGTERM) after saving its state."""

    exit_code = 130


class RunBusy(UsageError):
    """Another process owns the folder."""


class LeaseLost(PalestraError):
    """Another process took over the lease."""
