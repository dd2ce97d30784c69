"""The real `palestra` command in a scratch folder, and small specs for it."""

import contextlib
import fcntl
import importlib.util
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zygote
from hypothesis import settings
from zygote import COMMAND, ENVIRONMENT, RUN_COMMAND

from palestra.spec.shape import precision

# A shared machine may be slow at any moment: examples have no deadline. `make test` takes few of them, `make test-all`
# as many as each test asks for (--hypothesis-profile full).
QUICK = 15
settings.register_profile("full", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=QUICK)
settings.load_profile("quick")

# About 30 ms a step on one core.
SHORT: dict[str, Any] = {
    "kind": "control",
    "name": "short",
    "env": {"id": "CartPole-v1", "num_envs": 4},
    "algorithm": {"name": "ppo", "horizon": 32, "minibatch": 32, "epochs": 2},
    "net": {"hidden": [16]},
    "train": {"frames": 36 * 128},
    "eval": {"episodes": 4, "num_envs": 4},
    "every": {"checkpoint": ["3 steps", "0.3 seconds"], "eval": "7 steps"},
}


# Where torch is not installed (there may be no build for this Python) the tests that need none are run.
HAS_TORCH = importlib.util.find_spec("torch") is not None


# Marks of a case in bf16, which this CPU may take a hundred times as long for as for FP32.
BF16 = () if precision("auto", "cpu") == "bf16" else (pytest.mark.slow,)


class WithoutTorch:
    """Skips what imports torch, module or test."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Asked by `import` before any other finder."""
        if name == "torch":
            pytest.skip("needs torch, which is not installed", allow_module_level=True)


if not HAS_TORCH:
    sys.meta_path.insert(0, WithoutTorch())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Without torch, a command or worker that says it needs the extra `train` skips its test."""
    report: Any = yield
    if (
        not HAS_TORCH
        and report.failed
        and ("palestra[train]" in str(report.longrepr) or "'torch'" in str(report.longrepr))
    ):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], "needs torch, which is not installed")
    return report


def pytest_configure() -> None:
    """Workers of pools in this process are forked too, and runs draw no pictures unless asked."""
    zygote.install()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells start what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take long are begun first: at the end no process waits for another's.
LONG = (
    "e2e", "kill", "page", "cluster", "pipeline", "search", "recipes", "ranks", "install", "learning", "docs",
    "posttrain", "control",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files, which xdist hands out in their order (--no-loadscope-reorder)."""
    items.sort(key=lambda item: min((at for at, word in enumerate(LONG) if word in item.path.name), default=len(LONG)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Hold examples that a test asks for itself to the quick profile too."""
    test = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if own is not None and settings.default.max_examples == QUICK < own.max_examples:
        test._hypothesis_internal_use_settings = settings(own, max_examples=QUICK)


@contextlib.contextmanager
def small_disk(path: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("no right to mount a small disk here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


class Scratch:
    """A folder with specs and runs, and the command started there as a process of its own."""

    def __init__(self, path: Path):
        self.path = path
        self.started: list[subprocess.Popen] = []

    def spec(self, name: str = "short", base: dict[str, Any] | None = None, **changes: Any) -> str:
        """Write a spec: SHORT with some fields of its blocks changed (`train={"frames": 100}`)."""
        data = {**(SHORT if base is None else base), "name": name}
        for key, value in changes.items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
        (self.path / f"{name}.yaml").write_text(yaml.safe_dump(data))
        return f"{name}.yaml"

    def start(self, *arguments: str, before: str | None = None, **environment: str) -> subprocess.Popen:
        """Start `palestra …` in a process group of its own; `before` is Python that it runs first."""
        command = [COMMAND] if before is None else [sys.executable, "-c", f"{before}\n{RUN_COMMAND}"]
        process = zygote.Popen(
            [*command, *arguments],
            cwd=self.path,
            env={**ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, before: str | None = None, **environment: str) -> subprocess.CompletedProcess:
        """Run `palestra …` to its end."""
        process = self.start(*arguments, before=before, **environment)
        out, err = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def here(self, *arguments: str) -> subprocess.CompletedProcess:
        """The same in this process, which has imported already what a new one takes seconds for."""
        from palestra.cli import main  # here: most tests need no command

        root, code = logging.getLogger(), None
        handlers, before = {handler: handler.level for handler in root.handlers}, signal.getsignal(signal.SIGTERM)
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            patch.chdir(self.path)
            patch.setattr(sys, "argv", ["palestra", *arguments])
            try:
                main()
            except SystemExit as end:
                code = end.code
            finally:  # what `main` sets for a whole process
                signal.signal(signal.SIGTERM, before)
                logging.captureWarnings(False)
                for handler, level in handlers.items():
                    handler.setLevel(level)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())

    def trial(self, name: str = "short") -> Path:
        """The folder of the only run of this name."""
        (pointer,) = self.path.glob(f"runs/{name}/*/trial.json")
        return pointer.parent

    def session(self, name: str = "short", seed: int = 0) -> Path:
        """The folder of one seed of it."""
        return self.trial(name) / "sessions" / str(seed)

    def status(self, name: str = "short", seed: int = 0) -> dict[str, Any]:
        """The status of one seed of it."""
        return json.loads((self.session(name, seed) / "status.json").read_text())

    def rows(self, name: str = "short", seed: int = 0) -> list[dict[str, Any]]:
        """Its rows of metrics, without the timings."""
        return numbers(self.session(name, seed))

    def end(self) -> None:
        """Kill what a failed test has left behind."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def numbers(session: Path) -> list[dict[str, Any]]:
    """The rows of a session's metrics.jsonl without what is under time/."""
    rows = [json.loads(line) for line in (session / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def last_step(session: Path) -> int:
    """The step of the last whole row in metrics.jsonl, 0 where there is none yet."""
    path = session / "metrics.jsonl"
    if not path.exists():
        return 0
    whole, newline, _ = path.read_bytes().rpartition(b"\n")
    return json.loads(whole.rpartition(b"\n")[2])["step"] if newline else 0


def wait_until(
    condition: Callable[[], Any], process: subprocess.Popen, seconds: float = 120.0, every: float = 0.005
) -> Any:
    """Poll until the condition holds; a process that ends before is an error that shows what it said."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"ended with {process.returncode} before its time:\n{out}{err}")
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(every)
    return value


def lines_run(call: Callable[[], Any]) -> int:
    """How many lines of Python a call runs: the work it does, whatever the clock says."""
    count, before = 0, sys.gettrace()

    def trace(*_: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def fast_only(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """The cases of a parameter, of which `make test` runs the fast ones: they show what the others show too."""
    return [case if case in fast else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="session")
def one_ray() -> Iterator[str]:
    """A Ray cluster for all tests of this process, with more cores than the machine has, and two GPUs in name only."""
    from palestra.cluster.ray import connect

    pytest.importorskip("ray", reason="pip install 'palestra[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
        connect("local", num_cpus=8, num_gpus=2, object_store_memory=100 * 2**20)
    import ray

    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs draw what they draw outside of tests."""
    monkeypatch.setenv(zygote.PICTURES, "1")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """A run of SHORT that nobody interrupted; only to be read."""
    return _trained_once(tmp_path_factory, "finished", {zygote.PICTURES: "1"}, max_session=1)


@pytest.fixture(scope="session")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """The same with two seeds side by side."""
    return _trained_once(tmp_path_factory, "two_seeds", {}, max_session=2)


def _trained_once(factory: pytest.TempPathFactory, name: str, environment: dict[str, str], **changes: Any) -> Scratch:
    """Train SHORT, changed so, in a folder that all processes of this pytest run share."""
    base = factory.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    path.mkdir(exist_ok=True)
    made = Scratch(path)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "runs").exists():
            result = made("train", made.spec(**changes), "--quiet", **environment)
            assert result.returncode == 0, result.stderr
    return made
