"""The other levels of the sandbox: as an ordinary user with namespaces, as root without, weak; and refusals.

Each runs in a process of its own. As root it first makes, for itself alone, mounts where everyone can read Python, so
that it does not depend on where Python is installed, and then becomes the user that is asked for.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.errors import UsageError
from palestra.tasks.sandbox import filter, kernel, levels
from palestra.tasks.sandbox.levels import Way, unused_uids
from palestra.tasks.sandbox.sandbox import Sandbox

ROOT = Path(__file__).parents[1]
ORDINARY = 54321
LONG = 30.0
CHECKS = """
import os, resource, socket
def attempt(name, function):
    try: function()
    except BaseException as error: print(name, type(error).__name__)
    else: print(name, "done")
attempt("tmp", lambda: open(os.path.join(os.environ["TMPDIR"], "a"), "w").write("b"))
attempt("import", lambda: __import__("xml.dom.minidom"))
attempt("network", lambda: socket.socket())
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("parent", lambda: os.kill(os.getppid(), 9))
attempt("everyone", lambda: os.kill(-1, 9))
attempt("limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2))
attempt("memory", lambda: bytearray(10 << 30))
attempt("secret", lambda: open(SECRET).read())
attempt("tests", lambda: open(TESTS).read())
attempt("proc", lambda: open("/proc/self/status").read())
attempt("write", lambda: open(os.path.join(OPEN, "b"), "w"))
"""
HELD = "import", "tmp"  # what a program may do
GOOD, TESTED = "def f(x): return x + 1", ["assert f(1) == 2"]


def readable_by_all() -> None:
    """Show, to this process alone, Python and this checkout where everyone can read them."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", None, kernel.REC | kernel.PRIVATE)
    wanted = [sys.base_prefix, sys.prefix, str(ROOT)]
    blocked = {str(folder) for path in wanted for folder in Path(path).parents if not folder.stat().st_mode & 1}
    for folder in sorted(blocked):
        inside = [path for path in dict.fromkeys(wanted) if path.startswith(f"{folder}/")]
        kept = {path: tempfile.mkdtemp() for path in inside}
        for path, place in kept.items():
            kernel.mount(path, place, None, kernel.BIND | kernel.REC)
        kernel.mount("tmpfs", folder, "tmpfs", 0, "mode=755")
        for path, place in kept.items():
            os.makedirs(path, exist_ok=True)
            kernel.mount(place, path, None, kernel.BIND | kernel.REC)


def main(user: int, level: str, folder: str, attacks: bool) -> None:
    """In a process of its own: become a user, make a sandbox of that level, and print what was possible in it."""
    if os.geteuid() == 0:
        readable_by_all()
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    with Sandbox(workers=1, strongest=level, weakest=level) as made:  # pyrefly: ignore
        names = {"SECRET": f"{folder}/secret", "TESTS": f"{folder}/tests", "OPEN": f"{folder}/open"}
        checks = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + CHECKS
        output = made.run_program(checks, timeout=LONG)
        answer: dict[str, Any] = {
            "level": made.start(),
            "tried": dict(line.split() for line in output.stdout.splitlines()),
            "stderr": output.stderr,
            "good": made.run_tests(GOOD, TESTED, ["f"], LONG).status,
            "users": made.run_program("import os; print(os.getuid(), os.getgroups())", timeout=LONG).stdout,
        }
        if attacks:
            from test_tasks_sandbox_attacks import ATTACKS, SHORT, TESTS

            found = {name: made.run_tests(code, TESTS, ["f"], SHORT).status for name, code in ATTACKS.items()}
            answer["attacks"] = {name: status for name, status in found.items() if status not in ("failed", "timeout")}
            answer["good"] = made.run_tests(GOOD, TESTED, ["f"], LONG).status
    answer["left"] = sorted(os.listdir(tempfile.gettempdir()))
    print(json.dumps(answer))


@pytest.fixture
def folder() -> Iterator[Path]:
    """For everyone, unlike `tmp_path`, which every pytest that starts takes for its own user alone."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


def at(folder: Path, user: int, level: str, *, attacks: bool = False) -> dict[str, Any]:
    """What was possible as a user at a level; `folder` has a file for nobody, one for all, a folder open to all."""
    if os.geteuid() != 0 and user != os.geteuid():
        pytest.skip("needs root, to become another user")
    (folder / "secret").write_text("a")
    (folder / "secret").chmod(0o600)
    (folder / "tests").write_text("assert f(1) == 2")
    for name in ("open", "tmp"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    call = f"import test_tasks_sandbox_levels as t; t.main({user}, {level!r}, {str(folder)!r}, {attacks})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", call],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(folder / "tmp")},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["stderr"] == ""
    assert answer["good"] == "passed"
    assert answer.get("attacks", {}) == {}
    assert not [name for name in answer["left"] if name.startswith("palestra_sandbox")]
    assert list((folder / "open").iterdir()) == []
    return answer


def held(answer: dict[str, Any]) -> set[str]:
    """What was possible."""
    assert len(answer["tried"]) == 13
    return {name for name, what in answer["tried"].items() if what == "done"}


@pytest.mark.parametrize("attacks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ordinary_user_has_namespaces_nothing_but_tmp_and_python_is_left(folder: Path, attacks: bool):
    user = ORDINARY if os.geteuid() == 0 else os.geteuid()
    answer = at(folder, user, "namespaces", attacks=attacks)
    assert answer["level"] == "namespaces"
    assert held(answer) == set(HELD)
    assert answer["tried"]["secret"] == "FileNotFoundError"
    assert answer["users"].split()[0] == str(user)


@pytest.mark.parametrize("attacks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_root_has_no_namespaces_a_user_that_nobody_is_runs_it(folder: Path, attacks: bool):
    answer = at(folder, 0, "uid", attacks=attacks)
    assert answer["level"] == "uid"
    seen = {"tests", "proc", "write"} if not landlock_is_there() else set()
    assert held(answer) == {*HELD, *seen}
    user, groups = answer["users"].split()
    assert int(user) >= levels.FEW_UIDS
    assert groups == "[]"


@pytest.mark.parametrize("attacks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_weak_level_still_has_the_limits_and_the_filter(folder: Path, attacks: bool):
    user = ORDINARY if os.geteuid() == 0 else os.geteuid()
    answer = at(folder, user, "weak", attacks=attacks)
    assert answer["level"] == "weak"
    seen = {"secret", "tests", "proc", "write"} if not landlock_is_there() else set()
    assert held(answer) - seen == set(HELD)


def landlock_is_there() -> bool:
    from palestra.tasks.sandbox import filter

    return filter.landlock_version() > 0


@pytest.fixture
def without_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers in which the kernel refuses namespaces, started by a process that is not root."""
    boot = "import palestra.tasks.sandbox.kernel as k\n"
    boot += "def refuse(*a): raise PermissionError(1, 'Operation not permitted')\n"
    boot += "k.unshare = refuse\n"
    import palestra.tasks.sandbox.client as client

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(client, "BOOT", client.BOOT.replace("from palestra", boot + "from palestra", 1))


@pytest.mark.usefixtures("without_ways")
def test_machine_allows_neither_code_is_refused_unless_weak_is_asked_for():
    with Sandbox(workers=1) as made, pytest.raises(UsageError, match=r"namespaces as an ordinary user.*sandbox: weak"):
        made.start()
    with Sandbox(workers=1, weakest="weak") as made:
        outcome = made.run_tests(GOOD, TESTED, ["f"], LONG)
        assert (outcome.status, outcome.level) == ("passed", "weak")
        assert made.run_tests("import os; os._exit(0)", TESTED, ["f"], LONG).status == "failed"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv, to take rights"
)
def test_root_of_a_container_without_rights_is_refused_with_the_reason():
    """Its user namespace has no other users to run code as, and allows no further namespace."""
    start = "from palestra.tasks.sandbox.sandbox import Sandbox; Sandbox(workers=1).start()"
    bare = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", bare, "sh", sys.executable, "-c", start]
    if subprocess.run([*command[:3], "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert "UsageError: code cannot be run safely on this machine (namespaces: " in done.stderr
    assert "uid: [Errno" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to see that it is given up")
def test_users_are_taken_nobody_has_them():
    first, second = unused_uids()
    assert first != second
    assert min(first, second) >= levels.FEW_UIDS
    with Sandbox(workers=2) as made:
        seen = {made.run_program("import os; print(os.getuid(), os.geteuid())", timeout=LONG).stdout for _ in range(2)}
    ((real, effective),) = [line.split() for line in seen]
    assert real == effective
    assert int(real) >= levels.FEW_UIDS


def test_filter_is_built_every_jump_stays_inside():
    if not filter.available():
        pytest.skip("system calls of this machine are not known")
    code = filter.program(4321)
    steps = [code[at : at + 8] for at in range(0, len(code), 8)]
    assert len(steps) < 4096  # the kernel's limit
    for place, step in enumerate(steps):
        operation, true, false = int.from_bytes(step[:2], "little"), step[2], step[3]
        if operation in (filter.EQUAL, filter.AT_LEAST, filter.ANY_BIT):
            assert place + 1 + max(true, false) < len(steps)
    assert int.from_bytes(steps[-1][:2], "little") == filter.RETURN


def test_ways_are_listed_the_strongest_comes_first():
    names = [way.level for way in levels.ways("namespaces", "weak")]
    assert names == sorted(names, key=levels.LEVELS.index)
    assert names[-1] == "weak"
    assert levels.ways("uid", "uid") == ([Way("uid")] if os.geteuid() == 0 else [])
    assert levels.prepare(Way("weak"), "/nowhere", ["/usr"]).namespaces == (0, 0)
