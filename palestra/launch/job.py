"""A job: a spec, the cluster it runs on, and the one command that starts the run or continues it."""

import getpass
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra import __version__
from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import KINDS, Cluster
from palestra.runs.manifest import git_output, git_state
from palestra.runs.run import new_id
from palestra.runs.share import place
from palestra.spec.load import load, spec_hash
from palestra.spec.model import plain
from palestra.work.redact import REDACTED, SECRET, redact, redacted, secrets

BUNDLE_LIMIT_MB = 100
HERE = ("local", "slurm")
"""Kinds of clusters that see this disk: no bundle is sent, and runs stay in the folder of runs."""
RUNS_THERE = "/tmp/runs"
"""The folder of runs in a container that has a disk of its own."""
VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Job:
    """What is submitted, once or again."""

    name: str
    cluster: Cluster
    command: tuple[str, ...]
    """Starts the run, or continues it where it exists: a job that is requeued runs the same one."""
    env: Mapping[str, str]
    """Variables of the job that may be written down."""
    hidden: Mapping[str, str]
    """Those that are not: of `.env`, and with names of secrets."""
    folder: Path
    """The project."""
    home: Path
    """Log and exit code of a job that sees this disk."""
    array: int = 0
    """Slurm starts so many of it; 0: one that is no array."""
    extras: tuple[str, ...] = ()
    attempt: int = 1

    @property
    def label(self) -> str:
        """Its name where every submission needs one of its own."""
        return self.name if self.attempt == 1 else f"{self.name}-{self.attempt}"

    @property
    def on_nodes(self) -> tuple[str, ...]:
        """The command that every machine runs: several of them are joined by Ray first."""
        if self.cluster.nodes == 1:
            return self.command
        return (self.command[0], "-m", "palestra.launch.node", *self.command)

    @property
    def shown(self) -> dict[str, str]:
        """Hidden variables as a dry run and the job log have them."""
        return dict.fromkeys(self.hidden, REDACTED)

    def install(self) -> str:
        """The shell command that installs Palestra where the bundle was unpacked."""
        needs = {"ray": self.cluster.nodes > 1, "s3": any(word.startswith("s3://") for word in self.command)}
        extras = ",".join(dict.fromkeys(("train", *(extra for extra in needs if needs[extra]), *self.extras)))
        project = self.folder / "pyproject.toml"
        own = project.exists() and tomllib.loads(project.read_text()).get("project", {}).get("name") == "palestra"
        return shlex.join(["pip", "install", f".[{extras}]" if own else f"palestra[{extras}]=={__version__}"])


def plan(
    spec: str,
    cluster: Cluster,
    *,
    overrides: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    name: str | None = None,
    env: Sequence[str] = (),
    extras: Sequence[str] = (),
    array: int = 0,
    cluster_name: str | None = None,
    root: Path = Path("runs"),
) -> tuple[Job, dict[str, Any], str]:
    """The job of a spec, its record for the job log, and the difference of the tree from its commit."""
    loaded = load(spec, variables=variables, overrides=overrides).spec
    name = name or _default_name(loaded.name, cluster)
    if not re.fullmatch(cluster.names, name):
        raise UsageError(f"--name {name}: {cluster.on} does not accept this name; it must match {cluster.names}")
    if array and cluster.on != "slurm":
        raise UsageError(f"--array: {cluster.on} has no arrays; use `max_session` for seeds or `palestra sweep`")
    _check_nodes(loaded, cluster)
    folder = Path.cwd()
    if cluster.on not in HERE:
        if Path(spec.rpartition(":")[0] or spec).is_absolute():
            raise UsageError(f"{spec}: give the path in the project, which is sent to {cluster.on}")
        if (folder / ".env").exists() and not git_output(folder, "check-ignore", ".env"):
            raise UsageError(".env would be sent with the project: add it to .gitignore (its variables are passed on)")
    where = _sync(loaded, cluster)
    given = [*overrides, *(part for pair in (variables or {}).items() for part in ("-s", "=".join(pair)))]
    run = None if loaded.kind == "pipeline" or (array and loaded.sweep) else f"{loaded.name}/{new_id()}"
    command = _command(loaded, spec, given, cluster, run, where, array, name, root)
    if secret := [word for word in command if redact(word) != word]:
        raise UsageError(f"the command would show a secret ({redact(secret[0])}): put it into a variable of .env")
    written, hidden = _environment(cluster, env, name, folder)
    home = (root / ".jobs" / name).absolute()
    job = Job(name, cluster, command, written, hidden, folder, home, array, tuple(extras))
    git, diff = git_state(folder)
    place_of_all = getattr(loaded, "prefix", where) or str(root.absolute())
    results = place_of_all if run is None or array else f"{place_of_all}/{run}"
    record = {
        "name": name, "on": cluster.on, "cluster": cluster_name, "settings": plain(cluster), "spec": spec,
        "spec_hash": spec_hash(loaded), "run": run, "command": list(command), "env": dict(written),
        "hidden": sorted(hidden), "array": array, "extras": list(extras), "folder": str(folder), "home": str(home),
        "commit": (git or {}).get("commit"), "dirty": (git or {}).get("dirty", False),
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "by": f"{getpass.getuser()}@{socket.gethostname()}",
        "results": results, "state": "new", "attempts": 0, "handle": {},
    }  # fmt: skip
    known = [*secrets(), *(value for value in hidden.values() if len(value) >= 4)]
    return job, redacted(record, known), redacted(diff, known)


def again(record: Mapping[str, Any]) -> Job:
    """The job of a record, with hidden variables of `.env` and of this environment."""
    folder = Path(record["folder"])
    known = {**os.environ, **_dotenv(folder)}
    if missing := [name for name in record["hidden"] if name not in known]:
        raise UsageError(f"{record['name']} was launched with {', '.join(missing)}: set it, or put it into .env")
    hidden = {name: known[name] for name in record["hidden"]}
    cluster = KINDS[record["on"]].model_validate(record["settings"])
    about = record["array"], tuple(record["extras"]), record["attempts"] + 1
    home = Path(record["home"])
    return Job(record["name"], cluster, tuple(record["command"]), record["env"], hidden, folder, home, *about)


def script(job: Job, command: str, exit_file: str = "exit", then: Sequence[str] = ()) -> str:
    """The body of a shell script that runs the job and leaves its exit code in its home."""
    exits = f"{shlex.quote(str(job.home))}/{exit_file}"
    lines = ["trap : TERM INT HUP", f"cd {shlex.quote(job.cluster.folder or str(job.folder))}", f"rm -f {exits}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    lines += [*job.cluster.setup, "code=0", f"{command} || code=$?"]
    lines += [*then, f"echo $code > {exits}.part && mv {exits}.part {exits}", "exit $code"]
    return "\n".join(lines) + "\n"


def bundle(job: Job, form: str) -> bytes:
    """The project's files by the rules of .gitignore, as tar.gz or zip; the same files give the same bytes."""
    try:
        listed = call(["git", "-C", str(job.folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    except PalestraError as error:
        raise UsageError(
            f"{job.folder} is not in a git repository ({error}): its .gitignore says what is sent"
        ) from error
    files = sorted({name for name in listed.split("\0") if name and (job.folder / name).is_file()})
    sizes = {name: (job.folder / name).stat().st_size for name in files}
    if (total := sum(sizes.values())) > BUNDLE_LIMIT_MB * 10**6:
        largest = sorted(files, key=lambda name: -sizes[name])[:5]
        listing = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise UsageError(
            f"the bundle has {total / 1e6:.0f} MB, and at most {BUNDLE_LIMIT_MB} MB are sent. The largest files are "
            f"{listing}: add them to .gitignore, and read them from a bucket"
        )
    out = io.BytesIO()
    if form == "zip":
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in files:
                archive.writestr(zipfile.ZipInfo(name), (job.folder / name).read_bytes(), zipfile.ZIP_DEFLATED)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name in files:
            archive.add(job.folder / name, name)
    return out.getvalue()


def call(command: Sequence[str], *, text: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """The output of a program of the cluster's; one sentence if it is missing or fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, env={**os.environ, **(env or {})})
    except FileNotFoundError as error:
        raise UsageError(f"there is no {command[0]} here: install it, or launch from where it is") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise PalestraError(f"{' '.join(command[:2])} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def _default_name(spec: str, cluster: Cluster) -> str:
    stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    if cluster.on == "sagemaker":  # names of training jobs are seen by many
        return f"palestra-adhoc-{stamp}"
    return f"{re.sub('[^a-z0-9]+', '-', spec.lower()).strip('-')[:22].strip('-') or 'job'}-{stamp}"


def _check_nodes(spec: Any, cluster: Cluster) -> None:
    placed = getattr(spec, "cluster", None)
    if cluster.nodes > 1 and spec.kind != "pipeline" and spec.max_session == 1 and (placed is None or not placed.ray):
        raise UsageError(
            f"--nodes {cluster.nodes}, but the spec uses one machine: place its processes with cluster.address=auto, "
            "or train several seeds with max_session"
        )


def _sync(spec: Any, cluster: Cluster) -> str | None:
    if spec.kind == "pipeline":
        if cluster.on not in HERE and "://" not in spec.prefix:
            raise UsageError(
                f"{cluster.on}: outputs in {spec.prefix} would be lost with the machine: set prefix=s3://…"
            )
        return None
    where = cluster.sync or (f"{getattr(cluster, 'bucket')}/runs" if cluster.on == "sagemaker" else None)  # noqa: B009
    if where is None and cluster.on not in HERE:
        raise UsageError(
            f"{cluster.on}: the run would be lost with its machine. Say where it is copied to while it trains: "
            "--sync s3://… (or `sync:` of the cluster)"
        )
    return None if where is None else place(where)[0]


def _command(
    spec: Any, file: str, given: list[str], cluster: Cluster, run: str | None, sync: str | None, array: int,
    name: str, root: Path,
) -> tuple[str, ...]:  # fmt: skip
    here = cluster.on in HERE and cluster.image is None and cluster.folder is None
    palestra = (sys.executable if here else "python", "-m", "palestra")
    on = ("--on", "ray") if cluster.nodes > 1 and (spec.kind == "pipeline" or spec.max_session > 1) else ()
    if spec.kind == "pipeline":
        return (*palestra, "pipeline", "run", file, *given, *on)
    runs = RUNS_THERE if cluster.on not in HERE else root.absolute() if here else root
    where = ("--runs", str(runs), "--quiet")
    if array and spec.sweep is not None:  # the tasks share its points
        return (*palestra, "sweep", file, *given, "--group", name, *where, *on)
    assert run is not None
    id = run.rpartition("/")[2]
    if array:
        given = [*given, "max_session=1", f"seed=$(({spec.seed} + ${{SLURM_ARRAY_TASK_ID}}))"]
        id += "-${SLURM_ARRAY_TASK_ID}"
    return (*palestra, "train", file, *given, "--id", id, *(("--sync", sync) if sync else ()), *where, *on)


def shell(command: Sequence[str]) -> str:
    """A command for a shell; of its variables only those of an array's task are filled in."""
    return " ".join(f'"{word}"' if "SLURM_ARRAY_TASK_ID" in word else shlex.quote(word) for word in command)


def _environment(
    cluster: Cluster, given: Sequence[str], name: str, folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    pairs = dict(cluster.env)
    for text in given:
        key, equals, value = text.partition("=")
        if not VARIABLE.fullmatch(key) or (not equals and key not in os.environ):
            raise UsageError(f"--env {text}: expected NAME=VALUE, or the NAME of a variable that is set here")
        pairs[key] = value if equals else os.environ[key]
    if (cache := cluster.compile_cache) is not None:
        pairs |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    if (temp := getattr(cluster, "temp_dir", None)) is not None:
        pairs["RAY_TMPDIR"] = temp
    secret = {key: value for key, value in pairs.items() if SECRET.search(key) or redact(value) != value}
    written = {key: value for key, value in pairs.items() if key not in secret} | {"PALESTRA_JOB": name}
    return written, {**_dotenv(folder), **secret}


def _dotenv(folder: Path) -> dict[str, str]:
    """The variables of `.env`: lines of NAME=VALUE, quoted or not."""
    file, values = folder / ".env", {}
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else (), 1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not VARIABLE.fullmatch(key.strip()):
            raise UsageError(f"{file}:{number}: expected NAME=VALUE")
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[key.strip()] = value[1:-1] if quoted else value
    return values
