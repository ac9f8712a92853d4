"""A network in user space: every node has a TUN device, and a packet arrives after a latency and at
a rate.

For kernels whose traffic control cannot delay packets. Run as root: python -m tests.nodes.wire RATE
LATENCY NAMESPACE=ADDRESS ...
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import selectors
import socket
import struct
import sys
import time
from dataclasses import dataclass

DEVICE = "wire0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU = 1500
_MAX_QUEUE_S = 1.0   # of one node's way in or out; the excess is lost, as in a switch


@dataclass
class _Port:
    """One node's cable: bytes queue for it, each way."""

    tun: int
    out_free_at: float = 0.0
    in_free_at: float = 0.0


def open_tun(namespace: str) -> int:
    """A TUN device inside a named network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        _enter(libc, there.fileno())
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        _enter(libc, here.fileno())
    return tun


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def carry(ports: dict[bytes, _Port], rate: float, latency_s: float) -> None:
    """Carries packets forever; `rate` in bytes per second, 0 for no limit."""
    due: list[tuple[float, int, bytes, bytes]] = []   # (when, order, to, packet)
    order = itertools.count()
    with selectors.DefaultSelector() as selector:
        for port in ports.values():
            selector.register(port.tun, selectors.EVENT_READ, port)
        while True:
            for key, _ in selector.select(max(0.0, due[0][0] - time.monotonic()) if due else None):
                _take(key.data, ports, rate, latency_s, due, order)
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, _, to, packet = heapq.heappop(due)
                try:
                    os.write(ports[to].tun, packet)
                except OSError:  # the device is down: the cable is cut
                    continue


def _take(port: _Port, ports: dict[bytes, _Port], rate: float, latency_s: float, due: list[tuple[float, int, bytes, bytes]],
          order: itertools.count[int]) -> None:
    while True:
        try:
            packet = os.read(port.tun, _MTU + 64)
        except OSError:  # no more packets, or the device is down
            return
        to, now = packet[16:20], time.monotonic()
        if packet[0] >> 4 != 4 or to not in ports:  # IPv6 chatter and multicast
            continue
        travel_s = len(packet) / rate if rate else 0.0
        sent = max(now, port.out_free_at) + travel_s
        arrived = max(sent + latency_s, ports[to].in_free_at) + travel_s
        if sent - now > _MAX_QUEUE_S or arrived - sent - latency_s > _MAX_QUEUE_S:
            continue
        port.out_free_at, ports[to].in_free_at = sent, arrived
        heapq.heappush(due, (arrived, next(order), to, packet))


def main(arguments: list[str]) -> None:
    rate, latency_s = float(arguments[0]), float(arguments[1])
    ports = {}
    for word in arguments[2:]:
        namespace, _, address = word.partition("=")
        ports[socket.inet_aton(address)] = _Port(open_tun(namespace))
    print("ready", flush=True)
    carry(ports, rate, latency_s)


if __name__ == "__main__":
    main(sys.argv[1:])
