"""Large folders in the web view: what a request reads and what the server holds do not grow with the files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from view import Server, make_large

from palestra.view.demo import make_demo

MEGABYTE = 1 << 20


def read_bytes(server: Server) -> int:
    """What the process has read so far, from disk or not."""
    lines = Path(f"/proc/{server.process.pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what a process reads by /proc")
@pytest.mark.parametrize("rows", [30_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_requests_read_little_of_long_files_and_the_server_stays_small(tmp_path: Path, rows: int):
    make_demo(tmp_path / "runs")
    name = make_large(tmp_path / "runs", rows, 20)
    sizes = [path.stat().st_size for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert sum(sizes) > 20 * MEGABYTE
    command = [sys.executable, "-m", "palestra", "view", str(tmp_path / "runs"), "--port", "0"]
    environment = os.environ | {"PALESTRA_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            server = Server(process.stdout.readline().strip(), process.pid)
            server.get("runs")
            for path, params in (
                ("rollouts", {}),
                ("rollouts", {"step": rows // 128}),
                ("timeline", {}),
                ("timeline", {"step": rows // 128}),
                ("rollouts/group", {"at": 0}),
            ):
                before = read_bytes(server)
                server.get(path, run=name, **params)
                assert read_bytes(server) - before < 12 * MEGABYTE, path
            step = server.get("rollouts", run=name, step=rows // 128)
            assert [group["number"] for group in step["groups"]][:2] == [
                64 * (rows // 128 - 1),
                64 * (rows // 128 - 1) + 1,
            ]
            assert server.megabytes < 500
        finally:
            process.terminate()
        process.wait()
