"""The process of the tests, in which the program's functions are stubs that call the other process."""

import builtins
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from palestra.tasks.sandbox.candidate import load, read_all
from palestra.tasks.sandbox.literals import Channel, Malformed, NotLiteral

# Raised by a stub these would end a loop of the tests early, as if all were well.
SILENT = (StopIteration, StopAsyncIteration, GeneratorExit)


class Fault(BaseException):
    """The program is gone or returned something that is not plain. No `except Exception` of a test catches it."""


class TestNeeds(BaseException):
    """A test passes the program a value that cannot cross, which is not the program's fault."""

    __test__ = False  # no class of tests, whatever pytest thinks of its name


class Program:
    """The program as the tests see it."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self.gone: Fault | None = None
        """Why it will never answer again."""
        self.fault: Fault | None = None
        """What was wrong with an answer during this test."""
        self.needs: TestNeeds | None = None
        """What was wrong with a call during this test."""
        self.raised: list[BaseException] = []
        """What its functions raised during this test."""

    def loaded(self) -> None:
        """Wait until the code is loaded; Fault where it is not."""
        reply = self._receive()
        if "raised" in reply:
            self.gone = Fault(f"the code raised {_words(reply)}")
            raise self.gone

    def begin(self) -> None:
        """Forget the test before."""
        self.fault, self.needs = None, None
        self.raised.clear()

    def stub(self, name: str) -> Callable[..., Any]:
        """A function of the program."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.gone is not None:
                raise self.gone
            try:
                self._channel.send([name, list(args), kwargs])
            except NotLiteral as error:
                self.needs = TestNeeds(f"it calls {name} with a value that cannot cross: {error}")
                raise self.needs from None
            except OSError:
                self.gone = Fault("the code ended its process")
                raise self.gone from None
            reply = self._receive()
            if "raised" not in reply:
                return reply["value"]
            if reply["type"] == NotLiteral.__name__:
                self.fault = Fault(f"{name} returned a value that cannot cross: {reply['message']}")
                raise self.fault
            error = _exception(reply)
            self.raised.append(error)
            raise error

        call.__name__ = call.__qualname__ = name
        return call

    def _receive(self) -> dict[str, Any]:
        try:
            reply = self._channel.receive()
        except (EOFError, OSError):
            self.gone = Fault("the code ended its process")
            raise self.gone from None
        except Malformed as error:
            self.gone = Fault(f"the code did not answer with a plain value ({error})")
            raise self.gone from None
        if _is_reply(reply):
            return reply
        self.gone = Fault("the code did not answer with a plain value")
        raise self.gone


def examine(tests: int, channel: int, result: int) -> None:
    """Run tests against the program at the other end of a channel."""
    exam = json.loads(read_all(tests))
    report = ExamReport(result)
    program = Program(Channel(channel))
    stubs = {name: program.stub(name) for name in exam["entry_points"]}
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins, **stubs}
    try:
        program.loaded()
    except Fault as fault:
        report.ended("failed", str(fault))
        return
    if not report.prepare(exam["setup"], namespace):
        return
    namespace.update(stubs)  # the setup may have a function of the same name, such as a signature without a body
    for number, test in enumerate(exam["tests"]):
        program.begin()
        error = attempt(test, namespace)
        broken = isinstance(error, NameError | ImportError | SyntaxError) and error not in program.raised
        # What went wrong between the two counts even where a test caught it.
        error = program.gone or program.fault or program.needs or error
        report.test(number, error, broken=broken or error is program.needs is not None)
    report.ended("done")


def examine_together(code: int, tests: int, result: int) -> None:
    """Run tests in the program's own process, where the program can forge the report."""
    exam = json.loads(read_all(tests))
    report = ExamReport(result)
    try:
        namespace = load(read_all(code), "candidate").__dict__
    except BaseException as error:
        report.ended("failed", f"the code raised {_message(error)}")
        return
    own = {name: namespace[name] for name in exam["entry_points"] if name in namespace}
    if not report.prepare(exam["setup"], namespace, fault="failed"):
        return
    namespace.update(own)
    for number, test in enumerate(exam["tests"]):
        report.test(number, attempt(test, namespace), broken=False)
    report.ended("done")


class ExamReport:
    """The report on the tests, a line of JSON each, as soon as it is known."""

    def __init__(self, number: int):
        self._number = number

    def prepare(self, setup: str, namespace: dict[str, Any], fault: str = "error") -> bool:
        """Run the setup; where it fails, report that and return False."""
        error = attempt(setup, namespace)
        if error is not None:
            self.ended(fault, f"the setup of the tests raised {_message(error)}")
        return error is None

    def test(self, number: int, error: BaseException | None, *, broken: bool) -> None:
        """The result of a test; `broken` means that the test itself is at fault."""
        why = "" if error is None else f"test {number + 1}: {_message(error)}"
        self._write({"test": number, "passed": error is None, "broken": broken, "why": why})

    def ended(self, how: str, why: str = "") -> None:
        """The last line: `done`, or `failed` or `error` where no test could be run."""
        self._write({"ended": how, "why": why})

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self._number, data) :]


def attempt(source: str, namespace: dict[str, Any]) -> BaseException | None:
    """Run source and return the exception that it raised."""
    try:
        exec(compile(source, "<tests>", "exec", dont_inherit=True, optimize=0), namespace)
    except BaseException as error:
        return error
    return None


def _message(error: BaseException) -> str:
    try:
        text = str(error)[:500]
    except Exception:  # of a value that cannot be written, such as an integer of a million digits
        text = ""
    if isinstance(error, Fault | TestNeeds):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_reply(reply: Any) -> bool:
    """Whether a reply is well-formed; the other side may send anything."""
    if type(reply) is not dict:
        return False
    if set(reply) == {"value"}:
        return True
    if set(reply) != {"raised", "type", "message"} or type(reply["raised"]) is not list:
        return False
    return all(type(text) is str for text in (*reply["raised"], reply["type"], reply["message"]))


def _exception(reply: dict[str, Any]) -> Exception:
    """An exception of the nearest built-in class that an answer names."""
    names: Sequence[str] = reply["raised"]
    for name in names[:20]:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, SILENT):
            try:
                return kind(reply["message"])
            except TypeError:  # some want other arguments; their parents do not
                continue
    return RuntimeError(_words(reply))


def _words(reply: dict[str, Any]) -> str:
    return f"{reply['type']}: {reply['message']}"[:300]
