"""What a program in the sandbox may read, and a root of the file system that has nothing else."""

import os
import sys
from collections.abc import Sequence

from palestra.tasks.sandbox import kernel

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INODES = 1000  # files in the /tmp of a program


def import_path() -> list[str]:
    """Where a program finds modules: the standard library and installed packages, not the user's own folders."""
    import sysconfig

    places = sysconfig.get_paths()
    allowed = [os.path.realpath(places[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return list(dict.fromkeys(path for path in sys.path if path and _inside(os.path.realpath(path), allowed)))


def readable(modules: Sequence[str]) -> list[str]:
    """The files and folders that a program may read, none of them inside another."""
    libraries = [os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    wanted = [path for path in dict.fromkeys([*LIBRARIES, *libraries, *modules]) if os.path.exists(path)]
    return [path for path in wanted if not any(path != other and _inside(path, [other]) for other in wanted)]


def enter_root(folder: str, paths: Sequence[str]) -> str:
    """Make a file system in memory the root, with `paths`, read-only, and a folder to mount a `/tmp` at; return that.

    It is mounted at `folder`, which is then removed, so that a kill leaves nothing behind.
    """
    scratch = "/scratch" if any(_inside(path, ["/tmp"]) for path in paths) else "/tmp"  # Python itself may be in /tmp
    outside = os.open(os.path.dirname(folder), os.O_PATH)
    kernel.mount("none", "/", None, kernel.REC | kernel.PRIVATE)
    kernel.mount("tmpfs", folder, "tmpfs", kernel.NOSUID | kernel.NODEV, "size=1m,mode=755")
    for path in [*paths, *(device for device in DEVICES if os.path.exists(device))]:
        _show(path, folder, paths)
    os.mkdir(folder + scratch)
    kernel.pivot_root(folder)
    kernel.mount("none", "/", None, kernel.REMOUNT | kernel.BIND | kernel.RDONLY | kernel.NOSUID | kernel.NODEV)
    os.rmdir(os.path.basename(folder), dir_fd=outside)
    os.close(outside)
    return scratch


def mount_scratch(folder: str, mebibytes: int) -> None:
    """Mount a folder in memory, of this process alone, over another."""
    options = f"size={mebibytes}m,nr_inodes={INODES},mode=1777"
    kernel.mount("tmpfs", folder, "tmpfs", kernel.NOSUID | kernel.NODEV | kernel.NOEXEC, options)


def _show(path: str, root: str, others: Sequence[str]) -> None:
    """Show a path under a new root at its own place; a link stays one where its target is there too."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path) and _inside(os.path.realpath(path), others):
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.mkdir(target)
        kernel.bind_read_only(path, target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.bind_read_only(path, target, device=path in DEVICES)


def _inside(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
