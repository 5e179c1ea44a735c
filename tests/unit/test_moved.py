"""cluster/moved: where a ps is that had to be started elsewhere."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cluster import moved
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ConnectionLost, UsageError
from paceline.telemetry.ledger import Kind, Ledger, read
from paceline.telemetry.ledgers import Recorded, set_predecessor_aside, verdict_of
from paceline.telemetry.paths import RunPaths
from paceline.wire.frames import SEGMENT_HEAD_BYTES
from paceline.wire.messages import Joined, encode
from paceline.worker.requests.link import Link

PS_0, PS_1 = Task("ps", 0), Task("ps", 1)
CLUSTER = ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]})


def test_what_is_said_of_others_stays(tmp_path: Path) -> None:
    moved.write(tmp_path, {PS_0: "x:1"})
    moved.write(tmp_path, {PS_1: "y:1"})
    moved.write(tmp_path, {PS_0: "z:1"})
    assert list(moved.Whereabouts(CLUSTER, tmp_path)) == ["z:1", "y:1"]
    assert moved.address(tmp_path, Task("ps", 2), "own:1") == "own:1"


def test_many_move_at_once(tmp_path: Path) -> None:
    tasks = [Task("ps", index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda task: moved.write(tmp_path, {task: f"x:{task.index + 1}"}), tasks))
    assert [moved.address(tmp_path, task, "") for task in tasks] == [f"x:{task.index + 1}" for task in tasks]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"ps:0": 1}', b'{"ps:0": "no port"}'])
def test_it_never_leads_back(tmp_path: Path, content: bytes | None) -> None:
    """An address that was read once holds, also while the file is gone or damaged: the old ps may still live."""
    where = moved.Whereabouts(CLUSTER, tmp_path)
    assert where[0] == "a:1"
    moved.write(tmp_path, {PS_0: "x:1"})
    assert where[0] == "x:1"
    if content is None:
        (tmp_path / moved.FILE).unlink()
    else:
        (tmp_path / moved.FILE).write_bytes(content)
    assert where[0] == "x:1" and where[:] == ["x:1", "b:1"]


def test_another_start_forgets_it(tmp_path: Path) -> None:
    moved.write(tmp_path, {PS_0: "x:1"})
    moved.forget(tmp_path)
    moved.forget(tmp_path)
    assert moved.address(tmp_path, PS_0, "a:1") == "a:1" and list(tmp_path.iterdir()) == []


def test_an_address_that_none_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no port"):
        moved.write(tmp_path, {PS_0: "x"})
    assert not (tmp_path / moved.FILE).exists()


def test_what_came_before_keeps_its_ledger_and_counts_as_before(tmp_path: Path) -> None:
    """The old ps may still live and write: two of them in one file would be the end of both."""
    path = RunPaths(tmp_path).ledger(PS_0)
    old = Ledger(path)
    old.write(Kind.START)
    set_predecessor_aside(tmp_path, PS_0)
    new = Ledger(path)
    new.write(Kind.START)
    old.write(Kind.MODE)  # it does not know
    for ledger in (old, new):
        ledger.close()
    assert [record.kind for record in read(path)] == [Kind.START]
    set_predecessor_aside(tmp_path, PS_0)
    newest = Ledger(path)
    newest.write(Kind.START)
    newest.close()
    verdict = verdict_of(tmp_path)
    assert verdict.is_ok and verdict.records == 4
    files = [*path.parent.glob("ps-0.moved-*.bin")]
    assert sorted(file.name for file in files) == ["ps-0.moved-1.bin", "ps-0.moved-2.bin"]
    assert [record.number for record in Recorded([*sorted(files), path])] == [1, 2, 3, 4]


class Answers:
    """A channel to a ps that answers every Join with what it is told to."""

    shares_memory, lane, address = False, "tcp", "a:1"

    def __init__(self, joined: Joined) -> None:
        self._joined = joined
        self.is_closed = False

    def say(self, request: object, bulk: object = ()) -> None:
        pass

    def recv_cold(self) -> SimpleNamespace:
        return SimpleNamespace(tail=encode(self._joined), bulk_bytes=0)

    def close(self) -> None:
        self.is_closed = True


def joined(lineage: int, version: int, is_initialised: bool = True) -> Joined:
    return Joined(is_initialised, version, lineage, [SEGMENT_HEAD_BYTES + 4] * 2)


def link_to(first: Joined) -> Link:
    link = Link(Answers(first), 0, memoryview(bytearray(4)), worker=0, incarnation=1)  # type: ignore[arg-type]
    link.join(None)  # type: ignore[arg-type]
    return link


def test_nobody_trains_with_a_ps_of_an_older_lineage() -> None:
    """INVARIANT: of two ps:0, the one that was left behind is refused, however the worker came to it."""
    link, old = link_to(joined(lineage=1, version=25)), Answers(joined(lineage=0, version=90))
    link.channel = old  # type: ignore[assignment]
    with pytest.raises(ConnectionLost, match="of lineage 0, and worker:0 trains in lineage 1"):
        link.join(None)  # type: ignore[arg-type]
    assert (link.version, link.lineage, old.is_closed) == (25, 1, True)


def test_an_empty_ps_does_not_make_a_worker_forget_its_lineage() -> None:
    """Whoever brings it values takes the next one; with the number of a lineage that was, nobody would see a change."""
    link = link_to(joined(lineage=1, version=25))
    link.channel = Answers(joined(lineage=0, version=0, is_initialised=False))  # type: ignore[assignment]
    link.join(None)  # type: ignore[arg-type]
    assert link.lineage == 1


def test_memory_of_a_shard_that_went_back_is_not_read_as_if_it_had_not() -> None:
    """All shards go back with one that moved, and a worker that maps their memory sees it before it hears of it."""
    link = link_to(joined(lineage=0, version=20))
    memory = memoryview(bytearray(SEGMENT_HEAD_BYTES + 4))
    link._sequence, link._parameters = memory[:8].cast("Q"), memory[SEGMENT_HEAD_BYTES:]
    link._sequence[0] = 2 * 15
    told = []

    def on_lost(lost: Link, error: ConnectionLost) -> None:
        told.append(str(error))
        lost.version = 15  # as it has joined again

    link._recover = on_lost
    link.read(1)
    assert told == ["ps:0 went back from version 20 to 15"] and link.version == 15
