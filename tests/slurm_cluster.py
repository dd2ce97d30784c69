"""A real Slurm on this machine: munged, slurmctld and two slurmd, in a folder of their own."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun")
CONFIG = """\
ClusterName=palestra
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={first}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=s[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{node}-{last}] CPUs=2 RealMemory=2000
PartitionName=low Nodes=s[0-1] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=s[0-1] PriorityTier=10
"""


def program(name: str) -> str | None:
    """Where a program is; daemons are where only root looks."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run until the block ends; gives the environment in which the commands find it."""
    if missing := [name for name in PROGRAMS if program(name) is None]:
        pytest.skip(f"no Slurm here ({', '.join(missing)} not found): apt install slurm-wlm munge")
    first = 20000 + os.getpid() % 20000
    values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": folder}
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(first=first, node=first + 1, last=first + 2, **values))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    folder.chmod(0o755)
    environment = {"SLURM_CONF": str(config)}
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    daemons = [
        ["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items())],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "s0"],
        ["slurmd", "-D", "-N", "s1"],
    ]
    started = []
    try:
        for name, *arguments in daemons:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            started.append(subprocess.Popen([program(name), *arguments], env={**os.environ, **environment}, **quiet))
            until = time.monotonic() + 30
            while name == "munged" and not (folder / "munge.socket").exists() and time.monotonic() < until:
                time.sleep(0.05)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            command = [program("sinfo"), "--noheader", "--format=%T %D"]
            listed = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
            if "idle 2" in listed.stdout:
                break
            time.sleep(0.5)
        else:
            log = (folder / "slurmctld.log").read_text()[-500:]
            pytest.skip(f"Slurm does not start here: {listed.stdout} {listed.stderr} {log}")
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
