"""Joins the machines of a job to one Ray cluster and runs its command on the first: `python -m palestra.launch.node …`.

Every machine runs it. Slurm, SageMaker, SkyPilot or dstack say who is who. The others end when the first is gone.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

JOIN_SECONDS = 600.0
GONE = 3
"""How often in a row the head may not answer."""
POLL_SECONDS = 2.0
SAGEMAKER = Path("/opt/ml/input/config/resourceconfig.json")


def machines() -> tuple[int, int, str]:
    """The rank of this machine, how many there are, and the address of the first."""
    env = os.environ
    if "SLURM_NODEID" in env:
        return int(env["SLURM_NODEID"]), int(env["SLURM_NNODES"]), env["PALESTRA_HEAD"]
    if "SKYPILOT_NODE_RANK" in env:
        addresses = env["SKYPILOT_NODE_IPS"].split()
        return int(env["SKYPILOT_NODE_RANK"]), len(addresses), addresses[0]
    if "DSTACK_NODE_RANK" in env:
        return int(env["DSTACK_NODE_RANK"]), int(env["DSTACK_NODES_NUM"]), env["DSTACK_MASTER_NODE_IP"]
    if SAGEMAKER.exists():
        about = json.loads(SAGEMAKER.read_text())
        hosts = sorted(about["hosts"])
        return hosts.index(about["current_host"]), len(hosts), socket.gethostbyname(hosts[0])
    return 0, 1, "127.0.0.1"


def main(command: list[str]) -> int:
    """Run the command on the first machine; the exit code."""
    rank, count, head = machines()
    if count == 1:
        return subprocess.call(command)
    port = os.environ.get("PALESTRA_RAY_PORT", "6379")
    address = f"{head}:{port}"
    if rank:
        _follow(address)
        return 0
    with _ray("--head", f"--node-ip-address={head}", f"--port={port}", "--include-dashboard=false") as started:
        os.environ["RAY_ADDRESS"] = address
        _wait(f"Ray did not start at {address}", lambda: _answers(address), started)
        _join(address, count)
        with subprocess.Popen(command) as process:
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            return process.wait()


def _join(address: str, count: int) -> None:
    """Until all machines are there."""
    import ray

    ray.init(address=address, log_to_driver=False)
    missing = f"not all {count} machines have joined Ray at {address} after {JOIN_SECONDS:g} s"
    _wait(missing, lambda: sum(node["Alive"] for node in ray.nodes()) >= count)
    ray.shutdown()


def _follow(address: str) -> None:
    """Another machine: be part of the cluster while its head answers. SIGTERM is for the head, which saves first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait(f"no Ray head answers at {address}", lambda: _answers(address))
    missed = 0
    with _ray(f"--address={address}") as process:
        while missed < GONE and process.poll() is None:
            time.sleep(POLL_SECONDS)
            missed = 0 if _answers(address) else missed + 1


def _wait(otherwise: str, ready: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Until it is ready; the job ends if that takes too long or the process is gone."""
    until = time.monotonic() + JOIN_SECONDS
    while not ready():
        if time.monotonic() > until or (process is not None and process.poll() is not None):
            raise SystemExit(otherwise)
        time.sleep(0.5)


@contextmanager
def _ray(*options: str) -> Iterator[subprocess.Popen]:
    """Ray on this machine, as long as the block lasts."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:  # Ray drains a node for half a minute, which is of no use at the end
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 2.0).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
