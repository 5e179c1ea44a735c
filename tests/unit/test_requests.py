"""Ask a ps for everything but gradients, without sockets: a stand-in takes the place of a connection."""

import msgspec
import pytest

from paceline.cluster.membership import Phase, first_incarnation, incarnation_by_hand
from paceline.errors import PacelineError, Refused, UsageError
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.server.control import leaving, rewinding, waiting
from paceline.server.control.actions import ModeHolds, Restored
from paceline.server.control.config import PsConfig
from paceline.server.core import Core, Peer, Reply, Sends
from paceline.server.requests import Requests
from paceline.transport.security import Role
from paceline.wire import messages as m
from paceline.wire.frames import Frame, Kind

LEASE_S = 5.0
SECOND, THIRD = first_incarnation(2), first_incarnation(3)
ASYNC, SYNC = ModeSpec(), ModeSpec(name="sync")
NO_FRAME = Frame(Kind.COLD, 0, 0, 0, 0, 0, 0, 0, 0)


class Said:
    """A channel that keeps what was said."""

    bytes_in = bytes_out = 0
    role = Role.WORKER
    shares_memory = False

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.stream = self

    def say(self, message: object) -> None:
        self.messages.append(message)

    def shutdown(self) -> None:
        pass

    def set_send_timeout(self, seconds: float) -> None:
        pass


class Asked:
    """The requests of a ps with its core, and workers that have joined and started."""

    def __init__(self, spec: ModeSpec = SYNC, num_workers: int = 2, index: int = 0, is_started: bool = True) -> None:
        mode = make_mode(spec, num_workers)
        self.core = Core(PsConfig(index, 2, num_workers, "r", mode, "bytes", LEASE_S))
        self.requests = Requests(self.core, lambda task, report: None)
        self.core.control.is_started = self.core.control.is_initialised = is_started
        self.peers = [self.join(worker) for worker in range(num_workers)]

    def join(self, worker: int, incarnation: int = 1) -> Peer:
        peer, control = Peer(Said(), key=(worker, incarnation)), self.core.control  # type: ignore[arg-type]
        control.members.join(worker, incarnation, 0.0)
        control.keys[peer.id], control.at[worker, incarnation] = (worker, incarnation), peer.id
        self.core.peers[peer.id] = peer
        return peer

    def drop(self, worker: int, incarnation: int = 1) -> None:
        """It goes away."""
        leaving.drop(self.core.control, (worker, incarnation), 0.0)
        self.tell(self.core.perform(self.core.control.take()))

    def tell(self, sends: Sends) -> None:
        """Send, as a service does; a refusal is raised here."""
        for peer, reply in sends:
            assert isinstance(reply, Reply)
            peer.channel.say(reply.message)
            if reply.reason:
                raise Refused(reply.reason)

    def ask(self, peer: Peer | int, message: m.Request) -> list[object]:
        """What is said to this worker (or stranger) by the time it has asked."""
        peer = self.peers[peer] if isinstance(peer, int) else peer
        self.core.peers[peer.id] = peer
        self.tell(self.requests.handle(peer, message, NO_FRAME))
        return self.said(peer)

    def said(self, peer: Peer | int) -> list[object]:
        """What was said to this worker since we last looked."""
        channel: Said = (self.peers[peer] if isinstance(peer, int) else peer).channel  # type: ignore[assignment]
        messages, channel.messages = channel.messages, []
        return messages


def stranger(role: Role = Role.WORKER) -> Peer:
    peer = Peer(Said())  # type: ignore[arg-type]
    peer.channel.role = role
    return peer


def test_attaching_is_a_sign_of_life() -> None:
    """Between joining and the first heartbeat a busy ps may have needed longer than a lease to make its shard."""
    asked = Asked(ASYNC, num_workers=1)
    asked.core.control.members.join(0, incarnation=1, now_s=-1000.0)
    assert asked.core.control.members.expired(0.0, LEASE_S) == [(0, 1)]
    assert asked.ask(stranger(), m.Attach(0, 1)) == [m.Done()]
    assert asked.core.control.members.expired(asked.core.control.members.pulses[0].heard_s, LEASE_S) == []
    assert asked.core.control.members.pulses[0].heard_s > -1000.0


# --- another mode -----------------------------------------------------------------------------------------------------


def test_the_mode_changes_when_everybody_stands_still() -> None:
    asked, ctl = Asked(), stranger()
    assert asked.ask(ctl, m.SwitchMode(ASYNC)) == []
    assert asked.ask(0, m.Ready()) == []
    dial = m.Dial(1, ASYNC, 0)
    assert asked.ask(1, m.Ready()) == asked.said(0) == [dial]
    (told,) = asked.said(ctl)
    assert isinstance(told, m.Switched)
    assert (told.before, told.after) == (SYNC, ASYNC)
    assert told.pause_ms is not None
    assert [change.mode for change in asked.core.control.mode_changes] == ["async"]
    assert not asked.core.control.state.mode.has_rounds


def test_who_does_not_wait_is_told_that_it_is_under_way() -> None:
    asked = Asked()
    assert asked.ask(stranger(), m.SwitchMode(ASYNC, waits=False)) == [m.Switched(SYNC, ASYNC, 0, None)]
    assert asked.core.control.state.mode.spec == SYNC


def test_the_same_mode_again_changes_nothing() -> None:
    asked = Asked()
    assert asked.ask(stranger(), m.SwitchMode(SYNC)) == [m.Switched(SYNC, SYNC, 0, 0.0)]
    assert (asked.core.control.dial.turn, asked.core.control.state.is_switching) == (0, False)


def test_who_stands_still_for_nothing_goes_on_at_once() -> None:
    asked = Asked()
    assert asked.ask(0, m.Ready()) == [asked.core.control.dial]


@pytest.mark.parametrize("leaves", ["pause", "barrier", "close", "drop"])
def test_a_switch_does_not_wait_for_one_that_does_not_train(leaves: str) -> None:
    asked = Asked()
    asked.ask(stranger(), m.SwitchMode(ASYNC))
    asked.ask(0, m.Ready())
    if leaves == "drop":
        asked.drop(1, 1)
    else:
        asked.ask(1, {"pause": m.Pause(), "barrier": m.Barrier(), "close": m.Close()}[leaves])
    assert asked.said(0) == [m.Dial(1, ASYNC, 0)]


def test_one_that_joins_meanwhile_starts_in_the_new_mode() -> None:
    asked = Asked(num_workers=2)
    asked.ask(stranger(), m.SwitchMode(ASYNC))
    asked.core.control.members.leave(1, 1)
    joiner = asked.join(1, incarnation=2)
    assert asked.ask(joiner, m.Start()) == [], "it waits for the switch"
    assert asked.ask(0, m.Ready()) == [m.Dial(1, ASYNC, 0)], "and the switch does not wait for it"
    (started,) = asked.said(joiner)
    assert isinstance(started, m.Started)
    assert started.dial == asked.core.control.dial == m.Dial(1, ASYNC, 0)


def test_decisions_that_nobody_has_carried_go_into_the_next_dial_too() -> None:
    asked = Asked(num_workers=1)
    asked.core.control.state.push((0, 1), 1, base=0)  # applied here; ps:1 has not heard of it
    decisions = ((0, ((0, 1, 1),)),)
    for epoch, spec in ((1, ASYNC), (2, SYNC)):
        asked.ask(stranger(), m.SwitchMode(spec))
        assert asked.ask(0, m.Ready()) == [m.Dial(epoch, spec, 1, decisions)]
        assert asked.ask(0, m.AskDecisions()) == [m.Carried(decisions)]
    asked.core.control.state.push((0, 1), 2, base=1)  # whoever makes an update has carried all that was before
    assert asked.ask(0, m.AskDecisions()) == [m.Carried(((1, ((0, 1, 1),)),))]


@pytest.mark.parametrize(
    ("asked", "spec", "reason"),
    [
        (Asked(index=1), ASYNC, "only ps:0"),
        (Asked(), ModeSpec(name="local"), "cannot go on in mode local"),
        (Asked(ModeSpec(name="local")), SYNC, "cannot go on in mode sync"),
        (Asked(), ModeSpec(name="sync", replicas_to_aggregate=0), "at least 1"),
        (Asked(), ModeSpec(name="bounded", staleness=-1), "0 or more"),
        (Asked(is_started=False), ASYNC, "not started"),
    ],
    ids=["another ps", "to local", "from local", "K below 1", "S below 0", "too early"],
)
def test_what_cannot_be_is_refused_and_changes_nothing(asked: Asked, spec: ModeSpec, reason: str) -> None:
    with pytest.raises((Refused, UsageError), match=reason):
        asked.ask(stranger(), m.SwitchMode(spec))
    assert asked.core.control.wanted is None
    assert not asked.core.control.state.is_switching


def test_a_run_that_is_over_changes_no_more() -> None:
    asked = Asked()
    for worker in range(2):
        asked.core.control.members.close(worker)
    with pytest.raises(PacelineError, match="the run is over"):
        asked.ask(stranger(), m.SwitchMode(ASYNC))


def test_a_newer_change_takes_the_place_of_the_one_under_way() -> None:
    asked, first, bounded = Asked(), stranger(), ModeSpec(name="bounded")
    asked.ask(first, m.SwitchMode(ASYNC))
    assert asked.ask(stranger(), m.SwitchMode(ASYNC, waits=False)) == [m.Switched(SYNC, ASYNC, 0, None)]
    assert asked.ask(stranger(), m.SwitchMode(bounded, waits=False)) == [m.Switched(SYNC, bounded, 0, None)]
    assert (
        asked.core.control.wanted == bounded
        and asked.core.control.state.is_switching
        and not asked.core.control.switchers
    )


def test_another_shard_is_told_by_the_workers_and_says_where_its_rounds_begin() -> None:
    asked = Asked(ASYNC, index=1)
    asked.core.control.state.version = 7
    dial = m.Dial(1, SYNC, 5)
    assert asked.ask(0, m.Align(dial)) == asked.ask(1, m.Align(dial)) == [m.Aligned(2, 7)]
    assert asked.core.control.state.mode.spec == SYNC


# --- waiting for each other -------------------------------------------------------------------------------------------


def test_a_barrier_lets_out_the_holder_of_a_ticket_that_everybody_waits_for() -> None:
    """In bounded mode one may wait for a worker that waits for that ticket."""
    asked = Asked(ModeSpec(name="bounded", staleness=0), num_workers=3)
    assert asked.ask(2, m.Steps(2)) == [m.Ticket(True, False, 0, asked.core.control.dial)]
    assert asked.ask(0, m.Steps(2)) == [m.Ticket(True, False, 0, asked.core.control.dial)]
    assert asked.ask(1, m.Steps(2)) == []
    assert asked.ask(2, m.Barrier()) == []
    asked.core.control.state.push((0, 1), 1, base=0)
    assert asked.core.control.state.waiting.keys() == {(0, 1)}
    waiting.release_barrier(asked.core.control)
    asked.tell(asked.core.perform(asked.core.control.take()))
    assert asked.said(2) == [asked.core.control.dial]


def test_one_that_is_lost_before_it_joined_comes_too_late_and_its_successor_does_not() -> None:
    asked = Asked(num_workers=2)
    asked.ask(stranger(Role.LAUNCHER), m.Lost(1, incarnation=SECOND))
    assert asked.core.control.members.gone == [1]
    assert not asked.core.control.members.join(1, incarnation=SECOND, now_s=0.0)
    assert asked.core.control.members.join(1, incarnation=THIRD, now_s=0.0)
    asked.ask(stranger(Role.LAUNCHER), m.Lost(1, incarnation=SECOND))
    assert asked.core.control.members.gone == [], "that was said of another one"


def test_training_starts_without_the_worker_that_only_serves() -> None:
    asked = Asked(num_workers=2, is_started=False)
    asked.core.control.is_initialised = True
    asked.core.control.members.recall(1, Phase.ABSENT, 0, 0.0)
    assert asked.ask(0, m.Start()) == [], "the other one may still be on its way"
    assert asked.ask(stranger(), m.Serves(1, 1)) == [m.Done()]
    assert [type(told) for told in asked.said(0)] == [m.Started]


def test_nobody_goes_on_before_all_who_began_have_the_first_values() -> None:
    asked = Asked(num_workers=3, is_started=False)
    asked.core.control.is_initialised = True
    first = [*asked.ask(1, m.Start()), *asked.ask(0, m.Start()), *asked.said(1)]
    assert [told.is_first for told in first] == [True, True], "all have joined, so they begin"
    assert asked.ask(0, m.Start(has_values=True)) == []
    assert [told.is_first for told in asked.ask(2, m.Start())] == [True], "it has joined as early, and asks late"
    assert asked.ask(1, m.Start(has_values=True)) == []
    assert waiting.who_waits(asked.core.control) == {(0, 1), (1, 1)}, "they stand still through no fault of their own"
    (status,) = asked.ask(stranger(), m.AskStatus())
    assert status.missing == [2]
    asked.drop(2, 1)  # dead, before it had them
    asked.tell(asked.core.perform(leaving.tick(asked.core.control, 0.0)))
    assert [type(told) for worker in range(2) for told in asked.said(worker)] == [m.Started, m.Started]
    again = asked.join(2, SECOND)
    (told,) = asked.ask(again, m.Start())
    assert isinstance(told, m.Started) and not told.is_first, "the others have begun"


def test_a_worker_alone_has_the_first_values_at_once() -> None:
    asked = Asked(num_workers=1, is_started=False)
    asked.core.control.is_initialised = True
    (told,) = asked.ask(0, m.Start())
    assert isinstance(told, m.Started) and not told.is_first


def test_a_chief_that_only_serves_is_told_to_those_who_would_wait_for_it() -> None:
    asked = Asked(num_workers=2, is_started=False)
    asked.core.control.members.recall(0, Phase.ABSENT, 0, 0.0)
    assert asked.ask(1, m.Start()) == []
    asked.ask(stranger(), m.Serves(0, 1))
    (told,) = asked.said(1)
    assert isinstance(told, m.Failed) and "the chief only serves ops" in told.reason


def test_one_that_trains_does_not_resume() -> None:
    asked = Asked(ModeSpec(name="bounded", staleness=3))
    for push_id in (1, 2, 3):
        asked.core.control.state.push((0, 1), push_id, base=0)
    asked.ask(1, m.Resume())
    assert asked.core.control.state.clocks.get(1, 0) == 0, "it has done no step"
    asked.ask(1, m.Pause())
    asked.ask(1, m.Resume())
    assert asked.core.control.state.clocks[1] == 3, "one that trains again is no slower than the slowest"


# --- who it is --------------------------------------------------------------------------------------------------------

LAYOUT = Layout((TensorSpec("w", (3,), (1,), "float32", 0),))
OPTIMIZER = m.OptimizerSpec("SGD", [{"lr": 0.1}])


def joining(worker: int, incarnation: int) -> m.Join:
    return m.Join("worker", worker, incarnation, "r", worker == 0, "sync", "bytes", 2, LAYOUT, OPTIMIZER)


@pytest.mark.parametrize("leaves", ["dies", "is evicted", "is given up"])
def test_by_hand_one_whose_clock_was_set_back_gets_in_when_the_other_has_left(leaves: str) -> None:
    later, earlier = incarnation_by_hand(1_790_000_060), incarnation_by_hand(1_790_000_000)
    asked = Asked(num_workers=2)
    asked.drop(1, 1)
    asked.join(1, later)
    (told,) = asked.ask(stranger(), joining(1, earlier))
    assert isinstance(told, m.Fenced) and told.is_taken, "the later one is there"
    if leaves == "is given up":
        asked.ask(stranger(Role.LAUNCHER), m.Lost(1, incarnation=later))
        with pytest.raises(Refused, match="given up for good"):
            asked.ask(stranger(), joining(1, later))
    else:
        asked.drop(1, later)
        if leaves == "is evicted":
            asked.core.control.members.fence(1, later)
    (told,) = asked.ask(stranger(), joining(1, earlier))
    assert isinstance(told, m.Fenced) and (told.incarnation, told.is_taken) == (later, False)
    again = stranger()
    (joined,) = asked.ask(again, joining(1, told.incarnation + 1))
    assert isinstance(joined, m.Joined) and again.key == (1, later + 1)


def test_one_whose_optimizer_has_other_groups_is_refused() -> None:
    """Else the first push of either would end the ps: every group that an optimizer has here needs its options."""
    asked = Asked(num_workers=2)
    for worker in (0, 1):
        asked.drop(worker, 1)
    asked.ask(stranger(), joining(0, SECOND))
    two = msgspec.structs.replace(joining(1, SECOND), optimizer=m.OptimizerSpec("SGD", [{"lr": 0.1}, {"lr": 0.2}]))
    with pytest.raises(Refused, match="worker:1 brings an optimizer with options of 2 groups, and the model has 1"):
        asked.ask(stranger(), two)


@pytest.mark.parametrize("request_of", [m.Copy, m.FreeCopy])
def test_only_one_that_counts_saves(request_of: type[m.Copy | m.FreeCopy]) -> None:
    asked = Asked(num_workers=2)
    saver = stranger()
    assert len(asked.ask(saver, request_of(1, 1))) == 1, "on a connection of its own"
    for worker, incarnation in ((1, 2), (2, 1), (-1, 1), (1, 0)):
        with pytest.raises(Refused, match="only a worker of the run may save"):
            asked.ask(saver, request_of(worker, incarnation))
    with pytest.raises(Refused, match="only a worker of the run may save"):
        asked.ask(0, request_of(1, 1))  # another one's numbers
    asked.drop(1, 1)
    assert len(asked.ask(saver, request_of(1, 1))) == 1, "away for a moment"
    asked.core.control.members.fence(1, 1)
    with pytest.raises(Refused, match="only a worker of the run may save"):
        asked.ask(saver, request_of(1, 1))


def test_only_one_that_nobody_newer_is_known_of_brings_values() -> None:
    asked = Asked(num_workers=2)
    asked.join(1, 3)
    for worker, incarnation in ((1, 2), (2, 1), (0, 0)):
        with pytest.raises(Refused, match="no values to bring"):
            asked.ask(stranger(), m.Rewind(worker, incarnation, 1, False, LAYOUT, OPTIMIZER))
    with pytest.raises(Refused, match="no values to bring"):
        asked.ask(0, m.Rewind(1, 3, 1, False, LAYOUT, OPTIMIZER))
    assert asked.core.control.is_initialised and asked.core.shard is None, "nothing has begun"
    assert asked.ask(stranger(), m.Rewind(1, 3, 1, False, LAYOUT, OPTIMIZER)) == [m.Done()]
    assert not asked.core.control.is_initialised


def test_a_mode_that_comes_with_values_is_recorded() -> None:
    """Else what the ledger says of the updates that follow contradicts the mode that the run was started in."""
    asked = Asked(num_workers=2)
    asked.core.control.is_initialised = False
    first = stranger()
    asked.ask(first, m.Rewind(0, 1, 1, False, LAYOUT, OPTIMIZER, is_lost=True))
    dial = m.Dial(3, ASYNC, 12)
    actions = rewinding.restored(asked.core.control, first.id, m.Restored(19, dial, None), 0.0)
    kinds = [type(action) for action in actions]
    assert kinds.index(Restored) < kinds.index(ModeHolds), "it is the mode of the new lineage"
    (holds,) = [action for action in actions if isinstance(action, ModeHolds)]
    assert (holds.mode.spec, holds.turn, holds.version) == (ASYNC, 3, 19)


def test_what_one_has_brought_no_other_brings_again() -> None:
    """Two workers find the ps empty. The second begins when the first is done, and training may have gone on since."""
    asked = Asked(num_workers=2)
    asked.core.control.is_initialised = False
    first = stranger()
    asked.ask(first, m.Rewind(0, 1, 1, False, LAYOUT, OPTIMIZER, is_lost=True))
    asked.ask(first, m.Restored(19, None, None, is_reseeded=True, live=None))
    with pytest.raises(Refused, match="has got values meanwhile"):
        asked.ask(stranger(), m.Rewind(1, 1, 2, False, LAYOUT, OPTIMIZER, is_lost=True))
    assert asked.core.control.is_initialised and asked.core.control.lineage == 1
    # With a shard that is lost, one that has its memory goes back.
    assert asked.ask(stranger(), m.Rewind(1, 1, 2, False, LAYOUT, OPTIMIZER)) == [m.Done()]


def test_no_lineage_begins_twice() -> None:
    """ps:0 was lost twice: worker 0 has trained with the one in between, in lineage 1, and worker 1 has not."""
    fresh = Fresh()
    fresh.join(0, trained_in=1)
    for lineage in (1, 2):
        rewind = m.Rewind(1, 1, lineage, False, LAYOUT, OPTIMIZER, is_lost=True)
        if lineage == 1:
            with pytest.raises(Refused, match="ps:0 is of lineage 1 already"):
                fresh.ask(stranger(), rewind)
        else:
            fresh.ask(stranger(), rewind)


def test_an_empty_ps_tells_all_how_long_it_has_been_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("paceline.server.core.time.monotonic", lambda: now_s[0])
    fresh = Fresh()
    assert fresh.told(fresh.join(1)).empty_s == 0.0
    now_s[0] += 3.0
    assert fresh.told(fresh.join(0)).empty_s == 3.0


# --- a ps and the chief lost together -----------------------------------------------------------------------------


class Fresh:
    """ps:0 of two, started anew with nothing; the chief and a worker come to it, one of which has trained."""

    def __init__(self) -> None:
        self.core = Core(PsConfig(0, 2, 2, "r", make_mode(ASYNC, 2), "bytes", LEASE_S))
        self.requests = Requests(self.core, lambda task, report: None)

    def join(self, worker: int, trained_in: int = -1) -> Peer:
        layout = Layout((TensorSpec("weight", (8, 8), (8, 1), "float32", 0),))
        optimizer = m.OptimizerSpec("SGD", [{"lr": 0.1}])
        peer = Peer(Said())  # type: ignore[arg-type]
        peer.channel.recv_bulk = lambda frame, into: None  # type: ignore[method-assign]
        message = m.Join("worker", worker, 1, "r", worker == 0, "async", "bytes", 2, layout, optimizer)
        self.ask(peer, msgspec.structs.replace(message, trained_in=trained_in))
        return peer

    def ask(self, peer: Peer, message: m.Request) -> None:
        self.core.peers[peer.id] = peer
        for other, reply in self.requests.handle(peer, message, NO_FRAME):
            assert isinstance(reply, Reply)
            other.channel.say(reply.message)
            if reply.reason and other is peer:
                raise Refused(reply.reason)

    def told(self, peer: Peer) -> m.Joined:
        (reply,) = peer.channel.messages  # type: ignore[attr-defined]
        assert isinstance(reply, m.Joined)
        return reply


def test_a_chief_that_comes_later_hears_of_those_who_have_trained() -> None:
    fresh = Fresh()
    fresh.join(1, trained_in=0)
    assert fresh.told(fresh.join(0)).trained_in == 0


def test_a_chief_that_came_a_moment_earlier_does_not_begin_anew() -> None:
    fresh = Fresh()
    chief = fresh.join(0)
    fresh.join(1, trained_in=0)
    with pytest.raises(Refused, match="ps:0 lost together with the chief"):
        fresh.ask(chief, m.Init())
    assert not fresh.core.control.is_initialised
    with pytest.raises(Refused, match="lost together"):
        fresh.join(1, trained_in=0)


def test_a_chief_that_has_begun_anew_is_stopped_when_they_come() -> None:
    fresh = Fresh()
    chief = fresh.join(0)
    fresh.ask(chief, m.Init())
    fresh.ask(chief, m.Start())
    with pytest.raises(Refused, match="lost together"):
        fresh.join(1, trained_in=0)
    assert isinstance(chief.channel.messages[-1], m.Failed)  # type: ignore[attr-defined]


def test_a_chief_that_brings_a_checkpoint_goes_on() -> None:
    fresh = Fresh()
    chief = fresh.join(0)
    fresh.join(1, trained_in=0)
    fresh.ask(chief, m.Init(version=20, lineage=1))
    assert fresh.core.control.is_initialised and not fresh.core.control.no_start
    assert fresh.told(fresh.join(1, trained_in=0)).lineage == 1
