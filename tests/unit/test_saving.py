"""IS a checkpoint of one version, also when a ps is started again or another copy is asked for in the middle of it?"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from lives import Life, spec_by_name

from paceline.checkpoint.policy import SavePolicy
from paceline.checkpoint.read import load, verify
from paceline.errors import ConnectionLost, PacelineError, Refused, WaitTimeout
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.server.control.actions import Answer
from paceline.server.control.saving import Saving
from paceline.server.control.saving import copy as copy_with_buffers
from paceline.transport.base import Buffer
from paceline.wire import messages as m
from paceline.wire.frames import Flag, Outcome
from paceline.worker.checkpoints import saver as saver_module
from paceline.worker.checkpoints.saver import Saver
from paceline.worker.checkpoints.saving import CopyGone
from paceline.worker.requests.identity import Identity
from paceline.worker.session import WorkerSession

LAYOUT = Layout((TensorSpec("weight", (20, 8), (8, 1), "float32", 0),))
WHERE = m.Position(0)
Between = Callable[[str], None]


def ps() -> Life:
    made = Life(spec_by_name("Adam"), ModeSpec(), LAYOUT)
    for number in range(3):
        made.push(number)
    return made


def copy_of(life: Life) -> m.Copied:
    return life.copy(m.Copy(0, 1, is_now=True))


def announcing(life: Life) -> Saving:
    """Every update is to be saved from now on."""
    saving, control = life.core.control.saving, life.core.control
    saving.policy = SavePolicy("1")
    saving.updated(control, 0.0)
    return saving


def parts_of(life: Life, copy: m.Copied, what: str = "parameters") -> bytes:
    with life.core.fetched(m.Fetch(what, is_copy=True, number=copy.number)) as (_, block):
        return bytes(block)


# --- the ps ---------------------------------------------------------------------------------------------------------


def test_what_is_fetched_is_of_the_copy_that_was_asked_for() -> None:
    life = ps()
    first = copy_of(life)
    wanted = parts_of(life, first)
    life.push(3)
    assert parts_of(life, first) == wanted
    second = copy_of(life)
    with pytest.raises(Refused, match="no copy 1 to fetch"):
        parts_of(life, first, "slots")
    assert (second.version, second.number) == (4, 2)
    assert parts_of(life, second) != wanted


def test_a_copy_that_is_refused_leaves_nothing_to_do() -> None:
    """Else the carried tensors of the next request, another worker's perhaps, would be stored as the chief's."""
    life = ps()
    control = life.core.control
    control.is_initialised = False
    with pytest.raises(Refused, match="nothing to save yet"):
        copy_with_buffers(control, 1, m.Copy(0, 1, is_now=True), 0.0, has_buffers=True)
    assert control.take() == []


def test_a_heartbeat_may_come_while_a_copy_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no lock, and may say where a worker is of which nothing was known."""
    life = ps()
    saving, replace = life.core.control.saving, msgspec.structs.replace
    saving.heard(m.Position(0, steps=3))

    def slow(position: m.Position, **changes: object) -> m.Position:
        saving.heard(m.Position(1))
        return replace(position, **changes)

    monkeypatch.setattr("paceline.server.control.saving.msgspec.structs.replace", slow)
    assert [where.worker for where in copy_of(life).positions][:1] == [0]


def test_a_copy_on_its_way_is_not_overwritten() -> None:
    life = ps()
    first = copy_of(life)
    with life.core.fetched(m.Fetch("parameters", is_copy=True, number=first.number)) as (_, block):
        before = bytes(block)
        life.push(3)
        second = copy_of(life)
        assert bytes(block) == before
    life.push(4)
    copy_of(life)
    assert bytes(block) == before and parts_of(life, copy_of(life)) != before
    assert second.version == 4


def test_the_memory_of_a_copy_is_used_again() -> None:
    life = ps()
    copy_of(life)
    memory = life.core.copies._copy.parameters  # type: ignore[union-attr]
    life.push(3)
    copy_of(life)
    assert life.core.copies._copy.parameters is memory  # type: ignore[union-attr]


def test_who_did_not_hear_of_it_is_not_awaited() -> None:
    """In k of n a late worker goes from the version before the announced one to the one after it."""
    life = Life(spec_by_name("SGD"), ModeSpec(name="sync", replicas_to_aggregate=1), LAYOUT)
    saving = announcing(life)
    saving.marked(Answer((1, 1), 1, Outcome.APPLIED, 0))
    life.push(1)
    copy = life.copy(m.Copy(1, 1))
    assert copy.is_taken and copy.version == 1 and copy.awaited == [1]
    saving.note(m.Position(1, copy.version), has_rounds=True)
    assert life.copy(m.Copy(1, 1)).awaited == []


def test_who_has_passed_it_is_not_awaited() -> None:
    """In k of n the others may have made the announced update, and more, before one reads what it was told."""
    life = Life(spec_by_name("SGD"), ModeSpec(name="sync", replicas_to_aggregate=1), LAYOUT)
    saving = announcing(life)
    saving.marked(Answer((1, 1), 1, Outcome.APPLIED, 0))
    life.push(1)
    saving.note(m.Position(1, 0), has_rounds=True)
    assert life.copy(m.Copy(1, 1)).awaited == [1], "where it was before"
    saving.note(m.Position(1, 2), has_rounds=True)
    assert life.copy(m.Copy(1, 1)).awaited == []


def test_who_only_pulled_has_not_heard_of_it() -> None:
    """It looks at what became of its push, not at what is said beside parameters that it had to ask for again."""
    life = Life(spec_by_name("SGD"), ModeSpec(name="sync", replicas_to_aggregate=1), LAYOUT)
    saving, control = announcing(life), life.core.control
    control.at[0, 1] = 1
    (answer,) = control.pulled(1, (0, 1), 1, (), False, 0.0)
    assert isinstance(answer, Answer)
    assert saving.flags == Flag.SAVE and answer.flags == 0
    life.push(1)
    copy = life.copy(m.Copy(0, 1))
    assert copy.is_taken and copy.awaited == []


def test_a_writer_that_took_no_part_in_it_hears_of_it_afterwards() -> None:
    """Else nobody writes it, and until that is noticed nothing else is saved either."""
    life = Life(spec_by_name("SGD"), ModeSpec(name="sync", replicas_to_aggregate=1), LAYOUT)
    announcing(life)
    control = life.core.control
    control.at[0, 1], control.at[1, 1] = 1, 2
    life.push(1)
    copy = life.copy(m.Copy(0, 1))
    assert copy.is_taken and copy.awaited == []
    for key in ((1, 1), (0, 1), (0, 1)):
        control.do([Answer(key, 1, Outcome.APPLIED, 1)], 0.0)
    flags = [action.flags for action in control.take() if isinstance(action, Answer)]
    assert flags == [0, Flag.SAVE | Flag.WRITES, 0]


# --- the writer -----------------------------------------------------------------------------------------------------


class Connection:
    """The saver's way to the ps of a Life; `between` is called before everything that is asked."""

    life: Life
    between: Between

    def __init__(self, me: Identity, index: int) -> None:
        self.index = index
        self._core = self.life.core
        type(self).between("connect")

    def _here(self, what: str) -> None:
        type(self).between(what)
        if self.life.core is not self._core:
            raise ConnectionLost("ps:0 ended")

    def ask(self, request: m.Request, bulk: Sequence[Buffer] = ()) -> m.Reply:
        return m.Done()

    def copied(self, request: m.Copy, carried: bytes = b"") -> m.Copied:
        self._here("copy")
        return self.life.copy(request)

    def fetch(
        self, what: str, limit_bytes: int, copy: m.Copied, worker: int | None = None
    ) -> tuple[m.Fetched, bytearray]:
        self._here(what)
        asked = m.Fetch(what, is_copy=True, worker=worker, number=copy.number)
        try:
            with self._core.fetched(asked) as (told, block):
                return told, bytearray(block)
        except Refused as error:
            raise CopyGone(str(error)) from error

    def close(self) -> None:
        pass


class Saving:
    """A saver, its ps, and what happens at the first of each question."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, wait_s: float = 20.0) -> None:
        self.life = Connection.life = ps()
        self.happens: dict[str, Callable[[], None]] = {}
        patch.setattr(Connection, "between", self._between, raising=False)
        patch.setattr(saver_module, "Connection", Connection)
        me = Identity(
            "worker", 0, 1, "r", True, ModeSpec(), ("here:1",), ("/job:worker/replica:0/task:0",), "bytes", "tcp",
            "float32", False, b"", 5.0, wait_s,
        )  # fmt: skip
        self.said: list[str] = []
        self.lineages = {0: 0}
        self.saver = Saver(
            me, LAYOUT, place(LAYOUT, 1, "bytes"), folder, 5, self.said.append, lambda *a, **b: None,
            lineage_of=self.lineages.__getitem__,
        )  # fmt: skip

    def _between(self, what: str) -> None:
        self.happens.pop(what, lambda: None)()


@pytest.mark.parametrize("when", ["copy", "parameters", "slots", "carried"])
def test_a_ps_that_is_started_again_is_saved_after_all(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.happens[when] = saving.life.die
    path = saving.saver.save_now(WHERE)
    assert verify(path) == []
    wanted = saving.life.bits()["parameters"]
    assert bytes(load(path).model["weight"].data) == wanted[: 160 * 4]


def refuse_connection() -> None:
    raise ConnectionLost("nobody listens")


def test_a_ps_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch)
    saving.happens["connect"] = refuse_connection
    assert saving.saver.save_now(WHERE).name == "step-00000003"


def test_only_until_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, wait_s=0.0)
    monkeypatch.setattr(Connection, "between", lambda what: refuse_connection())
    with pytest.raises(WaitTimeout, match="nobody listens"):
        saving.saver.save_now(WHERE)


def test_a_copy_of_somebody_else_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters and its optimizer state would be of two versions."""
    saving = Saving(tmp_path, monkeypatch)

    def other() -> None:
        saving.life.push(3)
        copy_of(saving.life)

    saving.happens["slots"] = other
    path = saving.saver.save_now(WHERE)
    state = load(path)
    assert state.state.shards[0].version == state.state.global_step == 4
    assert bytes(state.model["weight"].data) == saving.life.bits()["parameters"][: 160 * 4]


def test_what_a_ps_held_before_the_run_went_back_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still while its copy was fetched; another one has taken its place, under a new lineage. With its name on
    it the old copy would be the newest checkpoint when that one is lost, too."""
    saving = Saving(tmp_path, monkeypatch, wait_s=0.0)
    saving.happens["slots"] = lambda: saving.lineages.update({0: 1})
    with pytest.raises(WaitTimeout, match="ps:0 has gone back to a checkpoint since it was copied"):
        saving.saver.save_now(WHERE)
    assert list(tmp_path.iterdir()) == []


def test_another_version_than_told_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving = Saving(tmp_path, monkeypatch, wait_s=0.0)
    plain = Connection.fetch

    def other(self: Connection, *args: object) -> tuple[m.Fetched, bytearray]:
        told, block = plain(self, *args)  # type: ignore[arg-type]
        return msgspec.structs.replace(told, version=told.version + 1), block

    monkeypatch.setattr(Connection, "fetch", other)
    with pytest.raises(WaitTimeout, match="of version 4, its copy is of 3"):
        saving.saver.save_now(WHERE)
    assert list(tmp_path.iterdir()) == []


def test_saving_now_does_not_wait_for_one_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The announced update is still to come: it may be the very worker that saves now which has to make it."""
    saving = Saving(tmp_path, monkeypatch)
    waits = threading.Event()
    plain = Connection.copied

    def copied(self: Connection, request: m.Copy, carried: bytes = b"") -> m.Copied:
        if request.is_now:
            return plain(self, request)
        waits.set()
        return m.Copied(is_taken=False, is_wanted=True, has_rounds=True)

    monkeypatch.setattr(Connection, "copied", copied)
    saving.saver.wake(4)
    assert waits.wait(10)
    saved: list[Path] = []
    now = threading.Thread(target=lambda: saved.append(saving.saver.save_now(WHERE)), daemon=True)
    now.start()
    now.join(10)
    assert [path.name for path in saved] == ["step-00000003"]
    waits.clear()
    assert waits.wait(10)  # and then it waits again
    saving.saver.close(10)


def test_whoever_sees_the_folder_early_waits_for_the_rest_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher ends everybody once the folder is there, and then the chief must know that it needs no other."""
    saving = Saving(tmp_path, monkeypatch)
    assert not saving.saver.has_just_saved(60.0, 10.0)
    knew: list[bool] = []
    asks = threading.Thread(target=lambda: knew.append(saving.saver.has_just_saved(60.0, 10.0)), daemon=True)

    def retain(folder: Path, *_: object) -> None:
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        asks.start()
        asks.join(0.2)
        assert knew == []

    monkeypatch.setattr(saver_module, "retain", retain)
    saving.saver.save_now(WHERE)
    asks.join(10)
    assert knew == [True]


# --- the script -----------------------------------------------------------------------------------------------------


class Fails:
    """A saver that cannot."""

    incarnation = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def save_now(self, position: m.Position, waits_for_others: bool, others: Sequence[Path] | None = None) -> Path:
        raise self._error


@pytest.mark.parametrize("error", [WaitTimeout("gave up"), ConnectionLost("went"), Refused("no"), OSError("full")])
def test_what_cannot_be_saved_is_told_and_training_goes_on(error: Exception) -> None:
    said: list[str] = []
    session = WorkerSession(None, said.append)
    session.training_step = type("TrainingStep", (), {"client": type("Client", (), {"incarnation": 1})})()  # type: ignore[assignment]
    session.saver = Fails(error)  # type: ignore[assignment]
    try:
        assert session.save(WHERE) is None
    except PacelineError as escaped:
        pytest.fail(f"it ends the chief: {escaped}")
    assert said == [f"paceline: no checkpoint was written: {error}"]
