"""Reach a run that trains now from outside: by its folder, or by the address of one of its ps.

Used by `paceline ctl` and `kv`, and by workers that join. A run folder of `paceline run` holds the addresses and the
secret; one of tasks that were started by hand holds the addresses, and the secret is the user's own or a file. Without
a folder a ps says who takes part.
"""

from contextlib import closing
from pathlib import Path

import msgspec

from paceline.cluster.discovery import known_secret
from paceline.cluster.moved import Whereabouts
from paceline.cluster.spec import ClusterSpec, split_address
from paceline.errors import AuthenticationError, ClusterError, UsageError
from paceline.telemetry.paths import RunPaths
from paceline.transport.channel import Channel, connect
from paceline.transport.security import Role, Secret
from paceline.wire import messages as m

KEYS = "--secret-file, --tls and --insecure must be as its tasks have them"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The flags with which tasks that were started by hand prove themselves."""

    secret_file: str | None = None
    tls: bool = False
    insecure: bool = False

    def secret(self) -> Secret:
        """Read the secret that these tasks share; make none."""
        return known_secret(self.secret_file, self.tls, self.insecure)


OWN = Access()


class Running(msgspec.Struct, frozen=True):
    """A run that can be asked."""

    name: str  # as the user gave it
    run_dir: Path | None
    cluster: ClusterSpec
    secret: bytes
    is_by_hand: bool = False

    @property
    def ps(self) -> Whereabouts:
        """Return the addresses of its ps as they are now."""
        return Whereabouts(self.cluster, self.run_dir)

    def connect(self) -> Channel:
        """Connect to ps:0."""
        try:
            return connect(self.ps[0], "auto", self.secret, role=Role.OPERATOR)
        except ClusterError as error:
            raise UsageError(self.refused(error)) from error

    def refused(self, error: ClusterError) -> str:
        """Say why the run cannot be asked, and what can be done."""
        if self.is_by_hand and isinstance(error, AuthenticationError):
            return f"The run in {self.name} has another secret; {KEYS}."
        return f"The run in {self.name} does not answer: it has ended, or has not begun yet ({error})."


def running(run: Path | str, access: Access = OWN) -> Running:
    """Find the run in this folder, or at these addresses; refuse one that has ended."""
    found = located(run, access)
    if found.run_dir is not None and (summary := RunPaths(found.run_dir).summary).exists():
        raise UsageError(f"The run in {run} has ended: {summary.name} is there.")
    return found


def located(run: Path | str, access: Access = OWN) -> Running:
    """Find a run that may have ended."""
    addresses = addresses_of(str(run))
    if addresses and not Path(run).exists():
        return _at(str(run), addresses, access)
    paths = RunPaths(run)
    cluster, by_hand = paths.read_cluster(), paths.read_by_hand()
    if by_hand is None:
        return Running(str(run), Path(run), cluster, paths.read_secret())
    how = Access(
        secret_file=access.secret_file,
        tls=access.tls or by_hand.tls,
        insecure=access.insecure or (by_hand.insecure and access.secret_file is None),
    )
    return Running(str(run), Path(run), cluster, how.secret(), is_by_hand=True)


def addresses_of(text: str) -> list[str]:
    """Split a list of addresses, as --ps_hosts takes them; return none if the text is no such list.

    >>> addresses_of("a:2222,b:2222"), addresses_of("runs/latest")
    (['a:2222', 'b:2222'], [])
    """
    words = [word.strip() for word in text.split(",")]
    try:
        for word in words:
            split_address(word)
    except UsageError:
        return []
    return words


def _at(name: str, addresses: list[str], access: Access) -> Running:
    """Ask these ps which tasks there are; the first that answers is believed."""
    secret, why = access.secret(), ""
    for address in addresses:
        try:
            with closing(connect(address, "auto", secret, role=Role.READER)) as channel:
                reply = channel.ask(m.Describe())[0]
        except AuthenticationError as error:
            raise UsageError(f"The ps at {address} has another secret; {KEYS}.") from error
        except ClusterError as error:
            why = why or str(error)
            continue
        if isinstance(reply, m.Described) and reply.cluster:
            return Running(name, None, ClusterSpec(reply.cluster), secret, is_by_hand=True)
        why = why or f"{address} is no ps of a cluster"
    raise UsageError(
        f"No ps answers at {name} ({why}); give the address of one as --ps_hosts has it, while it serves; {KEYS}."
    )
