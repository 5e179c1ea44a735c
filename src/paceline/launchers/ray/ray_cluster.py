"""WHICH Ray cluster is meant, and does it answer? From `--on`, RAY_ADDRESS, or the one that runs on this machine.

Called by ray/on_ray. Must never wait longer than a user would: a port at which no Ray listens is told within
seconds. Tokens (RAY_AUTH_MODE, RAY_AUTH_TOKEN) are Ray's own, which reads them itself.

1. read where; 2. knock at the port, and see that gRPC is spoken there; 3. connect, within a deadline; 4. once more,
with the user's folder, which Ray copies meanwhile: however large it is, who is not let in hears that at once.
"""

import os
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ClusterError, UsageError
from paceline.version import VERSION

MISSING = "--on ray needs Ray, which is not installed here: pip install 'paceline[ray]'."
CLIENT = "ray://"
CLIENT_PORT, CONTROL_PORT = 10001, 6379  # Ray's own defaults
KNOCK_S = 2.0
CONNECT_S = 10.0  # of a cluster that answers
COPY_S = 600.0
LOST_S = "5"  # after which a driver outside of the cluster that is gone takes its actors along; Ray's own is 30
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty settings, as gRPC begins
SETTINGS = 4  # the kind of frame that answers it
SPELLED = "write --on ray, --on ray://HOST:10001 (Ray's client port) or --on HOST:6379 (on a machine of the cluster)"
HINT = "is RAY_AUTH_TOKEN the cluster's, and the port the right one (with ray:// its client's, else its control port)?"
CURRENT = "ray/ray_current_cluster"  # where Ray notes its address on each of its machines
VERSIONS_S = 5.0
LACKING = re.compile(  # a module of ours, or a name in one, that an older paceline does not have
    r"No module named ('paceline\.[\w.]+')"
    r"|cannot import name ('\w+') from 'paceline"
    r"|Can't get attribute ('\w+') on <module 'paceline"
)
QUIET = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
RuntimeEnv = Callable[[Path], Mapping[str, object]]


class Where(msgspec.Struct, frozen=True):
    """An address that ray.init() takes; "": there is no cluster, so one is started here."""

    address: str
    said_by: str = "--on"

    @property
    def is_client(self) -> bool:
        """Whether the driver is outside of the cluster."""
        return self.address.startswith(CLIENT)

    def __str__(self) -> str:
        return f"The Ray at {self.address}"


def parse(on: str) -> Where | None:
    """What --on says; None: any Ray that can be found.

    >>> parse("ray"), parse("ray://head").address, parse("head:6380").address, parse("ray://head:6379").address
    (None, 'ray://head:10001', 'head:6380', 'head:6379')
    """
    if on == "ray":
        return None
    if not on.startswith(CLIENT) and ":" not in on:
        raise UsageError(f"--on {on!r} is not known; {SPELLED}.")
    return located(on.rstrip("/"), "--on")


def located(address: str, said_by: str) -> Where:
    """An address with its port; Ray's control service at its usual port is understood also behind ray://.

    >>> located("10.0.0.1:6380", "RAY_ADDRESS").address
    '10.0.0.1:6380'
    """
    is_client = address.startswith(CLIENT)
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not colon:
        host, port = port, str(CLIENT_PORT if is_client else CONTROL_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{said_by} {address!r} names no HOST:PORT; {SPELLED}.")
    return Where(f"{CLIENT if is_client and int(port) != CONTROL_PORT else ''}{host}:{port}", said_by)


def find(on: str, environ: Mapping[str, str]) -> Where:
    """1. The cluster that is meant, which answers; else an error in a sentence."""
    if find_spec("ray") is None:
        raise UsageError(MISSING)
    given = parse(on)
    said = environ.get("RAY_ADDRESS", "")
    if given is None and said not in ("", "auto", "local"):
        given = located(said, "RAY_ADDRESS")
    if given is not None:
        if why := silence(given.address):
            raise ClusterError(f"No Ray answers at {given.address} ({given.said_by}): {why}.")
        return given
    running = "" if said == "local" else running_here(environ)
    return Where(running, "this machine")


def running_here(environ: Mapping[str, str]) -> str:
    """The address of a Ray that was started on this machine with `ray start`, if it answers."""
    try:
        address = Path(environ.get("RAY_TMPDIR") or tempfile.gettempdir(), CURRENT).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if not address or silence(address) else address


def silence(address: str) -> str:
    """2. Why nothing is heard at an address; "": gRPC is spoken there."""
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S) as knock:
            knock.sendall(PREFACE)
            frame = knock.recv(9)
    except TimeoutError:
        return f"it is silent for {KNOCK_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if len(frame) > 3 and frame[3] == SETTINGS else "something else listens there"


@contextmanager
def connected(where: Where, num_cpus: int, folder: Path | None, runtime_env: RuntimeEnv) -> Iterator[Any]:
    """3. and 4. The module ray, connected; whatever this driver has made there ends with it. `folder`: what Ray copies
    to its machines, as `runtime_env` says of it."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # a death is told by us, in a line
    import ray

    if where.is_client:
        os.environ.setdefault("RAY_CLIENT_RECONNECT_GRACE_PERIOD", LOST_S)
    if where.address:
        within(CONNECT_S, lambda: ray.init(address=where.address, **QUIET), f"{where} did not let us in", HINT)
        if folder is not None:
            ray.shutdown()
            bring(where, folder, runtime_env)
    else:
        start_own(num_cpus)
    try:
        yield ray
    finally:
        ray.shutdown()


def bring(where: Where, folder: Path, runtime_env: RuntimeEnv) -> None:
    """4. Connect with a folder; one with many files takes long to look through, too."""
    import ray

    print(f"{folder} is copied to the machines of the Ray at {where.address}", flush=True)
    within(
        COPY_S,
        lambda: ray.init(address=where.address, runtime_env=dict(runtime_env(folder)), **QUIET),
        f"{where} did not take a copy of {folder}",
        "put the script into a folder of its own, or what it does not need into a .gitignore.",
    )


def start_own(num_cpus: int) -> None:
    """A Ray for this run alone. Its processes end with the thread that starts them, so that is the caller's."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    here = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    try:
        ray.init(address="local", num_cpus=num_cpus, **here, **QUIET)
    except Exception as error:
        raise ClusterError(f"No Ray could be started here: {sentence(error)}") from None


def within(limit_s: float, connect: Callable[[], object], failure: str, hint: str) -> None:
    """Connect in a thread that nobody waits for longer than this; `hint`: what one may do then."""
    failed: list[BaseException] = []
    done = threading.Event()

    def body() -> None:
        try:
            connect()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    with silenced():
        threading.Thread(target=body, name="ray-connect", daemon=True).start()
        done.wait(limit_s)
    if not done.is_set():
        raise ClusterError(f"{failure} within {limit_s:g} s; {hint}")
    if failed:
        raise ClusterError(f"{failure}: {sentence(failed[0])}") from None


@contextmanager
def silenced() -> Iterator[None]:
    """Ray's own code writes every try to the error output, and no option stops it."""
    sys.stderr.flush()
    before = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def why(error: BaseException, ray: Any = None) -> str:
    """The cause in Ray's long message; `ray`, connected, is asked which versions its machines have, where that is it.

    >>> why(RuntimeError("The actor died\\nModuleNotFoundError: No module named 'paceline'\\nmore"))
    "paceline is not installed on that machine: pip install 'paceline[ray]' there."
    >>> why(RuntimeError("ModuleNotFoundError: No module named 'paceline.launchers.ray'")).split(";")[0]
    "that machine has another paceline than this one, without 'paceline.launchers.ray'"
    """
    text = str(error)
    if "No module named 'paceline'" in text:
        return "paceline is not installed on that machine: pip install 'paceline[ray]' there."
    if lacking := LACKING.search(text):
        others = [] if ray is None else [f"{name} has {version}" for name, version in versions(ray).items()]
        said = f" ({', '.join(others)})" if others else ""
        without = next(name for name in lacking.groups() if name)
        return (
            f"that machine has another paceline than this one, without {without}; install the same on all machines of "
            f"the Ray cluster: this is {VERSION}{said}."
        )
    causes = [line.strip() for line in text.splitlines() if "Error: " in line]
    return causes[-1] if causes else sentence(error)


def versions(ray: Any) -> dict[str, str]:
    """The machines with another paceline than this one, and which; none of our code runs there for it."""
    found = {}
    with suppress(Exception):  # what cannot be had is not told
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = {}
        for each in ray.nodes():
            if each["Alive"]:
                there = NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)
                ask = ray.remote(metadata.version).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                asked[ask.remote("paceline")] = str(each["NodeManagerHostname"])
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=VERSIONS_S)
        for answer in answered:
            with suppress(ray.exceptions.RayError):
                found[asked[answer]] = str(ray.get(answer))
    return {name: version for name, version in sorted(found.items()) if version != VERSION}


def sentence(error: BaseException) -> str:
    """The line of an error that says most.

    >>> sentence(ValueError("no token\\n  more"))
    'no token'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
