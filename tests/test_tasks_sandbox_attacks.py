"""Code that cheats or does harm: none of it scores, and after each the sandbox is as before."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from palestra.tasks.sandbox.sandbox import Sandbox

own_tmp = pytest.mark.skipif(
    Path(sys.prefix).is_relative_to("/tmp"), reason="Python itself is in /tmp: programs get their folder elsewhere"
)

TESTS = ["assert f(1) == 2", "assert f(41) == 42"]
GOOD = "def f(x): return x + 1"
# Each is a whole program; f(x) should be x + 1. Where it takes all of the time, the time is short.
ATTACKS = {
    # leaving before a test can fail
    "sys_exit_at_import": "import sys; sys.exit(0)",
    "os_exit_at_import": "import os; os._exit(0)",
    "raise_system_exit": "raise SystemExit",
    "sys_exit_in_the_call": "import sys\ndef f(x): sys.exit(0)",
    "os_exit_in_the_call": "import os\ndef f(x): os._exit(0)",
    "keyboard_interrupt_in_the_call": "def f(x): raise KeyboardInterrupt",
    "exit_after_the_first_answer": (
        "import os\nn = 0\ndef f(x):\n global n\n n += 1\n return 2 if n == 1 else os._exit(0)"
    ),
    "exec_of_a_program_that_succeeds": "import os\nos.execv('/bin/true', ['true'])",
    "abort": "import os\ndef f(x): os.abort()",
    "bad_address": "import ctypes\ndef f(x): ctypes.string_at(0)",
    # tampering with what judges
    "patched_assertion_error": (
        "import builtins\nclass E(Exception):\n def __new__(c, *a): raise SystemExit(0)\n"
        "builtins.AssertionError = E\ndef f(x): return 0"
    ),
    "patched_open_print_and_type": (
        "import builtins\nbuiltins.open = builtins.print = builtins.type = lambda *a, **k: True\ndef f(x): return 0"
    ),
    "patched_unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "unittest.main = lambda *a, **k: None\ndef f(x): return 0"
    ),
    "patched_channel": (
        "import palestra.tasks.sandbox.literals as l\nl.packed = lambda value: {'dict': [['value', True]]}\n"
        "l.decode = lambda data: ['f', [1], {}]\ndef f(x): return 0"
    ),
    "trace_and_exit_hooks": (
        "import atexit, sys, threading\natexit.register(lambda: print('passed'))\n"
        "sys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\ndef f(x): return 0"
    ),
    "reply_too_long_for_the_report": (
        "import json, os, stat, struct\ndata = json.dumps({'a' * (2 << 20): []}).encode()\nfor n in range(3, 20):\n"
        " try: stat.S_ISSOCK(os.fstat(n).st_mode) and os.write(n, struct.pack('!I', len(data)) + data)\n"
        " except OSError: pass\ndef f(x): return 0"
    ),
    # values that say they are equal
    "equal_to_everything": "class A:\n def __eq__(s, o): return True\ndef f(x): return A()",
    "int_equal_to_everything": "class A(int):\n def __eq__(s, o): return True\n __hash__ = None\ndef f(x): return A(0)",
    "list_of_what_is_equal_to_everything": "class A(list):\n def __eq__(s, o): return True\ndef f(x): return A([0])",
    "equal_inside_a_tuple": "class A(str):\n def __eq__(s, o): return True\ndef f(x): return (A('a'),)",
    "class_that_says_it_is_int": (
        "class A:\n __class__ = int\n def __eq__(s, o): return True\n def __int__(s): return 2\n"
        "def f(x): return A()"
    ),
    "mock": "from unittest.mock import ANY\ndef f(x): return ANY",
    "numpy_array": "import numpy\ndef f(x): return numpy.array([x + 1])",
    "generator": "def f(x): yield x + 1",
    "deep_value": "def f(x):\n v = x\n for _ in range(100000): v = [v]\n return v",
    "value_in_itself": "def f(x):\n v = []\n v.append(v)\n return v",
    "value_of_a_gigabyte": "def f(x): return 'a' * (400 << 20)",
    "value_of_many_objects": "def f(x): return [[] for _ in range(1_300_000)]",
    # forging what goes between the processes
    "junk_to_every_file": (
        "import os, json\nlines = [dict(test=0, passed=True), dict(test=1, passed=True), dict(ended='done', why='')]\n"
        "line = b''.join(json.dumps(one).encode() + b'\\n' for one in lines)\n"
        "for n in range(64):\n try: os.write(n, line)\n except OSError: pass\ndef f(x): return 0"
    ),
    "forged_replies": (
        "import os, struct\ndef frame(data): return struct.pack('!I', len(data)) + data\n"
        "replies = b'{\"dict\": [[\"value\", true]]}', b'{\"object\": []}', b'[', b'null'\n"
        "for n in range(3, 64):\n for data in replies:\n"
        "  try: os.write(n, frame(data) * 3)\n  except OSError: pass\ndef f(x): return 0"
    ),
    "endless_message": (
        "import os\nfor n in range(3, 64):\n try:\n  while True: os.write(n, b'\\xff' * 1000)\n except OSError: pass\n"
        "def f(x): return 0"
    ),
    "half_a_message": (
        "import os\ndef f(x):\n for n in range(3, 64):\n  try: os.write(n, b'\\0\\0')\n  except OSError: pass\n"
        " os._exit(0)"
    ),
    "closed_files": "import os\ndef f(x):\n os.closerange(0, 64)\n return x + 1",
    # using it all up
    "endless_loop": "def f(x):\n while True: pass",
    "endless_loop_at_import": "while True: pass",
    "sleep": "import time\ndef f(x): time.sleep(1e6)",
    "endless_loop_in_c": "def f(x): return sum(iter(int, 1))",
    "signals_ignored": (
        "import signal\nfor s in range(1, 65):\n"
        " try: signal.signal(s, signal.SIG_IGN)\n except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ndef f(x):\n while True: pass"
    ),
    "exceptions_swallowed": "def f(x):\n while True:\n  try:\n   while True: pass\n  except BaseException: pass",
    "endless_output": "def f(x):\n while True: print('a' * 10000)",
    "endless_errors": "import sys\ndef f(x):\n while True: sys.stderr.write('a' * 10000)",
    "ten_gigabytes": "def f(x):\n a = bytearray(10 << 30)\n return x + 1",
    "ten_gigabytes_in_pieces": "def f(x):\n a = []\n while True: a.append(bytearray(1 << 20))",
    "ten_gigabytes_mapped": (
        "import mmap\ndef f(x):\n m = mmap.mmap(-1, 10 << 30)\n m[:] = b'a' * len(m)\n return x + 1"
    ),
    "fork_bomb": "import os\ndef f(x):\n while True: os.fork()",
    "fork_bomb_in_c": "import ctypes\ndef f(x):\n while ctypes.CDLL(None).fork() >= 0: pass\n return 0",
    "thread_bomb": (
        "import threading, time\ndef f(x):\n threading.stack_size(65536)\n"
        " while True: threading.Thread(target=time.sleep, args=(1e6,)).start()"
    ),
    "recursion": "def f(x): return f(x)",
    "recursion_without_limit": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x) + 1",
    "recursion_in_c": "def f(x):\n a = []\n for _ in range(10**6): a = [a]\n return repr(a)",
    "huge_power": "def f(x): return 9 ** 9 ** 9",
    # living on
    "forked_child_in_a_session_of_its_own": (
        "import os, time\ndef f(x):\n if os.fork() == 0:\n  os.setsid()\n  time.sleep(1e6)\n return 0"
    ),
    "started_program": (
        "import subprocess\ndef f(x):\n subprocess.Popen(['sleep', '1000'], start_new_session=True)\n return 0"
    ),
    "multiprocessing": (
        "import multiprocessing, time\ndef f(x): multiprocessing.Process(target=time.sleep, args=(1e6,)).start()"
    ),
    "threads_that_outlive": (
        "import threading\ndef spin():\n while True: pass\n"
        "for _ in range(4): threading.Thread(target=spin).start()\ndef f(x): return 0"
    ),
    # harming others
    "kill_the_parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef f(x): return 0",
    "kill_everyone": (
        "import os, signal\nfor n in (-1, 0, 1, -os.getpgid(0)):\n for s in (9, 15, 19):\n  try: os.kill(n, s)\n"
        "  except OSError: pass\ndef f(x): return 0"
    ),
    "no_such_function": "def g(x): return x + 1",
    "not_python": "this is no code",
    "null_byte": "def f(x): return x + 1\0",
    "empty": "",
}  # fmt: skip
SHORT = 0.6  # seconds; what would end by itself later scores nothing either


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=1) as made:
        yield made


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_run_it_scores_nothing_and_the_next_program_is_judged(sandbox: Sandbox, name: str):
    outcome = sandbox.run_tests(ATTACKS[name], TESTS, ["f"], SHORT)
    assert outcome.status in ("failed", "timeout"), outcome
    assert not all(outcome.passed)
    assert sandbox.run_tests(GOOD, TESTS, ["f"], 20.0).status == "passed"


def tried(sandbox: Sandbox, *statements: str, before: str = "") -> list[str]:
    """What becomes of statements, each tried in one program: "done", or the name of its error."""
    lines = [
        f"try:\n exec({statement!r})\n print('done')\nexcept BaseException as e: print(type(e).__name__)"
        for statement in statements
    ]
    output = sandbox.run_program("\n".join([before, *lines]), timeout=20.0)
    assert output.stderr == ""
    return output.stdout.splitlines()


def test_processes_are_left_by_an_attack_none_lives_on(sandbox: Sandbox):
    sandbox.start()
    before = {process.pid for process in psutil.process_iter()}
    for name in ("forked_child_in_a_session_of_its_own", "started_program", "multiprocessing", "threads_that_outlive"):
        sandbox.run_tests(ATTACKS[name], TESTS, ["f"], SHORT)
    (server,) = {client.pid for client in sandbox._idle.queue}
    assert psutil.Process(server).children(recursive=True) == []
    users = {process.uids().real for process in psutil.process_iter() if process.pid not in before}
    assert not any(user >= 0x70000000 for user in users)


def test_server_is_attacked_it_stays_the_same_process(sandbox: Sandbox):
    sandbox.start()
    (before,) = {client.pid for client in sandbox._idle.queue}
    for name in ("kill_the_parent", "kill_everyone", "junk_to_every_file"):
        sandbox.run_tests(ATTACKS[name], TESTS, ["f"], SHORT)
    (after,) = {client.pid for client in sandbox._idle.queue}
    assert before == after


def test_other_processes_are_looked_for_there_are_none(sandbox: Sandbox):
    program = f"""
import os
print(os.getpid(), os.getppid(), os.path.exists("/proc"), os.path.exists("/sys"))
for pid in {[os.getpid(), os.getppid(), 1, 2]}:
    try: os.kill(pid, 0); print("seen", pid == os.getpid())
    except OSError as error: print(type(error).__name__)
"""
    first, *rest = sandbox.run_program(program, timeout=20.0).stdout.splitlines()
    assert first == "1 0 False False"
    assert rest[-2] == "seen True"  # itself
    assert set(rest) - {rest[-2]} <= {"ProcessLookupError", "PermissionError"}


@own_tmp
def test_files_are_written_only_its_own_tmp_takes_them(sandbox: Sandbox, tmp_path: Path):
    tmp_path.chmod(0o777)
    places = [tmp_path, "/", "/etc", "/dev", "/usr/lib", Path(os.__file__).parent, Path(pytest.__file__).parent]
    writes = [f"open({str(Path(place) / 'palestra_was_here')!r}, 'w')" for place in places]
    assert "done" not in tried(sandbox, *writes)
    assert not any((Path(place) / "palestra_was_here").exists() for place in places)
    assert tried(sandbox, "open('/tmp/a', 'w').write('b')", "assert open('/tmp/a').read() == 'b'") == ["done", "done"]
    assert tried(sandbox, "import os; assert os.listdir('/tmp') == []") == ["done"]  # and it is gone for the next one
    assert not Path("/tmp/a").exists()


@own_tmp
def test_file_system_is_searched_nothing_but_python_is_there(sandbox: Sandbox, tmp_path: Path):
    (tmp_path / "tests.jsonl").write_text("assert f(41) == 42")
    program = f"""
import os
print(os.path.exists({str(tmp_path / "tests.jsonl")!r}), os.path.exists({__file__!r}), os.path.exists("/etc/passwd"))
print(*sorted(os.listdir("/tmp")))
print(*sorted(name for name in os.listdir("/dev")))
"""
    found = sandbox.run_program(program, timeout=20.0).stdout.splitlines()
    assert found[0] == "False False False"
    assert found[1] == ""
    assert set(found[2].split()) <= {"null", "zero", "full", "random", "urandom"}


@own_tmp
def test_files_without_end_are_written_the_disk_of_memory_is_small(sandbox: Sandbox):
    program = """
written = 0
try:
    for n in range(1000):
        with open(f"/tmp/{n}", "wb") as file:
            for _ in range(8): written += file.write(b"a" * (1 << 20))
except OSError as error: print(error.errno)
print(written >> 20)
"""
    assert sandbox.run_program(program, timeout=20.0).stdout.split() == ["28", "16"]  # ENOSPC
    assert tried(sandbox, "for n in range(2000): open(f'/tmp/{n}', 'w')") == ["OSError"]


def test_network_is_tried_nothing_arrives(sandbox: Sandbox, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(path := str(tmp_path / "socket"))
        local.listen()
        os.chmod(path, 0o777)
        port = server.getsockname()[1]
        arrived = threading.Event()

        def accept() -> None:
            try:
                server.accept()
                arrived.set()
            except OSError:
                pass

        threading.Thread(target=accept, daemon=True).start()
        attempts = tried(
            sandbox,
            f"socket.create_connection(('127.0.0.1', {port}), 1)",
            "socket.create_connection(('1.1.1.1', 53), 1)",
            "socket.getaddrinfo('example.org', 80)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'a', ('1.1.1.1', 53))",
            f"socket.socket(socket.AF_UNIX).connect({path!r})",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            before="import socket",
        )
        assert len(attempts) == 6
        assert "done" not in attempts
        assert not arrived.is_set()


def test_limits_are_raised_they_stay(sandbox: Sandbox):
    raised = [
        f"resource.setrlimit(resource.{name}, (resource.RLIM_INFINITY,) * 2)"
        for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_STACK")
    ]
    others = ["resource.prlimit(2, resource.RLIMIT_AS)", "os.nice(-5)", "os.setuid(0)", "os.sched_setaffinity(1, {0})"]
    assert "done" not in tried(sandbox, *raised, *others[:3], before="import resource, os")


def test_doors_to_the_kernel_are_tried_they_are_shut(sandbox: Sandbox):
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
null = ctypes.c_void_p(0)
attempts = {
    "ptrace": lambda: libc.ptrace(0, 0, null, null), "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, null), "chroot": lambda: libc.chroot(b"/tmp"),
    "memfd": lambda: libc.memfd_create(b"a", 0), "shmget": lambda: libc.shmget(0, 1 << 20, 0o1600),
    "parent_death": lambda: libc.prctl(1, 0, 0, 0, 0), "setns": lambda: libc.setns(0, 0),
    "fork": lambda: libc.fork(), "vfork": lambda: libc.syscall(58), "socket": lambda: libc.socket(2, 1, 0),
    "exec": lambda: libc.execl(b"/bin/true", b"true", null), "personality": lambda: libc.personality(0xFFFFFFFF),
}
print(*[name for name, attempt in attempts.items() if attempt() >= 0])
"""
    output = sandbox.run_program(program, timeout=20.0)
    assert (output.stdout.strip(), output.status) == ("", "ok"), output


SEARCH = """
import ctypes, gc, os, sys
def look():
    objects = gc.get_objects()
    texts = [value for one in objects for value in gc.get_referents(one) if isinstance(value, (str, bytes))]
    frame = sys._getframe(1)
    while frame:
        texts += map(repr, frame.f_locals.values())
        frame = frame.f_back
    for number in range(64):
        try: texts.append(os.pread(number, 100000, 0))
        except OSError: pass
    pages = {id(one) >> 12 for one in [*objects, *texts]}  # with what is left of objects that are gone
    memory = [ctypes.string_at(page << 12, 4096) for page in pages]
    needle = "eeff0c"[::-1].encode()  # made last, so as not to be found itself
    return [needle in (text if isinstance(text, bytes) else text.encode()) for text in [*texts, *memory]].count(True)
def f(x):
    raise ValueError(look())
"""


def test_tests_are_looked_for_in_memory_and_files_they_are_not_there(sandbox: Sandbox):
    tests = ["secret = 'c0ffee'\nassert f(1) == 'c0ffee'"]
    sandbox.run_tests("def f(x): return 0", tests, ["f"], 20.0)  # nor does a run before leave anything
    outcome = sandbox.run_tests(SEARCH, tests, ["f"], 30.0)
    assert outcome.note == "test 1: ValueError: 0"


def test_function_ends_loops_of_a_test_early_it_does_not_pass(sandbox: Sandbox):
    code = "def f(x): raise StopIteration"
    for test in ("assert all(map(f, [1, 2]))", "assert list(map(f, [1, 2])) == []", "for _ in map(f, [1]): assert 0"):
        assert sandbox.run_tests(code, [test], ["f"], 20.0).status == "failed"


def test_death_is_caught_by_a_test_that_expects_any_error_it_does_not_pass(sandbox: Sandbox):
    test = "try:\n f(-1)\nexcept:\n pass\nelse:\n assert False"
    assert sandbox.run_tests("def f(x): raise ValueError", [test], ["f"], 20.0).status == "passed"
    for code in (
        "import os\ndef f(x): os._exit(0)",
        "def f(x): return object()",
        "import os\ndef f(x): os.closerange(3, 9)",
    ):
        assert sandbox.run_tests(code, [test], ["f"], 20.0).status == "failed"


def test_output_has_no_end_the_program_is_killed_soon(sandbox: Sandbox):
    output = sandbox.run_program("while True: print('a' * 1000)", timeout=60.0)
    assert output.status == "output"
    assert len(output.stdout) == 64 << 10
    assert output.seconds < 30
    assert sandbox.run_program("import sys\nwhile True: sys.stderr.write('a' * 1000)", timeout=60.0).status == "output"


def test_memory_is_asked_for_the_program_sees_an_error(sandbox: Sandbox):
    assert tried(sandbox, "bytearray(10 << 30)", "bytearray(1 << 20)", "list(range(10**9))") == [
        "MemoryError",
        "done",
        "MemoryError",
    ]
