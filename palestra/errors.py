"""The errors a person sees: one clear paragraph each, with the exit code the command ends with."""


class PalestraError(Exception):
    """Something went wrong that a message can explain; the command exits with `exit_code`."""

    exit_code = 1


class UsageError(PalestraError):
    """The command or the spec asks for something that cannot be done as written."""

    exit_code = 2


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str):
        super().__init__(f"{what} needs an optional dependency: pip install 'palestra[{extra}]'")


class Interrupted(PalestraError):
    """A run was asked to stop (SIGINT, SIGTERM), saved its state and did."""

    exit_code = 130


class RunBusy(UsageError):
    """Another process owns the folder."""


class LeaseLost(PalestraError):
    """Another process took the lease over while this one held it."""
