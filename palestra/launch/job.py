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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra import __version__
from palestra.errors import PalestraError, UsageError
from palestra.launch.clusters import Cluster, Record, cluster_of
from palestra.runs.manifest import git_output, git_state
from palestra.runs.run import new_id
from palestra.runs.share import place
from palestra.spec.load import load, spec_hash
from palestra.spec.model import plain
from palestra.work.redact import REDACTED, SECRET, redact, redacted, secrets

BUNDLE_LIMIT_MB = 100
RUNS_THERE = "/tmp/runs"
"""The folder of runs in a container that has a disk of its own."""


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
    array: int
    """Slurm starts so many of it; 0: one that is no array."""
    extras: tuple[str, ...]
    attempt: int

    @classmethod
    def of(cls, record: Record, cluster: Cluster, hidden: Mapping[str, str]) -> "Job":
        """The next attempt at what a record describes."""
        folder, home, extras = Path(record["folder"]), Path(record["home"]), tuple(record["extras"])
        about = (folder, home, record["array"], extras, record["attempts"] + 1)
        return cls(record["name"], cluster, tuple(record["command"]), record["env"], hidden, *about)

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

    @property
    def entrypoint(self) -> str:
        """The shell command of a machine that runs nothing else before it."""
        return " && ".join([*self.cluster.setup, shlex.join(self.command)])

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
) -> tuple[Job, Record, str]:
    """The job of a spec, its record for the job log, and the difference of the tree from its commit."""
    loaded, folder = load(spec, variables=variables, overrides=overrides).spec, Path.cwd()
    name = name or _default_name(loaded.name, cluster)
    if problems := list(_problems(loaded, spec, cluster, name, array)):
        raise UsageError("\n".join(problems))
    pipeline = loaded.kind == "pipeline"
    where = place(cluster.place)[0] if cluster.place and not pipeline else None
    given = [*overrides, *(part for pair in (variables or {}).items() for part in ("-s", "=".join(pair)))]
    run = None if pipeline or (array and loaded.sweep) else f"{loaded.name}/{new_id()}"
    command = _command(loaded, spec, given, cluster, run, where, array, name, root)
    written, secret = _environment(cluster, env, name)
    hidden = _dotenv(folder) | secret
    said = " ".join((*command, name, str(root.absolute())))  # of what is in .env a common word is no secret
    unsaid = [value for value in hidden.values() if len(value) >= 4 and value not in said]
    known = [*secrets(), *secrets(hidden), *unsaid]
    if shown := [redact(word, known) for word in command if redact(word, known) != word]:
        raise UsageError(f"the command would show a secret ({shown[0]}): put it into a variable of .env")
    git, diff = git_state(folder)
    results = getattr(loaded, "prefix", where) or str(root.absolute())
    record = {
        "name": name, "on": cluster.on, "cluster": cluster_name, "settings": plain(cluster), "spec": spec,
        "spec_hash": spec_hash(loaded), "run": run, "command": list(command), "env": written,
        "hidden": sorted(hidden), "array": array, "extras": list(extras), "folder": str(folder),
        "home": str((root / ".jobs" / name).absolute()),
        "commit": (git or {}).get("commit"), "dirty": (git or {}).get("dirty", False),
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "by": f"{getpass.getuser()}@{socket.gethostname()}",
        "results": results if run is None or array else f"{results}/{run}", "state": "new", "attempts": 0, "handle": {},
    }  # fmt: skip
    return Job.of(record, cluster, hidden), redacted(record, known), redacted(diff, known)


def again(record: Record) -> Job:
    """The job of a record, with hidden variables of `.env` and of this environment."""
    known = {**os.environ, **_dotenv(Path(record["folder"]))}
    if missing := [name for name in record["hidden"] if name not in known]:
        raise UsageError(f"{record['name']} was launched with {', '.join(missing)}: set it, or put it into .env")
    return Job.of(record, cluster_of(record), {name: known[name] for name in record["hidden"]})


def bundle(job: Job, form: str) -> bytes:
    """The project's files by the rules of .gitignore, as tar.gz or zip; the same files give the same zip."""
    if git_output(job.folder, "rev-parse") is None:
        raise UsageError(f"{job.folder} is not in a git repository: its .gitignore says what is sent")
    listed = call(["git", "-C", str(job.folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    files = sorted({name for name in listed.split("\0") if name and (job.folder / name).is_file()})
    sizes = {name: (job.folder / name).stat().st_size / 1e6 for name in files}
    if (total := sum(sizes.values())) > BUNDLE_LIMIT_MB:
        largest = ", ".join(
            f"{name} ({sizes[name]:.1f} MB)" for name in sorted(files, key=lambda name: -sizes[name])[:5]
        )
        raise UsageError(
            f"the bundle has {total:.0f} MB, and at most {BUNDLE_LIMIT_MB} MB are sent. The largest files are "
            f"{largest}: add them to .gitignore, and read them from a bucket"
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


def _problems(spec: Any, file: str, cluster: Cluster, name: str, array: int) -> Iterator[str]:
    """What cannot run there, and what would be lost or sent by mistake."""
    on, pipeline = cluster.on, spec.kind == "pipeline"
    if not re.fullmatch(cluster.names, name):
        yield f"--name {name}: {on} does not accept this name; it must match {cluster.names}"
    if array and on != "slurm":
        yield f"--array: {on} has no arrays; use `max_session` for seeds or `palestra sweep`"
    placed = getattr(spec, "cluster", None)
    if cluster.nodes > 1 and not pipeline and spec.max_session == 1 and (placed is None or not placed.ray):
        uses = "place its processes with cluster.address=auto, or train several seeds with max_session"
        yield f"--nodes {cluster.nodes}, but the spec uses one machine: {uses}"
    if cluster.sees_this_disk:
        return
    if Path(file.rpartition(":")[0] or file).is_absolute():
        yield f"{file}: give the path in the project, which is sent to {on}"
    if Path(".env").exists() and not git_output(Path.cwd(), "check-ignore", ".env"):
        yield ".env would be sent with the project: add it to .gitignore (its variables are passed on)"
    if pipeline and "://" not in spec.prefix:
        yield f"{on}: outputs in {spec.prefix} would be lost with the machine: set prefix=s3://…"
    if not pipeline and cluster.place is None:
        say = "Say where it is copied to while it trains: --sync s3://… (or `sync:` of the cluster)"
        yield f"{on}: the run would be lost with its machine. {say}"


def _command(
    spec: Any, file: str, given: list[str], cluster: Cluster, run: str | None, sync: str | None, array: int,
    name: str, root: Path,
) -> tuple[str, ...]:  # fmt: skip
    here = cluster.sees_this_disk and cluster.image is None and cluster.folder is None
    palestra = (sys.executable if here else "python", "-m", "palestra")
    on = ("--on", "ray") if cluster.nodes > 1 and (spec.kind == "pipeline" or spec.max_session > 1) else ()
    if spec.kind == "pipeline":
        return (*palestra, "pipeline", "run", file, *given, *on)
    runs = root.absolute() if here else root if cluster.sees_this_disk else RUNS_THERE
    where = ("--runs", str(runs), "--quiet", *on)
    if run is None:  # the tasks of an array share the points of a sweep
        return (*palestra, "sweep", file, *given, "--group", name, *where)
    id = run.rpartition("/")[2]
    if array:
        given = [*given, "max_session=1", f"seed=$(({spec.seed} + ${{SLURM_ARRAY_TASK_ID}}))"]
        id += "-${SLURM_ARRAY_TASK_ID}"
    return (*palestra, "train", file, *given, "--id", id, *(("--sync", sync) if sync else ()), *where)


def _environment(cluster: Cluster, given: Sequence[str], name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Variables that may be written down, and those with secrets."""
    pairs = cluster.variables() | {"PALESTRA_JOB": name}
    for text in given:
        key, equals, value = text.partition("=")
        if not key.isidentifier() or (not equals and key not in os.environ):
            raise UsageError(f"--env {text}: expected NAME=VALUE, or the NAME of a variable that is set here")
        pairs[key] = value if equals else os.environ[key]
    secret = {key: value for key, value in pairs.items() if SECRET.search(key) or redact(value) != value}
    return {key: pairs[key] for key in pairs if key not in secret}, secret


def _dotenv(folder: Path) -> dict[str, str]:
    """The variables of `.env`: lines of NAME=VALUE, quoted or not."""
    file, values = folder / ".env", {}
    for number, line in enumerate(file.read_text().splitlines() if file.is_file() else (), 1):
        text = line.strip().removeprefix("export ")
        if not text or text.startswith("#"):
            continue
        key, equals, value = map(str.strip, text.partition("="))
        if not equals or not key.isidentifier():
            raise UsageError(f"{file}:{number}: expected NAME=VALUE")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        values[key] = value[1:-1] if quoted else value
    return values
