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
    address = f"{head}:{os.environ.get('PALESTRA_RAY_PORT', '6379')}"
    if count == 1:
        return subprocess.call(command)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    if rank:
        return _follow(address, [*ray, f"--address={address}"])
    port = f"--port={address.rpartition(':')[2]}"
    started = _start([*ray, "--head", f"--node-ip-address={head}", port, "--include-dashboard=false"])
    try:
        os.environ["RAY_ADDRESS"] = address
        _wait(address, count, started)
        with subprocess.Popen(command) as process:
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            return process.wait()
    finally:
        _end(started)


def _wait(address: str, count: int, started: subprocess.Popen) -> None:
    """Until all machines have joined."""
    import ray

    until = time.monotonic() + JOIN_SECONDS
    while not _answers(address):
        if started.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"Ray did not start at {address}")
        time.sleep(0.5)
    ray.init(address=address, log_to_driver=False)
    while (joined := sum(node["Alive"] for node in ray.nodes())) < count:
        if time.monotonic() > until:
            raise SystemExit(f"{joined} of {count} machines have joined Ray at {address} after {JOIN_SECONDS:g} s")
        time.sleep(0.5)
    ray.shutdown()


def _follow(address: str, start: list[str]) -> int:
    """Another machine: be part of the cluster while its head answers. SIGTERM is for the head, which saves first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    until = time.monotonic() + JOIN_SECONDS
    while not _answers(address):
        if time.monotonic() > until:
            raise SystemExit(f"no Ray head answers at {address}")
        time.sleep(POLL_SECONDS)
    process, missed = _start(start), 0
    try:
        while missed < GONE and process.poll() is None:
            time.sleep(POLL_SECONDS)
            missed = 0 if _answers(address) else missed + 1
    finally:
        _end(process)
    return 0


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen) -> None:
    """Ray drains a node for half a minute, which is of no use at the end."""
    process.terminate()
    try:
        process.wait(3.0)
    except subprocess.TimeoutExpired:
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
