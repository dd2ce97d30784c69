"""The isolated process of the program: it runs untrusted code, and calls its functions for the tests.

Nothing that happens here is evidence: the code owns this process, down to the bytes that it sends.
"""

import atexit
import io
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from palestra.tasks.sandbox.literals import Channel, NotLiteral

NAME = "<program>"


def read_all(number: int) -> str:
    """The text of a file, which is then closed."""
    with open(number, encoding="utf-8", errors="surrogatepass", newline="") as file:
        return file.read()


def load(source: str, name: str) -> ModuleType:
    """Run source as a module of that name."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, NAME, "exec", dont_inherit=True, optimize=0), module.__dict__)
    return module


def serve_calls(code: int, channel: int) -> None:
    """Load the code, report whether that worked, then serve calls: `[name, args, kwargs]`."""
    tests = Channel(channel)
    try:
        module = load(read_all(code), "candidate")
    except BaseException as error:
        tests.send(failure(error))
        return
    tests.send({"value": None})
    while True:
        try:
            name, args, kwargs = tests.receive()
        except EOFError:
            return
        try:
            tests.send(_answer(module, name, args, kwargs))
        except NotLiteral as error:
            tests.send(failure(error))


def run_program(code: int, *streams: int) -> int:
    """Run the code as `python program.py` would, with these as stdin, stdout and stderr, and return its exit code."""
    status = 0
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a killed program has written what it printed
    source = read_all(code)
    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)  # for its tracebacks
    try:
        load(source, "__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        inner = error.__traceback__
        while inner is not None and inner.tb_frame.f_code.co_filename != NAME:
            inner = inner.tb_next
        traceback.print_exception(type(error), error, inner)
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()  # as the interpreter does at its end: waits for the program's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status & 0xFF


def failure(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: the names of its built-in classes, nearest first, and its message."""
    names = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
    try:
        text = str(error)[:500]
    except Exception:  # a class of the program's own, which can do what it likes here
        text = ""
    return {"raised": names, "type": type(error).__name__[:100], "message": text}


def _answer(module: ModuleType, name: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        if name not in module.__dict__:
            raise NameError(f"name {name!r} is not defined")
        value = module.__dict__[name](*args, **kwargs)
    except (SystemExit, KeyboardInterrupt):
        os._exit(1)
    except BaseException as error:
        return failure(error)
    return {"value": value}
