"""DOES a ps that is killed anywhere come back where it was? Every point of every update, all optimizers, all modes."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import pytest
import torch
from lives import OPTIMIZERS, Deaths, Killed, Life, Pieces, small_blocks, spec_by_name

from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.constraint import Constraint
from paceline.params.layout import Layout, TensorSpec
from paceline.server.control.config import PsConfig
from paceline.server.core import Core
from paceline.server.journal import COUNTED_FIELDS
from paceline.telemetry.records import ModeChange
from paceline.views import flat
from paceline.wire.frames import Outcome
from paceline.wire.messages import Position

LAYOUT = Layout(
    (
        TensorSpec("a.weight", (40, 16), (16, 1), "float32", 0),
        TensorSpec("a.bias", (40,), (1,), "float32", 0),
        TensorSpec("b.weight", (30, 40), (40, 1), "float32", 0),
    )
)
HALF = Layout(tuple(msgspec.structs.replace(t, dtype="bfloat16") for t in LAYOUT.tensors))
ASYNC, SYNC = ModeSpec(), ModeSpec(name="sync")
BLOCK = 512


def life(optimizer: str, mode: ModeSpec, layout: Layout = LAYOUT, ema: float | None = None) -> Life:
    return Life(spec_by_name(optimizer), mode, layout, ema)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Blocks this small gain nothing from a second one, and beside other programs each would wait for the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Given = Callable[[int], tuple[bytes, float]]


def plain(number: int) -> tuple[bytes, float]:
    return b"", 0.0


def gaps(number: int) -> tuple[bytes, float]:
    """The bias has no gradient in two pushes of three; the second weight not in the first ones."""
    return bytes([[0b111, 0b101, 0b011][number % 3]]), 0.0


def weights(number: int) -> tuple[bytes, float]:
    return b"", [10.0, 20.0, 20.0, 5.0, 0.0][number % 5]


def check_all_deaths(
    patch: pytest.MonkeyPatch,
    make: Callable[[], Life],
    pushes: int,
    given: Given = plain,
    every: int = 1,
    block: int = BLOCK,
) -> int:
    """Kill at each point of a run (or every so many); what comes out is what the run without a death made."""
    small_blocks(patch, block)
    deaths = Deaths(patch)
    reference = make()
    with deaths.at(0):
        for number in range(pushes):
            reference.push(number, *given(number))
    points, wanted = deaths.points, reference.bits()
    for fatal in range(1, points + 1, every):
        ps = make()
        number = 0
        with deaths.at(fatal):
            try:
                for number in range(pushes):
                    ps.push(number, *given(number))
            except Killed:
                pass
        ps.die()
        ps.again(number, *given(number))
        for rest in range(number + 1, pushes):
            ps.push(rest, *given(rest))
        got = ps.bits()
        assert got.keys() == wanted.keys(), fatal
        assert [name for name in wanted if got[name] != wanted[name]] == [], f"killed at point {fatal} of {points}"
    return points


@pytest.mark.parametrize("every", [7, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_async_every_optimizer(optimizer: str, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_all_deaths(monkeypatch, lambda: life(optimizer, ASYNC), 3, every=every) > 60


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode",
    [
        SYNC,
        ModeSpec(name="sync", replicas_to_aggregate=1),
        ModeSpec(name="sync", replicas_to_aggregate=4),
        ModeSpec(name="bounded", staleness=1),
        ModeSpec(staleness_scale=True),
    ],
    ids=str,
)
def test_every_mode(mode: ModeSpec, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_deaths(monkeypatch, lambda: life("Adam", mode), 6, every=every)


def test_gradients_that_are_missing_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_deaths(monkeypatch, lambda: life("SGD", ASYNC), 5, gaps)


def test_gradients_that_are_missing_in_part_of_adagrad(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_deaths(monkeypatch, lambda: life("Adagrad", SYNC), 4, gaps)


def test_sums_with_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ModeSpec(name="sync", replicas_to_aggregate=6)
    check_all_deaths(monkeypatch, lambda: life("SGD", mode), 12, weights, every=3)


def test_averages_and_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    check_all_deaths(monkeypatch, lambda: life("AdamW", SYNC, HALF, ema=0.9), 4)


CONSTRAINTS = (Constraint(max_norm=2.0), Constraint(min=-0.1), Constraint(-0.5, 0.5, max_norm=1.0))


@pytest.mark.parametrize(
    ("optimizer", "mode", "layout"), [("SGD", ASYNC, LAYOUT), ("Adam", SYNC, HALF)], ids=["async", "sync"]
)
def test_constraints(optimizer: str, mode: ModeSpec, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that was scaled is not scaled again when its block is done again: that would change its last bits."""
    tensors = zip(layout.tensors, CONSTRAINTS, strict=True)
    held = Layout(tuple(msgspec.structs.replace(t, constraint=c) for t, c in tensors))
    check_all_deaths(monkeypatch, lambda: life(optimizer, mode, held, ema=0.9), 4, gaps)


class AssignedLife(Life):
    """A script assigns parameters and loads optimizer state between two updates."""

    def lay(self, number: int) -> None:
        super().lay(number)
        shard = self.core.shard
        assert shard is not None
        if number == 2:
            shard.assign(memoryview(bytearray(shard.size_bytes)))
        if number == 4:
            entries, data = shard.slots()
            block = memoryview(bytearray(b"".join(bytes(d[::-1]) for d in data)))
            for _ in range(2):
                with suppress(Killed):  # this is about deaths in updates
                    shard.load_slots(entries, block)


@pytest.mark.parametrize("optimizer", ["SGD", "SGD plain"])
def test_one_block_that_is_copied_ahead(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda: AssignedLife(spec_by_name(optimizer), ASYNC, LAYOUT)  # noqa: E731
    check_all_deaths(monkeypatch, make, 6, block=1 << 18)


def test_sums_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ModeSpec(name="sync", replicas_to_aggregate=6)
    check_all_deaths(monkeypatch, lambda: life("Adam", mode), 12, every=3, block=1 << 18)


def test_a_wrong_undo_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: without putting a block back, a death in the middle of a step shows."""
    from paceline.server.numbers.undo import Undo

    monkeypatch.setattr(Undo, "_put_back", lambda undo, area, block, regions: None)
    with pytest.raises(AssertionError, match="killed at point"):
        check_all_deaths(monkeypatch, lambda: life("SGD", ASYNC), 2)


def test_an_acknowledged_push_is_a_duplicate_in_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    ps = life("SGD", ASYNC)
    ps.push(0)
    ps.die()
    ps.again(0)
    assert ps.outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert ps.core.control.state.version == 1


def test_a_ps_that_died_before_anything_begins_anew() -> None:
    pieces = Pieces()
    pieces.arena("parameters", 64)
    core = Core(PsConfig(0, 1, 2, "r", make_mode(ASYNC, 2), "bytes", 5.0), pieces)
    assert not core.recover()
    assert pieces.names() == ["journal"]


def test_votes_and_members_outlive_the_ps() -> None:
    ps = life("SGD", SYNC)
    ps.push(0)
    ps.die()
    assert ps.core.control.state.rounds.given == {0: 1}
    assert ps.core.control.members.training == {0, 1} and ps.core.control.returning == {(0, 1), (1, 1)}
    ps.push(1)
    assert ps.core.control.state.version == 1
    parameters = flat(ps.core.shard.memory, "float32", 0, 4)  # type: ignore[union-attr]
    assert torch.isfinite(parameters).all()


def test_what_is_only_counted_outlives_the_ps() -> None:
    """Positions hold what scripts have: options and schedulers with values of any kind."""
    ps = life("SGD", ASYNC)
    ps.push(0)
    control = ps.core.control
    groups: list[dict[str, object]] = [{"lr": 0.1, "betas": [0.9, 0.999], "fused": None, "weight_decay": 0}]
    position = Position(1, 1, 2, 3, 4, 5, "batch", {"torch": b"r"}, {}, [{"last_epoch": 3}, None], groups, None, 1)
    control.saving.newest[1] = position
    control.saving.step_counts.earlier = {0: 7}
    control.state.discarded[1] = 2
    control.mode_changes.append(ModeChange(at_step=3, mode="sync", pause_ms=1.5))
    counted = COUNTED_FIELDS.values(control)
    assert ps.core.durable is not None
    ps.core.durable.counts()
    ps.die()
    assert ps.core.control is not control and COUNTED_FIELDS.values(ps.core.control) == counted
