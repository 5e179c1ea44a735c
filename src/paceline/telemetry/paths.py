"""WHERE do the files of a run lie? Every file name of a run folder, in one class.

Called by the launcher and by every task that was given a run folder.
Must never depend on the current folder after it was made: a script may change it.
"""

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.secret import Secret, secret_beside_certificate
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

BY_HAND = "by_hand"
CLUSTER_BYTES = 16 << 20  # of thousands of tasks


class _Config(msgspec.Struct, frozen=True):
    """The one thing in config.json that says what may be asked of a run at all."""

    plain: bool = False


class ByHand(msgspec.Struct, frozen=True):
    """How tasks that were started one by one prove themselves to each other; their secret is not in the folder."""

    tls: bool = False
    insecure: bool = False


class _Started(msgspec.Struct, frozen=True):
    """The one thing in cluster.json that says how its tasks were started."""

    by_hand: ByHand | None = None


class RunPaths:
    """The files of the run in folder `root`.

    >>> RunPaths("/runs/r1").logs(Task("ps", 0)).as_posix()
    '/runs/r1/logs/ps-0.log'
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"RunPaths({str(self.root)!r})"

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.root / "config.json"

    @property
    def cluster(self) -> Path:
        """Jobs and addresses, and what each task runs on."""
        return self.root / "cluster.json"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def summary(self) -> Path:
        """How the run went; there when it has ended."""
        return self.root / "summary.json"

    @property
    def secret(self) -> Path:
        """What tasks of this run prove to each other that they know; only the owner may read it."""
        return self.root / "secret"

    def logs(self, task: Task) -> Path:
        """What this task printed."""
        return self.root / "logs" / f"{task.job}-{task.index}.log"

    @property
    def ledgers(self) -> Path:
        """What happened to every gradient, with --ledger."""
        return self.root / "ledger"

    def ledger(self, task: Task) -> Path:
        """What this task did to gradients."""
        return self.ledgers / f"{task.job}-{task.index}.bin"

    @property
    def telemetry_folder(self) -> Path:
        """What the tasks recorded."""
        return self.root / "telemetry"

    def telemetry(self, task: Task) -> Path:
        """What this task recorded."""
        return self.telemetry_folder / f"{task.job}-{task.index}.jsonl"

    def create(self) -> None:
        """Make the folders; those that are there already stay as they are."""
        try:
            for folder in ("logs", "telemetry", "checkpoints"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"The run folder {self.root} cannot be made: {error.strerror}.") from error

    @property
    def is_plain(self) -> bool:
        """Whether this is a run of a program that does not use paceline (`run --plain`), as far as its config tells."""
        try:
            return msgspec.json.decode(files.content(self.root, self.config.name), type=_Config).plain
        except (OSError, msgspec.MsgspecError):
            return False

    def read_cluster(self) -> ClusterSpec:
        """Who takes part, and at which addresses."""
        try:
            jobs = msgspec.json.decode(self._cluster_json(), type=dict[str, list[str] | dict[str, object]])
        except (OSError, msgspec.MsgspecError) as error:
            raise UsageError(f"No readable cluster at {self.cluster}: is {self.root} a run folder?") from error
        return ClusterSpec({job: addresses for job, addresses in jobs.items() if isinstance(addresses, list)})

    def _cluster_json(self) -> bytes:
        return files.content(self.root, self.cluster.name, CLUSTER_BYTES)

    def write_by_hand(self, cluster: ClusterSpec, by_hand: ByHand) -> None:
        """Write cluster.json for tasks that were started one by one; each of them writes the same."""
        self.root.mkdir(parents=True, exist_ok=True)
        draft = self.root / f".cluster.json.{os.getpid()}"
        told = {**cluster.as_dict(), BY_HAND: msgspec.structs.asdict(by_hand)}
        try:
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
            os.replace(draft, self.cluster)
        finally:
            draft.unlink(missing_ok=True)

    def read_by_hand(self) -> ByHand | None:
        """Read how such tasks prove themselves; None if a launcher has started them."""
        try:
            return msgspec.json.decode(self._cluster_json(), type=_Started).by_hand
        except (OSError, msgspec.MsgspecError):
            return None

    def write_secret(self, secret: bytes) -> None:
        """Write the secret as hex, readable by nobody else at any moment."""
        self.secret.unlink(missing_ok=True)
        descriptor = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secret.hex())

    def read_secret(self) -> Secret:
        """The secret of this run, for whoever wants to talk to its tasks later."""
        if self.is_plain:
            raise UsageError(f"The run in {self.root} is of a --plain program: it has no ps of ours that can be asked.")
        try:
            return secret_beside_certificate(
                bytes.fromhex(files.content(self.root, self.secret.name).decode()), self.root
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"No readable secret at {self.secret}: is {self.root} a run folder of yours?") from error


def new_run_dir(base: Path | str = "runs") -> Path:
    """Make `base/<date>-<time>-<four hex digits>` with its folders, and let `base/latest` point to it."""
    parent = Path(base).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        root = _make_unique(parent)
    except OSError as error:
        raise UsageError(f"No run folder can be made in {parent}: {error.strerror}.") from error
    RunPaths(root).create()
    _point_latest(parent, root.name)
    return root


def _make_unique(parent: Path) -> Path:
    while True:
        root = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        with suppress(FileExistsError):
            root.mkdir()
            return root


def _point_latest(parent: Path, name: str) -> None:
    """Swap the link in one move; a convenience, so a file system without links only goes without it."""
    draft = parent / f".latest-{name}"
    with suppress(OSError):
        draft.symlink_to(name, target_is_directory=True)
        os.replace(draft, parent / "latest")
    with suppress(OSError):
        draft.unlink()
