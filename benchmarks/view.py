"""How fast the web view shows what is large: 500 runs, ten million rollouts, spans and rows, a run that goes on.

    python benchmarks/view.py [--rows 10000000] [--folder /dev/shm/view] [--live 300]

Prints a line of JSON for each measurement: what was asked, seconds (the first time and then the median of five), and
the resident memory of the server in MB. The server is a process of its own, asked over HTTP. Needs some 9 GB.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from palestra.runs.run import list_runs
from palestra.view.demo import make_demo

GROUPS = 64  # of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rollouts, and spans")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/palestra_view"), help="removed at the end")
    parser.add_argument("--live", type=int, default=300, help="seconds to follow a run of 20 rows a second")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        measure(given)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)  # an index may still be written


def measure(given: argparse.Namespace) -> None:
    began = time.perf_counter()
    root = given.folder / "runs"
    make_demo(root)
    name = make_large(root, given.rows, given.runs)
    written = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    tell(what="files", seconds=time.perf_counter() - began, runs=given.runs, rows=given.rows, bytes=written)
    environment = os.environ | {"PALESTRA_CACHE": str(given.folder / "cache")}
    command = [sys.executable, "-m", "palestra", "view", str(root), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            server = Server(process.stdout.readline().strip(), process.pid)
            steps = given.rows // GROUPS
            server.time("runs: the list", "runs")
            server.time("run: its page", "run", run=name)
            server.time("rollouts: the last step", "rollouts", run=name)
            server.time("timeline: the last spans", "timeline", run=name)
            server.time("rollouts: a step in the middle", "rollouts", run=name, step=steps // 2)
            server.time("rollouts: filter of a step", "rollouts", run=name, step=steps // 2, status="wrong")
            server.time("rollouts: a group in full", "rollouts/group", run=name, at=0)
            server.time("series: leading metrics", "series", run=name)
            server.time("data: the first rows", "data/rows", path="runs/rows.jsonl")
            server.time("data: the last rows", "data/rows", path="runs/rows.jsonl", row=given.rows - 10)
            server.time("data: half a second of a search", "data/rows", path="runs/rows.jsonl", text="nowhere")
            indexed(server, name, "rollouts")
            server.time("rollouts: a problem in all steps", "rollouts", run=name, step="all", problem="sums/train/77")
            server.time("rollouts: timeouts in all steps", "rollouts", run=name, step="all", status="timeout")
            indexed(server, name, "timeline")
            end = server.get("timeline", run=name)["end"]
            for share in (1.0, 0.3, 0.05, 0.001):
                low = end * (0.5 - share / 2)
                server.time(f"timeline: {share:.1%} of it", "timeline", run=name, low=low, high=low + share * end)
            follow(server, root, given.live)
        finally:
            process.terminate()


class Server:
    def __init__(self, address: str, pid: int):
        self.address, self.process = address, psutil.Process(pid)

    def get(self, endpoint: str, /, **params: Any) -> Any:
        with urllib.request.urlopen(f"{self.address}api/{endpoint}?{urllib.parse.urlencode(params)}") as answer:
            return json.load(answer)

    @property
    def megabytes(self) -> float:
        return self.process.memory_info().rss / 2**20

    def time(self, what: str, endpoint: str, /, **params: Any) -> None:
        seconds = []
        for _ in range(6):
            began = time.perf_counter()
            self.get(endpoint, **params)
            seconds.append(time.perf_counter() - began)
        tell(what=what, first=seconds[0], then=statistics.median(seconds[1:]), megabytes=self.megabytes)


def indexed(server: Server, name: str, what: str) -> None:
    began, most = time.perf_counter(), 0.0
    while (server.get(what, run=name))["indexed"] < 1:
        time.sleep(1)
        children = server.process.children(recursive=True)
        most = max([most, *(child.memory_info().rss / 2**20 for child in children)])
    tell(
        what=f"index of {what}", seconds=time.perf_counter() - began, megabytes=server.megabytes, indexer_megabytes=most
    )


def follow(server: Server, root: Path, seconds: int) -> None:
    """A run of 20 rows a second, asked for as often as the page does."""
    run = [run for run in list_runs(root) if run.name == "demo_sums"][1]
    name, session = f"{run.path.parent.name}/{run.path.name}", run.sessions[0].path
    sizes, times, step = [], [], 1000
    with (session / "metrics.jsonl").open("a") as metrics, (session / "rollouts.jsonl").open("a") as rollouts:
        group = (session / "rollouts.jsonl").read_text().splitlines()[0]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                step += 1
                metrics.write(json.dumps({"step": step, **{f"metric/{n}": step / (n + 1) for n in range(60)}}) + "\n")
                rollouts.write(group.replace('"step": 1,', f'"step": {step},', 1) + "\n")
            metrics.flush()
            rollouts.flush()
            began = time.perf_counter()
            server.get("runs")
            server.get("series", run=name, metric="metric/3")
            server.get("rollouts", run=name)
            times.append(time.perf_counter() - began)
            sizes.append(server.megabytes)
            time.sleep(max(0.0, 1.0 - (time.perf_counter() - began)))
    quarter = len(sizes) // 4 or 1
    first, last = (statistics.fmean(part) for part in (sizes[quarter : 2 * quarter], sizes[-quarter:]))
    tell(what="live: 20 rows a second", seconds=seconds, then=statistics.median(times), megabytes=sizes[-1],
         megabytes_second_quarter=first, megabytes_last_quarter=last)  # fmt: skip


def make_large(root: Path, rows: int, runs: int) -> str:
    """Many runs, and one with long files in the format of real ones; the name of that."""
    trial = next(run for run in list_runs(root) if run.name == "demo_sums").path
    for number in range(runs - len(list_runs(root))):
        copy = root / f"many_{number % 20:02}" / f"20250101T{number:06}-{number:04x}"
        shutil.copytree(trial, copy, ignore=shutil.ignore_patterns("rollouts.jsonl", "trace.json", "checkpoints"))
        info = json.loads((copy / "trial.json").read_text())
        (copy / "trial.json").write_text(json.dumps(info | {"name": copy.parent.name, "id": copy.name}))
    with (root / "rows.jsonl").open("w") as file:
        file.writelines(f'{{"id": {n}, "text": "row {n} of a dataset, with some text in it"}}\n' for n in range(rows))
    session = trial / "sessions" / "0"
    one = (
        '{"tokens": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 1], "logprobs": [0.0, -0.5, -0.25, -1.5], "versions": [-1, 3, '
        '3, 3], "reward": %s, "verdict": {"score": %s, "status": "%s", "parts": {}, "seconds": 0.01, "sandbox": null, '
        '"note": ""}, "stop_reason": "eos", "completion": "so %d", "turns": [[1, 4]], "advantages": 0.5}'
    )
    made = [
        one % pair
        for pair in (("1.0", "1.0", "correct", 42), ("0.0", "0.0", "wrong", 41), ("0.0", "0.0", "timeout", 0))
    ]
    with (session / "rollouts.jsonl").open("w", buffering=1 << 22) as file:
        for number in range(rows):
            pair = f"{made[number % 2]}, {made[2] if number % 500_000 == 7 else made[number % 3 == 0]}"
            file.write(
                f'{{"number": {number}, "step": {number // GROUPS + 1}, "fate": "trained", "problem": {{"id": '
                f'"sums/train/{number % 100_000}", "prompt": "{number % 97}+{number % 89}=", "row": {{"answer": 4}}}}, '
                f'"version": {number // GROUPS}, "asked": 2, "seconds": 0.5, "trajectories": [{pair}]}}\n'
            )
    with (session / "trace.json").open("w", buffering=1 << 22) as file:
        file.write('[\n{"ph":"M","name":"start","args":{"unix_ns":1700000000000000000}}')
        for lane in range(64):
            track = "trainer/0" if lane == 0 else f"generator/{lane}"
            file.write(f',\n{{"ph":"M","name":"thread_name","pid":1,"tid":{lane},"args":{{"name":"{track}"}}}}')
        for number in range(rows):
            lane, name = (0, "train") if number % 500 == 0 else (1 + number % 63, "sample")
            duration = 4e6 if lane == 0 else 5e5 + number % 1000
            file.write(
                f',\n{{"ph":"X","name":"{name}","pid":1,"tid":{lane},"ts":{number * 1e4 + 5e6 - duration:.3f},'
                f'"dur":{duration:.3f},"args":{{"step":{number // GROUPS + 1}}}}}'
            )
        file.write("\n]\n")
    return f"{trial.parent.name}/{trial.name}"


def tell(**line: Any) -> None:
    print(
        json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in line.items()}),
        flush=True,
    )


if __name__ == "__main__":
    main()
