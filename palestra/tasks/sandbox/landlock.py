"""What of the file system a process may touch that has no mounts of its own: Landlock, in Linux from 5.13 on."""

import ctypes
import os
from collections.abc import Sequence

from palestra.tasks.sandbox.kernel import LIBC, PR_SET_NO_NEW_PRIVS, call, prctl

CREATE, ADD_RULE, RESTRICT = (444, 444), (445, 445), (446, 446)
VERSION, PATH_BENEATH = 1, 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
OF_FILES = 1 | 1 << 1 | READ_FILE | 1 << 14 | 1 << 15  # execute, write, read, truncate, ioctl: the rest is of folders
# What each version of the interface knows: from its second on also moving between folders, truncating, ioctl.
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
MOST_RIGHTS = 16
SCOPES = 3  # from its sixth version on: no abstract sockets and no signals to outside


class Ruleset(ctypes.Structure):
    """`struct landlock_ruleset_attr`."""

    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class Beneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Of the kernel's interface; 0 where there is none."""
    found = LIBC.syscall(ctypes.c_long(CREATE[0]), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION))
    return max(0, found)


def restrict(read: Sequence[str], write: Sequence[str]) -> None:
    """Leave this process those files and folders, and no others, for good."""
    known = version()
    everything = (1 << RIGHTS.get(known, MOST_RIGHTS)) - 1
    attributes = Ruleset(everything, 0, SCOPES if known >= 6 else 0)
    rules = call(CREATE, attributes, ctypes.sizeof(attributes) if known >= 6 else 8, 0, what="landlock_create_ruleset")
    try:
        for paths, rights in ((read, READ_FILE | READ_DIR), (write, everything)):
            for path in paths:
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    allowed = rights if os.path.isdir(path) else rights & OF_FILES & everything
                    call(ADD_RULE, rules, PATH_BENEATH, Beneath(allowed, place), 0, what=f"landlock_add_rule {path}")
                finally:
                    os.close(place)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        call(RESTRICT, rules, 0, what="landlock_restrict_self")
    finally:
        os.close(rules)
