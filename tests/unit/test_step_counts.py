"""Count the steps of each worker over all its processes and over a resume; they add up to the run's."""

import pytest
from lives import Life, spec_by_name
from one_shard import A, B, shard

from paceline.checkpoint.state import State, WorkerState
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.server.control.state import ShardState
from paceline.server.control.step_counts import StepCounts
from paceline.telemetry.records import PsReport, WorkerReport
from paceline.telemetry.summary import _counted
from paceline.wire import messages as m
from paceline.worker.checkpoints.restoring import shared_out

LAYOUT = Layout((TensorSpec("weight", (20, 8), (8, 1), "float32", 0),))


def pushed(spec: ModeSpec, mine: int, others: int, not_finite: int = 0) -> ShardState:
    """A shard of two workers with so many pushes of worker 0 and worker 1; then worker 0 dies."""
    state = shard(spec, num_workers=2)
    for number in range(mine):
        state.push(A, number + 1, base=state.version, is_finite=number >= not_finite)
    for number in range(others):
        state.push(B, number + 1, base=state.version)
    state.left(A, 0.0)
    return state


def test_whoever_comes_back_goes_on_counting_where_its_predecessor_died() -> None:
    """It died before its first heartbeat said anything."""
    state = pushed(ModeSpec(), mine=149, others=3, not_finite=2)
    assert StepCounts().goes_on(state, 0, None) == m.Position(0, steps=149)


def test_where_it_was_in_its_data_is_what_its_heartbeats_said() -> None:
    state = pushed(ModeSpec(), mine=149, others=3)
    told = m.Position(0, epoch=1, batch=7, steps=140)
    assert StepCounts().goes_on(state, 0, told) == m.Position(0, epoch=1, batch=7, steps=149)
    assert StepCounts().goes_on(state, 0, m.Position(0, steps=150)) == m.Position(0, steps=150)
    assert StepCounts().goes_on(pushed(ModeSpec(), 0, 3), 0, None) is None


def test_in_local_mode_a_push_is_many_steps() -> None:
    spec = ModeSpec(name="local", local_steps=5, outer="async")
    assert StepCounts().goes_on(pushed(spec, mine=3, others=1), 0, None) == m.Position(0, steps=15)


def test_a_resumed_run_goes_on_counting() -> None:
    counts = StepCounts()
    counts.resumed(450, [m.Position(0, steps=150), m.Position(1, steps=300)])
    state = shard(ModeSpec(), num_workers=2)
    state.version = 450
    for number in range(10):
        state.push(A, number + 1, base=state.version)
    assert counts.goes_on(state, 0, m.Position(0, steps=150)) == m.Position(0, steps=160)
    assert counts.exact(state) == {0: 160, 1: 300}


def test_a_ps_that_lost_a_moment_of_its_counts_claims_nothing() -> None:
    state = pushed(ModeSpec(), mine=5, others=3)
    assert StepCounts().exact(state) == {0: 5, 1: 3}
    state.staleness[1].clear()
    assert StepCounts().exact(state) == {}


def life() -> Life:
    made = Life(spec_by_name("Adam"), ModeSpec(), LAYOUT)
    for number in range(3):
        made.push(number)
    return made


def test_a_checkpoint_says_how_many_steps_were_in_it() -> None:
    """Heartbeats are older than the copy, and positions that came since are newer."""
    made = life()
    made.core.control.saving.newest = {0: m.Position(0, batch=2, steps=1), 1: m.Position(1, steps=4)}
    copied = made.copy(m.Copy(0, 1, is_now=True))
    assert copied.version == 3
    assert copied.positions == [m.Position(0, batch=2, steps=2), m.Position(1, steps=1)]


def test_whoever_is_started_is_told() -> None:
    made = life()
    told = made.core.control.saving.started(made.core.control, 0, 0.0)
    assert told.position is not None
    assert told.position.steps == sum(made.core.control.state.staleness[0].values()) > 0


def test_the_steps_before_a_resume_survive_a_ps() -> None:
    made = life()
    made.core.control.saving.step_counts.resumed(450, [m.Position(0, steps=450)])
    assert made.core.durable is not None
    made.core.durable.counts()
    made.die()
    assert made.core.control.saving.step_counts.earlier == {0: 450}
    assert made.core.control.saving.step_counts.began_at == 450


def test_a_ps_reports_the_steps_of_the_whole_run() -> None:
    """For those who were interrupted before they could."""
    made = life()
    made.core.control.saving.step_counts.resumed(450, [m.Position(0, steps=150), m.Position(1, steps=300)])
    assert made.core.report().steps == {"0": 152, "1": 301}


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_another_number_of_workers_shares_out_all_steps(num_workers: int) -> None:
    workers = [WorkerState(index=index, steps=steps) for index, steps in enumerate((3, 7, 1))]
    state = State(
        run_id="r", global_step=11, mode=ModeSpec(), optimizer="SGD", groups=[], paceline="0.1.0", workers=workers
    )
    assert sum(position.steps for position in shared_out(state, num_workers)) == 11


def test_what_was_discarded_in_an_earlier_life_is_told_with_the_rest() -> None:
    ps = PsReport(index=0, steps={"1": 394}, discarded={"1": 4}, pushes={"1": 245})
    assert _counted(WorkerReport(index=1, steps=394, discarded=1), ps).discarded == 4
    killed = _counted(WorkerReport(index=1, steps=240, is_lost=True), ps)
    assert (killed.steps, killed.discarded) == (394, 4)
