"""Hosts on one machine: network namespaces, joined by a switch, whose links count bytes and may have a rate."""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

INTERFACE = "eth0"
"""Name of the network interface in every host."""

_NAMESPACES = Path("/run/netns")
_COMMAND_SECONDS = 20.0
# Time that a burst may take at a link's rate, and that packets may wait in a link's queue.
_BURST_SECONDS, _QUEUE_SECONDS = 0.002, 0.1
_MINIMUM_BURST = 16 * 1024
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Counters:
    """Bytes that passed an interface since it was made, with the headers of TCP, IP and Ethernet."""

    sent: int
    received: int

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(self.sent + other.sent, self.received + other.received)

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(self.sent - earlier.sent, self.received - earlier.received)


@dataclasses.dataclass(frozen=True)
class Host:
    """A network namespace with one interface.

    Attributes:
        namespace: Name of the namespace.
        address: IPv4 address of the interface.
    """

    namespace: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``command`` in this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def counters(self) -> Counters:
        """Return what the host has sent and received."""
        files = [str(path) for path in _counter_files()]
        sent, received = _call(*self.command(["cat", *files])).split()
        return Counters(int(sent), int(received))


def own_counters() -> Counters:
    """Return what the host in which this process runs has sent and received."""
    return Counters(*(int(path.read_text()) for path in _counter_files()))


@contextlib.contextmanager
def network(hosts: int, megabits_per_second: float | None = None, segments: int = 1) -> Iterator[list[Host]]:
    """Make hosts that reach each other and nothing else. Remove them at the end, also after an error or Ctrl-C.

    The first namespace holds a switch (a bridge). A pair of virtual interfaces joins each host to it. Nothing is made
    in the machine's own namespace, and whatever is in a namespace goes with it.

    Args:
        hosts: Number of hosts, at most 254.
        megabits_per_second: Rate of each host's link in either direction. None sets no limit.
        segments: Most segments of 1,448 bytes in a packet. With 1, the counters see all headers. But each packet passes
            four queues on the workers' own cores. A host with a real card hands it many segments at a time.

    Raises:
        RuntimeError: A namespace or an interface could not be made. The message contains the reason.
    """
    if not 1 <= hosts <= 254:
        raise ValueError(f"expected 1 to 254 hosts; got {hosts}")
    prefix = f"powersgd-{os.getpid()}-{next(_numbers)}"
    switch = f"{prefix}-switch"
    with contextlib.ExitStack() as stack:
        _add_namespace(switch, stack)
        _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _call("ip", "-n", switch, "link", "set", "br0", "up")
        found = [Host(f"{prefix}-host{index}", f"10.0.0.{index + 1}") for index in range(hosts)]
        for index, host in enumerate(found):
            port = f"port{index}"
            _add_namespace(host.namespace, stack)
            pair = ["type", "veth", "peer", "name", port, "netns", switch]
            _call("ip", "link", "add", INTERFACE, "netns", host.namespace, *pair)
            _call("ip", "-n", switch, "link", "set", port, "master", "br0")
            _call("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _call("ip", "-n", host.namespace, "link", "set", "lo", "up")
            for namespace, interface in ((switch, port), (host.namespace, INTERFACE)):
                _call("ip", "-n", namespace, "link", "set", interface, "gso_max_segs", str(segments), "up")
                if megabits_per_second is not None:
                    _limit(namespace, interface, megabits_per_second)
        yield found


def can_shape() -> str | None:
    """Return why this process cannot make a network with limited rates. None if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"network namespaces need the commands ip and tc (package iproute2); missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return f"network namespaces need root; this is user {os.geteuid()}"
    try:
        with network(1, megabits_per_second=100):
            return None
    except RuntimeError as error:
        return f"this system makes no network namespaces: {error}"


def run_in_hosts(
    hosts: Sequence[Host],
    commands: Sequence[Sequence[str]],
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Run one command in each host, all at the same time, and return what each prints.

    Args:
        hosts: Hosts.
        commands: One command for each host.
        timeout: Seconds until all must be done.
        environment: Variables to add to this process's.

    Raises:
        RuntimeError: A command failed. The others have been killed, as after a timeout and after Ctrl-C.
        TimeoutError: The commands were not done in time.
    """
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        started = []
        for host, command in zip(hosts, commands, strict=True):
            output = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                host.command(command),
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                # Its own group, so that it can be killed with what it started, and so that Ctrl-C comes here only.
                start_new_session=True,
            )
            stack.callback(_kill, process)
            started.append((process, output))

        def printed(index: int) -> str:
            _, output = started[index]
            output.seek(0)
            return output.read().decode(errors="replace")

        while any(process.poll() is None for process, _ in started):
            if time.monotonic() > deadline:
                texts = "\n".join(printed(index) for index in range(len(started)))
                raise TimeoutError(f"the commands were not done after {timeout:g} s; they printed:\n{texts}")
            if any(process.poll() for process, _ in started):
                break
            time.sleep(0.05)
        for index, (process, _) in enumerate(started):
            if process.poll():
                raise RuntimeError(f"the command in host {index} ended with {process.poll()}:\n{printed(index)}")
        return [printed(index) for index in range(len(started))]


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    if (_NAMESPACES / name).exists():
        raise RuntimeError(f"a network namespace {name} exists already, left by an earlier process of this number")
    # Before it exists, so that it is removed if an interrupt comes right after it was made.
    stack.callback(_remove_namespace, name)
    _call("ip", "netns", "add", name)
    # Without IPv6, whose neighbor discovery and group reports would be counted. "default" is for interfaces to come.
    off = 'for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do if [ -e "$f" ]; then echo 1 > "$f"; fi; done'
    _call("ip", "netns", "exec", name, "sh", "-c", off)


def _remove_namespace(name: str) -> None:
    if (_NAMESPACES / name).exists():
        # A command's group is gone by now, but torchrun gives each worker a session of its own. A namespace lives on,
        # without a name, as long as a process is in it.
        for number in _call("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)
        _call("ip", "netns", "delete", name)


def _limit(namespace: str, interface: str, megabits_per_second: float) -> None:
    burst = max(_MINIMUM_BURST, int(megabits_per_second * 1e6 / 8 * _BURST_SECONDS))
    rate = ["rate", f"{megabits_per_second:g}mbit", "burst", f"{burst}b", "latency", f"{1e3 * _QUEUE_SECONDS:g}ms"]
    _call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *rate)


def _counter_files() -> list[Path]:
    # A process in a namespace sees the interfaces of that namespace in /sys.
    folder = Path("/sys/class/net") / INTERFACE / "statistics"
    return [folder / "tx_bytes", folder / "rx_bytes"]


def _call(*command: str) -> str:
    # In a session of its own, so that Ctrl-C does not interrupt it halfway.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False, start_new_session=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
