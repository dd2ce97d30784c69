"""What a process in the sandbox gives up for good: system calls (seccomp) and files (Landlock)."""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence
from functools import cache

from palestra.tasks.sandbox import kernel
from palestra.tasks.sandbox.kernel import LIBC, MACHINE, PR_SET_NO_NEW_PRIVS, call, prctl

Numbers = tuple[int | None, int | None]

# Refused, by name: numbers on x86-64 and on 64-bit ARM; None where a machine has no such call.
REFUSED: dict[str, Numbers] = {
    # programs
    "execve": (59, 221), "execveat": (322, 281), "uselib": (134, None),
    # the network and sockets of services; socketpair is left, for asyncio
    "socket": (41, 198),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit counts, or that outlives its process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191), "msgget": (68, 186), "msgctl": (71, 187),
    "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # the machine, and wide doors to the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "personality": (135, 92),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
FORK, VFORK, CLONE, CLONE3 = (57, None), (58, None), (56, 220), (435, 435)
KILL, TGKILL, PRLIMIT, AFFINITY, PRCTL = (62, 129), (234, 131), (302, 261), (203, 122), (157, 167)
AUDIT_ARCH = (0xC000003E, 0xC00000B7)
X32 = 0x40000000  # a second table of calls on x86-64

# Classic BPF over `struct seccomp_data`: the call's number at 0, the machine at 4, arguments of 8 bytes from 16.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
MODE_FILTER = 2
SECCOMP, NEW_LISTENER, ASK = (317, 277), 8, 0x7FC00000

Step = tuple[int, int, int, int]  # code, how far to jump where true, where false, value


class FilterProgram(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def available() -> bool:
    """Whether this is Linux, on a machine whose calls are known here."""
    return sys.platform == "linux" and MACHINE is not None


@cache
def program(own: int) -> bytes:
    """The filter for a process with id `own`: signals and limits are its own only."""
    assert MACHINE is not None
    refuse, again = (RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ERRNO | errno.EAGAIN)
    allow = (RETURN, 0, 0, ALLOW)
    steps: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[MACHINE]), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), refuse]

    def on(numbers: Numbers, *then: Step) -> None:
        number = numbers[MACHINE or 0]
        if number is not None:
            steps.extend([(EQUAL, 0, len(then), number), *then])

    def only(numbers: Numbers, argument: int, *values: int) -> None:
        """Allow a call where an argument, an int, is one of these."""
        tests = [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
        on(numbers, (LOAD, 0, 0, 16 + 8 * argument), *tests, refuse, allow)

    on(CLONE, (LOAD, 0, 0, 16), (ANY_BIT, 1, 0, kernel.THREAD), again, allow)
    on(CLONE3, (RETURN, 0, 0, ERRNO | errno.ENOSYS))  # its flags cannot be read here; glibc then takes clone
    on(FORK, again)
    on(VFORK, again)
    only(KILL, 0, own)
    only(TGKILL, 0, own)
    only(PRLIMIT, 0, 0, own)
    only(AFFINITY, 0, 0)
    on(PRCTL, (LOAD, 0, 0, 16), (EQUAL, 0, 1, kernel.PR_SET_PDEATHSIG), refuse, allow)
    refused = [number for numbers in REFUSED.values() if (number := numbers[MACHINE]) is not None]
    # One answer for all, at the end: the kernel compiles the filter for every process, and its length is what it takes.
    steps += [(EQUAL, len(refused) - place, 0, number) for place, number in enumerate(refused)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, allow, refuse])


LEFT_TO_COMMANDS = {"execve", "execveat", "socket", "tkill", "setpriority", "sched_setscheduler", "sched_setparam"}
LEFT_TO_COMMANDS |= {"sched_setattr", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open"}
INTERNET = (2, 10)  # AF_INET, AF_INET6: a socket of a service is a file, which no namespace hides


def of_commands() -> bytes:
    """The filter for a command that may start others: sockets of the Internet alone, no namespaces, no mounts."""
    assert MACHINE is not None
    names = [name for name in REFUSED if name not in LEFT_TO_COMMANDS]
    refused = [number for name in names if (number := REFUSED[name][MACHINE]) is not None]
    steps: list[Step] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[MACHINE]), (RETURN, 0, 0, KILL_PROCESS)]
    steps += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    steps += [(EQUAL, len(refused) + 5 - place, 0, number) for place, number in enumerate(refused)]
    number = REFUSED["socket"][MACHINE] or 0
    steps += [
        (EQUAL, 0, 4, number),
        (LOAD, 0, 0, 16),
        *((EQUAL, 2 - place, 0, one) for place, one in enumerate(INTERNET)),
    ]
    steps += [(RETURN, 0, 0, ERRNO | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def install(code: bytes) -> None:
    """Put this process under a filter, for good."""
    steps = FilterProgram(len(code) // 8, code)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(kernel.PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(steps))


def asking_for_processes() -> int:
    """Have the kernel ask for every process and thread that this one and its children start; where it asks."""
    begin = [number for one in (FORK, VFORK, CLONE, CLONE3) if (number := one[MACHINE or 0]) is not None]
    steps: list[Step] = [(LOAD, 0, 0, 0), *((EQUAL, len(begin) - place, 0, one) for place, one in enumerate(begin))]
    code = b"".join(struct.pack("HBBI", *one) for one in [*steps, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ASK)])
    given = FilterProgram(len(code) // 8, code)
    return call(SECCOMP, MODE_FILTER - 1, NEW_LISTENER, given, what="seccomp")


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


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0 where there is none."""
    return max(0, LIBC.syscall(ctypes.c_long(CREATE[0]), None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION)))


def restrict_files(read: Sequence[str], write: Sequence[str]) -> None:
    """Leave this process these files and folders, and no others, for good (Landlock, Linux 5.13)."""
    known = landlock_version()
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
