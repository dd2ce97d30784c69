"""Which network the collectives of this machine use."""

import os
import socket

import psutil


def use_network_of(machine: str, port: int | None = None) -> None:
    """Let Gloo and NCCL use the interface by which that machine is reached, or of which it is the address.

    By themselves they take that of the host's name, which other machines may not reach.
    """
    if machine in ("127.0.0.1", "localhost"):
        return
    own = machine
    if port is not None:
        with socket.create_connection((machine, port)) as line:
            own = line.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
