"""The manifest: what a session was made from and where it ran, so that it can be repeated."""

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from palestra.spec.load import Difference, differences
from palestra.work.redact import REDACTED, SECRET

DIFF_LIMIT_BYTES = 1 << 20
UNTRACKED_LIMIT = 1000


def manifest(*, spec_hash: str, seed: int, command: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """What a session was made from; "diff" is stored by `Session.create` as git.diff next to the rest.

    A GPU is asked for its name if `device` says that it will be used: to ask takes some of its memory.
    """
    git, diff = git_state(Path.cwd())
    if git is None:  # run outside a checkout: Palestra's own, if it is installed from one
        git, diff = git_state(Path(__file__).parent)
    torch = sys.modules.get("torch")
    ours = {key: value for key, value in sorted(os.environ.items()) if key.startswith("PALESTRA_")}
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "spec_hash": spec_hash,
        "seed": seed,
        "command": list(command),
        "folder": str(Path.cwd()),
        "git": git,
        "diff": diff,
        "python": platform.python_version(),
        "packages": _packages(),
        "host": socket.gethostname(),
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch is not None and device == "cuda" else None,
        "threads": None if torch is None else torch.get_num_threads(),
        "environment": {key: REDACTED if SECRET.search(key) else value for key, value in ours.items()},
    }


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """What differs between two manifests such that resumed numbers may differ in their last bits."""
    exact = [{"cpu": m["cpu"], "torch": m["packages"].get("torch"), "threads": m["threads"]} for m in (then, now)]
    # None: torch was not loaded (or installed) when the manifest was made, so there is nothing to compare.
    return [change for change in differences(*exact) if change.before is not None and change.after is not None]


def git_state(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Commit, whether it is dirty and what is untracked, and the difference from the commit as text."""
    inside = git_output(folder, "rev-parse", "--show-toplevel")
    if not inside:
        return None, ""
    top = Path(inside.strip())
    commit = (git_output(top, "rev-parse", "--verify", "--quiet", "HEAD") or "").strip() or None
    diff = git_output(top, "diff", "HEAD", "--no-ext-diff", "--no-color") if commit else ""
    untracked = (git_output(top, "ls-files", "--others", "--exclude-standard") or "").splitlines()
    about = {"commit": commit, "dirty": bool(diff or untracked), "untracked": untracked[:UNTRACKED_LIMIT]}
    return about, diff or ""


def git_output(folder: Path, *arguments: str) -> str | None:
    """The output of git, at most DIFF_LIMIT_BYTES; None if it fails or is not installed."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.Popen(
            ["git", *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None
    with process:
        assert process.stdout is not None
        text = process.stdout.read(DIFF_LIMIT_BYTES)
        if process.stdout.read(1):
            process.kill()
            return text.decode(errors="replace") + f"\n… truncated after {DIFF_LIMIT_BYTES} bytes\n"
    return text.decode(errors="replace") if process.returncode == 0 else None


def _packages() -> dict[str, str]:
    """Versions of all installed distributions, from the names of their folders: reading each one's metadata is slow."""
    versions: dict[str, str] = {}
    for entry in sys.path:
        if not os.path.isdir(entry):
            continue
        for folder in os.listdir(entry):
            name, dash, version = folder.removesuffix(".dist-info").partition("-")
            if dash and folder.endswith(".dist-info"):
                versions.setdefault(name.replace("_", "-").lower(), version)
    return dict(sorted(versions.items()))


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return model[1] if model else platform.processor() or platform.machine()
