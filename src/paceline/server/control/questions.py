"""Answer questions about a ps, changing nothing."""

from typing import TYPE_CHECKING

from paceline.cluster.membership import Phase
from paceline.telemetry.records import PsReport
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.server.control.control import Control


def decisions(control: "Control", now_s: float) -> m.Carried:
    """Answer what must be carried to the other shards."""
    return m.Carried(control.open_decisions)


def describe(control: "Control", now_s: float) -> m.Described:
    """Answer what this ps holds."""
    config, state = control.config, control.state
    layout = control.model.layout if control.model is not None and control.is_initialised else None
    return m.Described(
        config.run_id, state.mode.spec, config.placement, config.num_ps, state.version, layout, control.lineage,
        state.turn, config.cluster,
    )  # fmt: skip


def status(control: "Control", now_s: float) -> m.Status:
    """Answer who is missing, and whom the others wait for."""
    members, state, starters = control.members, control.state, control.starters
    awaited: set[int] = set()
    if state.rounds.votes:
        awaited |= members.training - state.rounds.votes.keys()
    if control.in_barrier:
        awaited |= set(members.live) - {key[0] for key in control.in_barrier}
    if control.wanted is not None:
        awaited |= members.training - {key[0] for key in control.standing}
    if state.waiting and not state.mode.has_rounds:
        awaited |= members.training - {key[0] for key in state.waiting}
    missing = members.missing or sorted(key[0] for key in control.takes_first if control.has_first)
    if not missing and not control.is_started and not any(key[0] == 0 for key in starters):
        missing = [0]
    return m.Status(
        missing=missing,
        waiting_for=sorted(awaited),
        version=state.version,
        live=members.live,
        lacks=control.lacks(),
        wanted=str(control.wanted) if control.wanted is not None else "",
        awaited=[_awaited(control, worker, now_s) for worker in sorted(awaited)],
        ended=control.saving.ended(control),
    )


def _awaited(control: "Control", worker: int, now_s: float) -> m.Awaited:
    """Say what a worker that others wait for does, as far as a ps can know."""
    config, members = control.config, control.members
    pulse, phase = members.pulses[worker], members[worker].phase
    silent_s, still_s = now_s - pulse.heard_s, members.still_s(worker, now_s)
    if silent_s > config.lease_s / 2:
        return m.Awaited(worker, "is silent", silent_s, config.lease_s - silent_s)
    if phase is not Phase.TRAINING:
        return m.Awaited(worker, f"is {phase.value}", still_s)
    limit_s = pulse.stall_limit_s(config.stall_s)
    return m.Awaited(worker, "lives, and computes its step", still_s, limit_s - still_s if limit_s else None)


def report(control: "Control", apply_s: float, bytes_in: int, bytes_out: int) -> PsReport:
    """Return what this ps did so far."""
    state, updates = control.state, control.state.version
    return PsReport(
        index=control.config.index,
        updates=updates,
        apply_ms=1e3 * apply_s / updates if updates else None,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        staleness={
            str(worker): {str(s): n for s, n in sorted(counts.items())}
            for worker, counts in sorted(state.staleness.items())
        },
        waited_s={str(worker): waited_s for worker, waited_s in sorted(state.waited_s.items())},
        discarded={str(worker): count for worker, count in sorted(state.discarded.items())},
        not_finite={str(worker): count for worker, count in sorted(state.not_finite.items())},
        modes=list(control.mode_changes),
        pushes={str(worker): push_id for worker, (_, push_id) in sorted(state.applied.items())},
        steps={str(worker): steps for worker, steps in sorted(control.saving.step_counts.all(state).items())},
        global_step=updates,
    )
