"""A slow, long link on one machine: network namespaces, a TUN device in each, and a packet switch between them. Linux, as root.

Each end of the link is a namespace with one device and nothing else, so what runs in it reaches only the other end, through the kernel's
real TCP. The switch gives each direction a rate, a delay and a queue of bounded length, as a router has; what does not fit is dropped.

    python -m blocktrain.swarm_sim.gossip_link RATE_BYTES_PER_S ONE_WAY_S NAMESPACE ADDRESS/BITS NAMESPACE ADDRESS/BITS
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from blocktrain.swarm_sim.leash import end_with_parent
from blocktrain.swarm_sim.processes import Failure

RATE_BYTES_PER_S: Final = 100e6 / 8
ONE_WAY_S: Final = 0.02  # 40 ms there and back
QUEUE_S: Final = 0.1  # of a full link: what waits longer is dropped
MTU: Final = 9000  # jumbo: the switch is Python, and shall not be what is measured
START_S: Final = 20.0
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN_NO_PI: Final = 0x0001 | 0x1000

Prefix = tuple[str, ...]


@dataclass
class Direction:
    """Packets on their way to one end."""

    out: int
    free_at: float = 0.0
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self, packet: bytes, now: float, rate: float, one_way_s: float) -> None:
        begins = max(now, self.free_at)
        if begins - now > QUEUE_S:
            return
        self.free_at = begins + len(packet) / rate
        self.under_way.append((self.free_at + one_way_s, packet))

    def deliver(self, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            with contextlib.suppress(OSError):  # the other end's device is not up (any more)
                os.write(self.out, self.under_way.popleft()[1])


@contextlib.contextmanager
def emulated(rate: float = RATE_BYTES_PER_S, one_way_s: float = ONE_WAY_S) -> Iterator[list[tuple[Prefix, str]]]:
    """Two ends of a link: for each, what to put in front of a command, and an address to listen on. Raises: Failure: not possible here."""
    names = [f"blocktrain-{os.getpid()}-{end}" for end in (0, 1)]
    ends = [(name, f"10.77.{os.getpid() % 250}.{index + 1}") for index, name in enumerate(names)]
    switch: subprocess.Popen[bytes] | None = None
    try:
        for name in names:
            _ip("netns", "add", name)
        arguments = [part for name, address in ends for part in (name, f"{address}/24")]
        command = [sys.executable, "-P", "-m", "blocktrain.swarm_sim.gossip_link", str(rate), str(one_way_s), *arguments]
        switch = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert switch.stdout is not None
        ready, _, _ = select.select([switch.stdout], [], [], START_S)
        if not ready or not switch.stdout.readline():
            raise Failure("the packet switch of the emulated link did not start")
        yield [(("ip", "netns", "exec", name), f"/ip4/{address}/tcp/0") for name, address in ends]
    finally:
        if switch is not None:
            switch.terminate()
            switch.wait()
            assert switch.stdout is not None
            switch.stdout.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)
    except FileNotFoundError:
        raise Failure("an emulated link needs the command `ip` (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise Failure(f"an emulated link needs root: ip {' '.join(arguments)}: {error.stderr.decode(errors='replace').strip()}") from None


def _device(namespace: str, address: str, index: int) -> int:
    """A TUN device, made here and moved into its namespace; its packets come and go through the file that is returned."""
    try:
        handle = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise Failure(f"an emulated link needs /dev/net/tun: {error.strerror}") from None
    name = f"bt{os.getpid() % 100000}x{index}"
    fcntl.ioctl(handle, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_NO_PI))
    _ip("link", "set", name, "netns", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "addr", "add", address, "dev", name)
    _ip("-n", namespace, "link", "set", name, "mtu", str(MTU), "up")
    return handle


def _switch(handles: list[int], rate: float, one_way_s: float) -> None:
    """Pass packets on until we are ended."""
    ways = {handles[0]: Direction(handles[1]), handles[1]: Direction(handles[0])}
    while True:
        due = min((way.under_way[0][0] for way in ways.values() if way.under_way), default=None)
        wait_s = None if due is None else max(0.0, due - time.monotonic())
        ready, _, _ = select.select(handles, [], [], wait_s)
        now = time.monotonic()
        for handle in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    ways[handle].take(os.read(handle, MTU + 100), now, rate, one_way_s)
        for way in ways.values():
            way.deliver(now)


def _main() -> None:
    end_with_parent()
    rate, one_way_s = float(sys.argv[1]), float(sys.argv[2])
    handles = [_device(sys.argv[3 + 2 * index], sys.argv[4 + 2 * index], index) for index in (0, 1)]
    print("ready", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        _switch(handles, rate, one_way_s)


if __name__ == "__main__":
    _main()
