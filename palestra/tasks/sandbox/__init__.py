"""Where code that nobody has read is run: alone, in a process that can neither harm nor see anything else.

A `Sandbox` has one level, which every verdict on code records:

- `namespaces`: it sees no other process, has no network, and of the file system only Python and the system's libraries,
  read-only, and an empty `/tmp` of its own in memory. For root it is a user that nobody else is; for others it has no
  rights in a namespace of users.
- `uid`: for root where namespaces are not allowed, as in most containers. A user that nobody else is, who must be able
  to read Python, and a folder of its own; where the kernel has Landlock (5.13), nothing else of the file system but
  Python, read-only. It can fill the disk by many files until it is killed.
- `weak`: neither. It runs as the user who asked, who is protected by what is below alone. Tests that have to run in
  the candidate's own process are `weak` too, wherever that is: code can then say of itself that it passed.

At all levels there are limits (`Limits`) on memory, processor time, threads, output and files, a wall clock, and on
Linux a filter of system calls: no new processes, no programs, no sockets, no signals to others, no tracing, no shared
memory, no kernel interfaces that a function could not need. The first two levels are refused where there is no filter.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.tasks.sandbox.levels import LEVELS, Level
    from palestra.tasks.sandbox.limits import Limits
    from palestra.tasks.sandbox.sandbox import ProgramOutput, Sandbox, SandboxOutcome

_LAZY = {"LEVELS": "levels", "Level": "levels", "Limits": "limits"} | dict.fromkeys(
    ("SandboxOutcome", "ProgramOutput", "Sandbox"), "sandbox"
)
__all__ = ["LEVELS", "Level", "Limits", "ProgramOutput", "Sandbox", "SandboxOutcome"]


def __getattr__(name: str) -> Any:
    """Import on use: what the server never loads, the programs that it forks need not copy."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
