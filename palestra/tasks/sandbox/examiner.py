"""The process of the tests, in which the program's functions are stubs that call the other process."""

import builtins
import json
import os
from collections.abc import Callable
from typing import Any

from palestra.tasks.sandbox.candidate import failure, load, read_all
from palestra.tasks.sandbox.literals import Channel, Malformed, NotLiteral

# Raised by a stub these would end a loop of the tests early, as if all were well.
SILENT = (StopIteration, StopAsyncIteration, GeneratorExit)
ENDED = "the code ended its process"


class Fault(BaseException):
    """The program is gone or returned something that is not plain. No `except Exception` of a test catches it."""


class TestNeeds(BaseException):
    """A test passes the program a value that cannot cross, which is not the program's fault."""

    __test__ = False  # no class of tests, whatever pytest thinks of its name


class Program:
    """The program as the tests see it."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._gone: Fault | None = None
        """Why it will never answer again."""
        self._fault: Fault | None = None
        """What was wrong with an answer during this test."""
        self._needs: TestNeeds | None = None
        """What was wrong with a call during this test."""
        self._raised: list[BaseException] = []
        """What its functions raised during this test."""

    def loaded(self) -> None:
        """Wait until the code is loaded; Fault where it is not."""
        reply = self._reply()
        if "raised" in reply:
            raise self._ended(f"the code raised {_words(reply)}")

    def examined(self, test: str, namespace: dict[str, Any]) -> tuple[BaseException | None, bool]:
        """Run a test: what counts against it, and whether the test itself is at fault."""
        self._fault, self._needs = None, None
        self._raised.clear()
        error = attempt(test, namespace)
        broken = isinstance(error, NameError | ImportError | SyntaxError) and error not in self._raised
        # What went wrong between the two counts even where a test caught it.
        error = self._gone or self._fault or self._needs or error
        return error, broken or error is self._needs is not None

    def stub(self, name: str) -> Callable[..., Any]:
        """A function of the program."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._gone is not None:
                raise self._gone
            try:
                reply = self._reply([name, list(args), kwargs])
            except NotLiteral as error:
                self._needs = TestNeeds(f"it calls {name} with a value that cannot cross: {error}")
                raise self._needs from None
            if "raised" not in reply:
                return reply["value"]
            if reply["type"] == NotLiteral.__name__:
                self._fault = Fault(f"{name} returned a value that cannot cross: {reply['message']}")
                raise self._fault
            error = _exception(reply)
            self._raised.append(error)
            raise error

        call.__name__ = call.__qualname__ = name
        return call

    def _reply(self, call: list[Any] | None = None) -> dict[str, Any]:
        """The reply to a call, or, without one, to the code itself."""
        try:
            if call is not None:
                self._channel.send(call)
            reply = self._channel.receive()
        except (EOFError, OSError):
            raise self._ended(ENDED) from None
        except Malformed as error:
            raise self._ended(f"the code did not answer with a plain value ({error})") from None
        if not _is_reply(reply):
            raise self._ended("the code did not answer with a plain value")
        return reply

    def _ended(self, why: str) -> Fault:
        self._gone = Fault(why)
        return self._gone


def examine(tests: int, channel: int, result: int) -> None:
    """Run tests against the program at the other end of a channel."""
    exam = json.loads(read_all(tests))
    program = Program(Channel(channel))
    stubs = {name: program.stub(name) for name in exam["entry_points"]}
    try:
        program.loaded()
    except Fault as fault:
        report(result, ended="failed", why=_message(fault))
        return
    namespace = {"__name__": "tests", "__builtins__": builtins, **stubs}
    _run(exam, result, namespace, stubs, program.examined)


def examine_together(code: int, tests: int, result: int) -> None:
    """Run tests in the program's own process, where the program can forge the report."""
    exam = json.loads(read_all(tests))
    try:
        namespace = load(read_all(code), "candidate").__dict__
    except BaseException as error:
        report(result, ended="failed", why=f"the code raised {_message(error)}")
        return
    own = {name: namespace[name] for name in exam["entry_points"] if name in namespace}
    _run(exam, result, namespace, own, lambda test, namespace: (attempt(test, namespace), False))


def _run(
    exam: dict[str, Any],
    result: int,
    namespace: dict[str, Any],
    functions: dict[str, Any],
    examined: Callable[[str, dict[str, Any]], tuple[BaseException | None, bool]],
) -> None:
    """Run the setup, then each test, and report."""
    if (error := attempt(exam["setup"], namespace)) is not None:
        report(result, ended="error", why=f"the setup of the tests raised {_message(error)}")
        return
    namespace.update(functions)  # the setup may have a function of the same name, such as a signature without a body
    for number, test in enumerate(exam["tests"]):
        error, broken = examined(test, namespace)
        why = "" if error is None else f"test {number + 1}: {_message(error)}"
        report(result, test=number, passed=error is None, broken=broken, why=why)
    report(result, ended="done")


def report(number: int, **line: Any) -> None:
    """Write a line of JSON on a test, or on the end: `done`, or `failed` or `error` where no test could be run."""
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(number, data) :]


def attempt(source: str, namespace: dict[str, Any]) -> BaseException | None:
    """Run source and return the exception that it raised."""
    try:
        exec(compile(source, "<tests>", "exec", dont_inherit=True, optimize=0), namespace)
    except BaseException as error:
        return error
    return None


def _message(error: BaseException) -> str:
    reply = failure(error)
    return reply["message"] if isinstance(error, Fault | TestNeeds) else _words(reply)


def _is_reply(reply: Any) -> bool:
    """Whether a reply is well-formed; the other side may send anything."""
    match reply:
        case {"value": _}:
            return len(reply) == 1
        case {"raised": [*names], "type": str(), "message": str()}:
            return len(reply) == 3 and all(type(name) is str for name in names)
    return False


def _exception(reply: dict[str, Any]) -> Exception:
    """An exception of the nearest built-in class that an answer names."""
    for name in reply["raised"][:20]:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, SILENT):
            try:
                return kind(reply["message"])
            except TypeError:  # some want other arguments; their parents do not
                continue
    return RuntimeError(_words(reply))


def _words(reply: dict[str, Any]) -> str:
    """An exception in a few words."""
    return f"{reply['type']}: {reply['message']}".removesuffix(": ")[:300]
