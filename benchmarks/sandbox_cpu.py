"""Programs a second through the sandbox, on all cores of this machine; one JSON line for each way of running them.

    python benchmarks/sandbox_cpu.py

`judged`: a function and three tests, each in a process of its own, as MBPP is judged. `program`: a program with its
output, as the Python tool runs it. `wrong`: judged, and half of them wrong. `cpu_ms` is the processor time of one, all
processes counted: with `cores` it tells what the machine could do with nothing else at work.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from palestra.tasks.sandbox.sandbox import Sandbox

CODE = "import re\ndef snake(text):\n    return re.sub(r'(?<!^)(?=[A-Z])', '_', text).lower()\n"
TESTS = [f"assert snake({given!r}) == {wanted!r}" for given, wanted in (("A", "a"), ("AbCd", "ab_cd"), ("aB", "a_b"))]
WRONG = "def snake(text):\n    return text.lower()\n"


def judged(sandbox: Sandbox, number: int) -> None:
    assert sandbox.run_tests(CODE, TESTS, ["snake"], 60.0).status == "passed"


def wrong(sandbox: Sandbox, number: int) -> None:
    expected = "failed" if number % 2 else "passed"
    assert sandbox.run_tests(WRONG if number % 2 else CODE, TESTS, ["snake"], 60.0).status == expected


def program(sandbox: Sandbox, number: int) -> None:
    assert sandbox.run_program(f"print(sum(range({number})))", timeout=60.0).stdout == f"{sum(range(number))}\n"


def measure(run: Callable[[Sandbox, int], None], workers: int, seconds: float) -> dict[str, object]:
    """Run one after another in as many threads as there are workers, for some seconds."""

    def thread(first: int) -> int:
        number, end = first, time.monotonic() + seconds
        while time.monotonic() < end:
            run(sandbox, number)
            number += workers
        return (number - first) // workers

    with Sandbox(workers=workers) as sandbox, ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda first: run(sandbox, first), range(4 * workers)))  # starts all servers
        before, started = _processor(), time.monotonic()
        count = sum(pool.map(thread, range(workers)))
        took, spent, level = time.monotonic() - started, _processor() - before, sandbox.start()
    return {
        "programs_per_s": round(count / took, 1),
        "cpu_ms": round(1000 * spent / count, 2),
        "programs": count,
        "seconds": round(took, 2),
        "workers": workers,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "level": level,
    }


def _processor() -> float:
    """Seconds of processor time that this process, its servers and all programs that have ended took."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children())]
    return sum(sum(used[:4]) for used in times) - sum(times[0][2:4])  # of this process not its ended servers


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = arguments.parse_args()
    for run in (judged, wrong, program):
        print(json.dumps({"what": run.__name__, **measure(run, given.workers, given.seconds)}), flush=True)


if __name__ == "__main__":
    main()
