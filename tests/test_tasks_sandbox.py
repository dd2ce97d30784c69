"""The sandbox in ordinary use: what tests see of code, what programs write, threads, deaths, refusals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from palestra.errors import PalestraError, UsageError
from palestra.tasks.sandbox import client
from palestra.tasks.sandbox.levels import Limits, import_path
from palestra.tasks.sandbox.sandbox import Sandbox

own_tmp = pytest.mark.skipif(
    Path(sys.prefix).is_relative_to("/tmp"), reason="Python itself is in /tmp: programs get their folder elsewhere"
)

LONG = 30.0  # seconds of wall clock, for what takes none on a machine with nothing else to do


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as made:
        yield made


def passes(sandbox: Sandbox, code: str, *tests: str, setup: str = "") -> bool:
    outcome = sandbox.run_tests(code, tests, ["f"], LONG, setup=setup)
    assert outcome.status in ("passed", "failed"), outcome
    return outcome.status == "passed"


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not condition():
        time.sleep(0.02)
    return condition()


def test_tests_of_a_function_each_is_told(sandbox: Sandbox):
    outcome = sandbox.run_tests(
        "def f(x): return x if x < 2 else 0", ["assert f(1) == 1", "assert f(2) == 2", "assert f(0) == 0"], ["f"], LONG
    )
    assert (outcome.status, outcome.passed) == ("failed", (True, False, True))
    assert outcome.note == "test 2: AssertionError"


@pytest.mark.parametrize(
    "value",
    [
        *("2", "-0.0", "1e300", "'ä\\ud800\\0'", "b'\\x00\\xff'", "None", "True", "3j", "10**30", "float('inf')"),
        *("(1,)", "()", "[1, (2, {3: {4}})]", "{'a': [1.5, None], (1, 2): frozenset({3})}"),
    ],
)
def test_plain_value_goes_there_and_back_it_is_the_same(sandbox: Sandbox, value: str):
    code = "def f(x): return [x, repr(x)]"
    test = f"v = {value}\nw, r = f(v)\nassert w == v and type(w) is type(v) and repr(w) == repr(v) == r"
    assert passes(sandbox, code, test)


def test_nan_goes_there_and_back_it_is_one(sandbox: Sandbox):
    assert passes(sandbox, "def f(x): return x", "v = f(float('nan'))\nassert v != v")


def test_values_of_the_library_that_compare_as_plain_ones_cross_as_those(sandbox: Sandbox):
    code = """
    from collections import Counter, OrderedDict, defaultdict
    def f(kind):
        if kind == "numpy":
            import numpy
            return [numpy.int64(3), numpy.float64(0.5), numpy.bool_(True)]
        kinds = {"counter": Counter("aab"), "ordered": OrderedDict(a=2, b=1), "default": defaultdict(int, a=2, b=1)}
        return kinds[kind]
    """
    tests = [f"assert f({kind!r}) == {{'a': 2, 'b': 1}}" for kind in ("counter", "ordered", "default")]
    numbers = "v = f('numpy')\nassert v == [3, 0.5, True] and [type(n) for n in v] == [int, float, bool]"
    assert passes(sandbox, textwrap.dedent(code), *tests, numbers)


@pytest.mark.parametrize(
    "value", ["iter([2])", "range(2)", "object()", "f", "bytearray(b'a')", "[lambda: 2]", "{1: type}"]
)
def test_value_that_is_not_plain_is_returned_the_test_fails_with_its_name(sandbox: Sandbox, value: str):
    outcome = sandbox.run_tests(f"def f(x): return {value}", ["assert f(1) == 2 or True"], ["f"], LONG)
    assert outcome.status == "failed"
    assert "f returned a value that cannot cross" in outcome.note


def test_function_raises_tests_can_expect_it(sandbox: Sandbox):
    code = """
    class Mine(KeyError): pass
    def f(x):
        if x == 1: raise ValueError("one")
        if x == 2: raise Mine("two")
        return b"".decode("ascii") if x else b"\\xff".decode("ascii")
    """
    expects = "def expects(kind, x):\n try: f(x)\n except kind as error: return str(error)\n assert False"
    tests = [
        "assert expects(ValueError, 1) == 'one'",
        "assert 'two' in expects(KeyError, 2)",
        "expects(LookupError, 2)",
    ]
    assert passes(sandbox, textwrap.dedent(code), *tests, "expects(ValueError, 0)", setup=expects)
    assert not passes(sandbox, textwrap.dedent(code), "expects(TypeError, 1)", setup=expects)
    outcome = sandbox.run_tests(textwrap.dedent(code), ["f(1)"], ["f"], LONG)
    assert (outcome.status, outcome.note) == ("failed", "test 1: ValueError: one")


def test_functions_share_state_between_calls_as_in_one_process(sandbox: Sandbox):
    code = "seen = []\ndef f(x):\n seen.append(x)\n return g()\ndef g(): return len(seen)"
    outcome = sandbox.run_tests(code, ["assert f(1) == 1", "assert f(1) == 2 and g() == 2"], ["f", "g"], LONG)
    assert outcome.status == "passed"


def test_keywords_cross_and_helpers_follow_the_main_function(sandbox: Sandbox):
    code = "from dataclasses import dataclass\ndef f(a, *, b=2): return helper(a) + b\ndef helper(a): return a * 10\n"
    code += "@dataclass\nclass Point:\n x: 'int' = 0\n"
    assert passes(sandbox, code, "assert f(1, b=3) == 13 and f(1) == 12 and f(**{'a': 0}) == 2")


def test_arguments_are_copies_the_tests_own_stay(sandbox: Sandbox):
    assert passes(sandbox, "def f(x):\n x.append(1)\n return x", "a = []\nassert f(a) == [1] and a == []")


def test_code_does_not_load_no_test_passes_and_the_note_says_why(sandbox: Sandbox):
    for code, why in (("def f(x) return", "SyntaxError"), ("1 / 0", "ZeroDivisionError"), ("import nosuch", "nosuch")):
        outcome = sandbox.run_tests(code, ["assert True", "assert f(1)"], ["f"], LONG)
        assert (outcome.status, outcome.passed) == ("failed", (False, False))
        assert why in outcome.note


def test_tests_are_at_fault_it_is_an_error_not_a_wrong_answer(sandbox: Sandbox):
    good = "def f(x): return x"
    for test in ("assert g(1)", "import nosuch", "assert f(1", "assert f(lambda: 1)", "try: f(map)\nexcept: pass"):
        outcome = sandbox.run_tests(good, [test], ["f"], LONG)
        assert outcome.status == "error", test
    assert sandbox.run_tests(good, ["assert f(1) == 1"], ["f"], LONG, setup="1 / 0").status == "error"
    # What the code raises is its own fault, whatever it is called.
    for error in ("NameError", "ImportError", "SyntaxError"):
        assert sandbox.run_tests(f"def f(x): raise {error}", ["f(1)"], ["f"], LONG).status == "failed"
    assert sandbox.run_tests("def g(x): return x", ["assert f(1) == 1"], ["f"], LONG).status == "failed"


def test_tests_hang_they_are_killed_too(sandbox: Sandbox):
    outcome = sandbox.run_tests("def f(x): return x", ["assert f(1) == 1", "while True: pass"], ["f"], 1.0)
    assert (outcome.status, outcome.passed) == ("timeout", (True, False))
    assert sandbox.run_tests("def f(x): return x", ["a = bytearray(10 << 30)"], ["f"], LONG).status == "failed"


def test_no_tests_or_an_empty_one_is_refused(sandbox: Sandbox):
    for tests in ([], [""], ["assert f(1)", " \n"]):
        with pytest.raises(UsageError, match="any code would pass"):
            sandbox.run_tests("def f(x): return x", tests, ["f"])


def test_setup_has_a_function_of_the_same_name_the_code_is_what_is_tested(sandbox: Sandbox):
    setup = "def helper(x): return x + 1\ndef f(x):\n pass\n"
    assert passes(sandbox, "def f(x): return x * 2", "assert f(2) == 4 and helper(1) == 2", setup=setup)
    together = sandbox.run_tests("def f(x): return 4", ["assert f(2) == 4"], ["f"], LONG, setup=setup, together=True)
    assert together.status == "passed"


def test_together_classes_can_be_used_and_the_level_is_weak(sandbox: Sandbox):
    code = "class Node:\n def __init__(s, v): s.v = v\ndef f(n): return n.v"
    apart = sandbox.run_tests(code, ["assert f(Node(3)) == 3"], ["f", "Node"], LONG)
    assert (apart.status, apart.level) == ("failed", sandbox.start())
    together = sandbox.run_tests(code, ["assert f(Node(3)) == 3"], ["f", "Node"], LONG, together=True)
    assert (together.status, together.level) == ("passed", "weak")
    for cheat in ("import os; os._exit(0)", "raise SystemExit", "import sys; sys.exit(0)", "def f(n): return 0"):
        assert sandbox.run_tests(cheat, ["assert f(3) == 3"], ["f"], LONG, together=True).status == "failed"


def test_drawing_and_sets_give_the_same_every_time(sandbox: Sandbox):
    program = "import random\nprint(random.random(), list({'a', 'b', 'c', 'dd', 'ee'}), hash('a'))"
    with Sandbox(workers=1) as other:
        assert len({one.run_program(program, timeout=LONG).stdout for one in (sandbox, sandbox, other)}) == 1


def test_program_reads_and_writes_like_a_script(sandbox: Sandbox):
    program = """
    import atexit, sys, threading, time
    atexit.register(print, "end")
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
    if __name__ == "__main__":
        print(input().upper(), sys.stdin.read(), "ä", file=sys.stdout)
        print("warned", file=sys.stderr)
    """
    output = sandbox.run_program(textwrap.dedent(program), "one\ntwo", LONG)
    assert (output.status, output.code, output.stderr) == ("ok", 0, "warned\n")
    assert output.stdout == "ONE two ä\nthread\nend\n"


def test_program_fails_its_traceback_shows_its_own_lines(sandbox: Sandbox):
    output = sandbox.run_program("def g():\n    return 1 / 0\ng()\n", timeout=LONG)
    assert (output.status, output.code, output.stdout) == ("error", 1, "")
    assert output.stderr.startswith(
        'Traceback (most recent call last):\n  File "<program>", line 3, in <module>\n    g()'
    )
    assert output.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "return 1 / 0" in output.stderr
    assert "palestra" not in output.stderr


def test_program_exits_its_code_is_told(sandbox: Sandbox):
    for program, expected in (
        ("raise SystemExit(3)", ("error", 3)),
        ("import sys; sys.exit('why')", ("error", 1)),
        ("import sys; sys.exit()", ("ok", 0)),
        ("import os; os._exit(7)", ("error", 7)),
        ("syntax error", ("error", 1)),
    ):
        output = sandbox.run_program(program, timeout=LONG)
        assert (output.status, output.code) == expected, output
    assert sandbox.run_program("import sys; sys.exit('why')", timeout=LONG).stderr == "why\n"


def test_program_takes_too_long_what_it_said_is_kept(sandbox: Sandbox):
    output = sandbox.run_program("print('begun')\nwhile True: pass", timeout=1.0)
    assert (output.stdout, output.status, output.code) == ("begun\n", "timeout", -signal.SIGKILL)


def test_program_crashes_it_is_told_apart_from_an_error(sandbox: Sandbox):
    output = sandbox.run_program("import ctypes; ctypes.string_at(0)", timeout=LONG)
    assert (output.status, output.code) == ("killed", -signal.SIGSEGV)


def test_modules_are_imported_the_library_and_packages_are_there(sandbox: Sandbox):
    program = "import sqlite3, xml.dom.minidom, asyncio, zoneinfo, ssl, numpy\n"
    program += "print(numpy.arange(3).sum(), asyncio.run(asyncio.sleep(0, 5)))"
    output = sandbox.run_program(program, timeout=LONG)
    assert (output.stdout, output.stderr) == ("3 5\n", "")


def test_python_is_in_tmp_modules_are_found_and_files_go_elsewhere(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        Path(folder, "lies_in_tmp.py").write_text("value = 5")
        modules = [*import_path(), folder]
        monkeypatch.setattr(client, "import_path", lambda: modules)
        with Sandbox(workers=1) as made:
            program = "import lies_in_tmp, os, tempfile\nwith tempfile.TemporaryFile() as file: file.write(b'a')\n"
            program += "print(lies_in_tmp.value, os.getcwd() == tempfile.gettempdir(), os.getcwd().startswith('/tmp/'))"
            output = made.run_program(program, timeout=LONG)
            assert (output.stdout, output.stderr) == ("5 True False\n", "")


@own_tmp
def test_limits_are_given_they_bind():
    with Sandbox(workers=1, limits=Limits(memory=200, output=1, files=2)) as small:
        output = small.run_program("a = bytearray(199 << 20)", timeout=LONG)
        assert "MemoryError" in output.stderr
        assert small.run_program("print('a' * 2000)", timeout=LONG).status == "output"
        assert (
            "File too large" in small.run_program("open('/tmp/a', 'wb').write(b'a' * (3 << 20))", timeout=LONG).stderr
        )


def test_threads_share_a_sandbox_each_gets_its_own_answer(sandbox: Sandbox):
    def ask(n: int) -> bool:
        return sandbox.run_program(f"print({n})", timeout=LONG).stdout == f"{n}\n"

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(40)))
    assert sandbox._idle.qsize() <= 2


def test_many_programs_are_run_no_file_stays_open():
    with Sandbox(workers=1) as made:
        counts = []
        for _ in range(2):
            for _ in range(10):
                made.run_program("print(1)", timeout=LONG)
                made.run_tests("def f(x): return x", ["assert f(1) == 1"], ["f"], LONG)
                made.run_tests("import os; os._exit(0)", ["assert f(1) == 1"], ["f"], LONG, together=True)
            processes = psutil.Process(), psutil.Process(made._idle.queue[0].pid)
            counts.append([process.num_fds() for process in processes])
        assert counts[0] == counts[1]


def test_sandbox_is_used_from_asyncio_the_loop_goes_on(sandbox: Sandbox):
    async def main() -> int:
        asked = [asyncio.to_thread(sandbox.run_program, "import time; time.sleep(0.3)", "", LONG) for _ in range(2)]
        running = asyncio.gather(*asked)
        ticks = 0
        while not running.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert [output.status for output in await running] == ["ok", "ok"]
        return ticks

    assert asyncio.run(main()) >= 5


def test_threads_that_started_servers_end_the_servers_stay():
    with Sandbox(workers=1) as made:
        thread = threading.Thread(target=made.start)
        thread.start()
        thread.join()
        (client,) = made._idle.queue
        time.sleep(0.2)
        assert made.run_program("print(1)", timeout=LONG).stdout == "1\n"
        assert [one.pid for one in made._idle.queue] == [client.pid]


def test_server_is_killed_the_call_fails_and_the_next_has_another():
    with Sandbox(workers=1) as made:
        made.start()
        (client,) = made._idle.queue
        server = psutil.Process(client.pid)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(made.run_program, "import time; time.sleep(1000)", "", 100.0)
            assert until(lambda: bool(server.children()))
            inside = server.children()
            server.kill()
            with pytest.raises(PalestraError, match="server is gone"):
                running.result(LONG)
        assert until(lambda: not any(process.is_running() for process in inside))
        assert made.run_program("print(1)", timeout=LONG).stdout == "1\n"
        made._idle.queue[0]._process.kill()
        with pytest.raises(PalestraError, match="server is gone"):
            made.run_program("print(1)", timeout=LONG)
        assert made.run_program("print(1)", timeout=LONG).stdout == "1\n"


def test_process_that_owns_the_sandbox_is_killed_nothing_of_it_lives_on(tmp_path: Path):
    program = """
    from palestra.tasks.sandbox.sandbox import Sandbox
    made = Sandbox(workers=1)
    made.start()
    print("started", flush=True)
    made.run_tests("def f(x):\\n while True: pass", ["f(1)"], ["f"], 1000.0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as owner:
        try:
            assert owner.stdout is not None
            owner.stdout.readline()
            process = psutil.Process(owner.pid)
            assert until(lambda: len(process.children(recursive=True)) == 3)  # a server, a program and its tests
            family = process.children(recursive=True)
        finally:
            owner.kill()
    assert until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family))
    assert list(tmp_path.iterdir()) == []


def test_closed_sandbox_ends_its_servers_and_takes_nothing_more():
    made = Sandbox(workers=1)
    made.start()
    server = psutil.Process(made._idle.queue[0].pid)
    made.close()
    assert not server.is_running()
    with pytest.raises(PalestraError, match="closed"):
        made.run_program("print(1)")


def test_forked_process_uses_the_sandbox_of_its_parent_it_is_told(sandbox: Sandbox):
    sandbox.start()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sandbox.run_program("print(1)")
        except PalestraError as error:
            os.write(writing, str(error).encode())
        sandbox.close()  # and this ends nothing of the parent's
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as file:
        assert "makes its own" in file.read()
    assert sandbox.run_program("print(1)", timeout=LONG).stdout == "1\n"


def test_environment_of_the_parent_is_not_there(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PALESTRA_SECRET_TOKEN", "hidden")
    with Sandbox(workers=1) as made:
        found = json.loads(
            made.run_program("import os, json; print(json.dumps(dict(os.environ)))", timeout=LONG).stdout
        )
    assert "hidden" not in found.values()
    assert set(found) <= {
        "LANG",
        "PYTHONUTF8",
        "PYTHONHASHSEED",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "HOME",
        "TMPDIR",
    } | {"LC_CTYPE"}


def test_levels_in_the_wrong_order_are_refused():
    with pytest.raises(UsageError, match="no level"):
        Sandbox(strongest="weak", weakest="namespaces")
