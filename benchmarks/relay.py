"""A slow cable between two network namespaces: packets travel through this process, late, and some are lost.

    python benchmarks/relay.py FIRST 10.77.0.1/24 SECOND 10.77.0.2/24 --delay 0.05 --loss 0.01

The delay is that of one way. For machines whose kernel has no netem; needs root and /dev/net/tun. See two_hosts.sh.
"""

import argparse
import ctypes
import fcntl
import os
import queue
import random
import struct
import subprocess
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def tun_in(namespace: str, address: str) -> int:
    """A network interface in a namespace; the file gets its packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    home, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", b"slow0", IFF_TUN | IFF_NO_PI))
    libc.setns(home, CLONE_NEWNET)
    for command in (f"addr add {address} dev slow0", "link set slow0 mtu 1400 up"):
        subprocess.run(["ip", "-n", namespace, *command.split()], check=True)
    return file


def carry(source: int, target: int, delay: float, loss: float, draws: random.Random) -> None:
    """Move packets from one interface to the other."""
    on_the_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, packet = on_the_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    while True:
        packet = os.read(source, 65535)
        if draws.random() >= loss:
            on_the_way.put((time.monotonic() + delay, packet))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ends", nargs=4, metavar="NAMESPACE ADDRESS")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds, one way")
    parser.add_argument("--loss", type=float, default=0.01, help="share of packets")
    given = parser.parse_args()
    first, second = tun_in(*given.ends[:2]), tun_in(*given.ends[2:])
    print("the relay is up", flush=True)
    ways = [(first, second, 1), (second, first, 2)]
    for source, target, seed in ways:
        args = (source, target, given.delay, given.loss, random.Random(seed))
        threading.Thread(target=carry, args=args, daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
