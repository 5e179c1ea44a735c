"""WHAT must hold at the end of a run, whatever happened? Every check names what is wrong.

Called by sim_run. What must hold at every moment is in sim_watch.py.
"""

from collections import Counter
from typing import TYPE_CHECKING

from sim_ps import SimService
from sim_watch import Gradient
from sim_worker import Worker

from paceline.errors import ConnectionLost, Refused
from paceline.wire.frames import Outcome
from paceline.wire.messages import Failed, Switched

if TYPE_CHECKING:
    from sim_run import Cluster

MAX_S = 3_000.0  # a run takes about a hundred seconds; nobody waits for hours


def check(cluster: "Cluster") -> None:
    """All of it; what comes later makes sense only if what came before holds."""
    check_everybody_ended(cluster)
    check_once(cluster)
    if cluster.world.faults:
        return
    if not cluster.fired["losses"]:  # what was acknowledged is lost with the memory
        check_acknowledged(cluster)
        check_counts(cluster)
    check_versions(cluster)
    check_slots(cluster)
    check_rounds(cluster)
    check_switches(cluster)
    check_saves(cluster)


def is_paused(cluster: "Cluster") -> bool:
    """Whether too few workers are left, and those wait as they must."""
    return cluster.services[0].core.control.lacks() > 0


def check_everybody_ended(cluster: "Cluster") -> None:
    faults = cluster.world.faults
    for process in cluster.processes:
        if process.is_alive and not is_paused(cluster):
            faults.append(f"{process.name} is stuck at push {process.push_id}, waiting for {process.awaited}")
        if process.error is not None and not may_fail(cluster, process):
            faults.append(f"{process.name} failed: {process.error!r}")
    if cluster.world.now > MAX_S:
        faults.append(f"the run took {cluster.world.now} s")
    state = cluster.services[0].core.control.state
    if not is_paused(cluster) and (state.rounds.votes or state.waiting):
        faults.append(f"ps:0 is left with {state.rounds.votes} and {state.waiting}")


def may_fail(cluster: "Cluster", process: Worker) -> bool:
    plan = cluster.plan
    lets_go = plan.zombies or ((plan.cuts or plan.evictions) and not plan.retries)
    return cluster.has_closed(process) or bool(lets_go)


def check_once(cluster: "Cluster") -> None:
    """I2: each (worker, incarnation, push id) is applied at most once on a shard, and is what was pushed."""
    for service in cluster.services:
        seen: set[object] = set()
        for gradient in (g for update in service.ledger.updates for g in update):
            if not isinstance(gradient, tuple):
                service.fault(f"applied {gradient} as a gradient")
                continue
            if gradient[:3] in seen:
                service.fault(f"applied {gradient} twice")
            seen.add(gradient[:3])


def pushes_of(service: SimService, process: Worker) -> set[int]:
    """The pushes of this process that are in some update."""
    keys = {(process.index, incarnation) for incarnation in process.incarnations}
    return {g[2] for update in service.ledger.updates for g in update if g[:2] in keys}


def check_acknowledged(cluster: "Cluster") -> None:
    """What a worker was told is what happened: in rounds by ps:0 for every shard (dead ones: on ps:0), else by each."""
    votes = cluster.services[0].core.control.state.rounds.votes
    for process in cluster.processes:
        applied = [pushes_of(service, process) for service in cluster.services]
        for link in process.links:
            for push_id, outcome in link.outcomes.items():
                is_for_all = push_id in process.rounds and process.is_done and outcome is Outcome.APPLIED
                for index in range(len(applied)) if is_for_all else (link.index,):
                    is_in = push_id in applied[index] or (outcome is Outcome.ADDED and process.index in votes)
                    is_wrong = (outcome in (Outcome.APPLIED, Outcome.ADDED)) != is_in
                    if is_wrong and outcome is not Outcome.DUPLICATE:
                        cluster.world.faults.append(
                            f"{process.name} was told {outcome.name} of {push_id}; ps:{index} applied {applied[index]}"
                        )


def check_versions(cluster: "Cluster") -> None:
    plan, versions = cluster.plan, [s.core.control.state.version for s in cluster.services]
    if not all(service.core.control.is_initialised for service in cluster.services):
        return  # one was lost when nobody was there to bring it values
    if versions != [len(s.ledger.updates) for s in cluster.services]:
        cluster.world.faults.append(f"versions {versions} are not what was applied")
    if is_paused(cluster):
        return
    # A push may be void after a change of the mode, or late: its ticket went to another while its worker was away, or
    # was one for a round when its worker paused. Where every push is an update, ps:0 alone knows that.
    is_void = plan.retries and plan.switches > 0
    is_late = plan.total is not None and (plan.retries or (plan.switches > 0 and plan.pauses > 0))
    is_same = plan.is_calm and not is_void and not is_late
    if is_same and len(set(versions)) > 1:
        cluster.world.faults.append(f"the shards made {versions} updates")
    is_each = not cluster.has_rounds(plan.spec) and not plan.switches
    if plan.is_calm and is_each and plan.total is None and not plan.not_finite:
        expected = sum(plan.steps_of(p.index) for p in cluster.processes)
        if versions[0] != expected:
            cluster.world.faults.append(f"{versions[0]} updates, not {expected}")
    if plan.total is not None and any(p.is_done for p in cluster.processes) and versions[0] != plan.total:
        cluster.world.faults.append(f"{versions[0]} updates, not exactly {plan.total}")


def check_counts(cluster: "Cluster") -> None:
    """What the report says of each worker is what happened to its pushes."""
    for service in cluster.services:
        state = service.core.control.state
        applied = Counter(g[0] for update in service.ledger.updates for g in update)
        counted = {worker: sum(counts.values()) for worker, counts in state.staleness.items()}
        if counted != dict(applied):
            service.fault(f"counted the staleness of {counted}, and applied {dict(applied)}")
        if any(waited_s < 0 for waited_s in state.waited_s.values()):
            service.fault(f"waited {dict(state.waited_s)}")
    first = cluster.services[0]
    state, received = first.core.control.state, first.watch.received
    applied = Counter(g[0] for update in first.ledger.updates for g in update)
    dealt_with = {worker: applied[worker] + state.discarded[worker] for worker in received}
    is_whole = cluster.plan.is_calm and not cluster.plan.retries and not is_paused(cluster)
    if any(dealt_with[w] != received[w] if is_whole else dealt_with[w] > received[w] for w in received):
        first.fault(f"received {dict(received)}, applied {dict(applied)}, discarded {dict(state.discarded)}")
    if any(state.not_finite[worker] > state.discarded[worker] for worker in received):
        first.fault(f"discarded {dict(state.discarded)}, {dict(state.not_finite)} of them not finite")


def check_rounds(cluster: "Cluster") -> None:
    """I1: a round has one contributor set on all shards, made of gradients of that round. Shards are compared from
    one change of the mode to the next: what they applied before it may differ, where every push is an update."""
    first = cluster.services[0].ledger
    for service in cluster.services[1:]:
        for epoch in set(first.epochs) | set(service.ledger.epochs):
            if not cluster.has_rounds(cluster.services[0].watch.specs[epoch]):
                continue
            ours, theirs = updates_in(service, epoch), updates_in(cluster.services[0], epoch)
            is_over = service.core.control.state.turn > epoch
            if ours != (theirs if is_over else theirs[: len(ours)]):
                service.fault(f"applied {ours} in epoch {epoch}, ps:0 {theirs}")
    for round_, (update, epoch) in enumerate(zip(first.updates, first.epochs, strict=True)):
        spec = cluster.services[0].watch.specs[epoch]
        if cluster.has_rounds(spec) and not is_round(update, round_, spec.tokens_of(cluster.plan.num_workers)):
            cluster.world.faults.append(f"round {round_} was made of {update}")


def updates_in(service: SimService, epoch: int) -> list[tuple[Gradient, ...]]:
    ledger = service.ledger
    return [u for u, e in zip(ledger.updates, ledger.epochs, strict=True) if e == epoch]


def is_round(update: tuple[Gradient, ...], round_: int, tokens: int) -> bool:
    """In worker order, each worker's as it pushed them: one incarnation, and not more than it may give."""
    given = Counter(worker for worker, _, _, _ in update)
    return (
        all(base == round_ for _, _, _, base in update)
        and list(update) == sorted(update)
        and len({g[:2] for g in update}) == len(given)
        and max(given.values()) <= tokens
    )


def check_switches(cluster: "Cluster") -> None:
    """A change that was accepted has happened, and every shard that anybody trains on obeys it."""
    first, faults = cluster.services[0], cluster.world.faults
    control = first.core.control
    epoch, holds = control.state.turn, control.state.mode.spec
    if control.wanted is not None and not is_paused(cluster):
        first.fault(f"never came to {control.wanted}")
    if control.dial.turn != epoch or control.dial.spec != holds or len(control.mode_changes) != epoch:
        first.fault(f"is in {holds} after {control.mode_changes}, and says {control.dial}")
    for switcher in cluster.switchers:
        if isinstance(switcher.reply, Switched) and switcher.reply.pause_ms is not None:
            if switcher.reply.after != switcher.spec or switcher.spec not in first.watch.specs:
                faults.append(f"{switcher.spec} was said to hold, after {first.watch.specs}")
        elif not isinstance(switcher.reply, Switched | Failed | None):
            faults.append(f"a switch was answered with {switcher.reply}")
    adopted = max((p.adopted for p in cluster.processes), default=0)
    for service in cluster.services[1:]:
        state = service.core.control.state
        if not adopted <= state.turn <= epoch or state.mode.spec != first.watch.specs[state.turn]:
            service.fault(f"is in {state.mode.spec} of epoch {state.turn}; a worker brought {adopted}")


def check_saves(cluster: "Cluster") -> None:
    """A checkpoint is of one round on all shards, and what is announced goes on to be saved or is forgotten."""
    for saver in cluster.savers:
        rounds = {copy.round for copy in saver.copies}
        if len(rounds) > 1 and all(copy.has_rounds for copy in saver.copies):
            cluster.world.faults.append(f"{saver.name} saved rounds {rounds} together")
        if saver.error is not None and not isinstance(saver.error, ConnectionLost | Refused):
            cluster.world.faults.append(f"{saver.name} failed: {saver.error!r}")
    control = cluster.services[0].core.control
    if control.saving.flags and control.saving.target is None:
        cluster.services[0].fault("tells workers of a save that it does not know")


def check_slots(cluster: "Cluster") -> None:
    """Memory: a ps keeps one slot per live worker, and those that an open round may still need."""
    for service in cluster.services:
        core, control = service.core, service.core.control
        kept = [k for k in core.slots if k not in control.state.staged and not control.members.is_current(*k)]
        if kept:
            service.fault(f"never freed the slots of {kept}")
        if control.state.staged and not control.state.mode.has_rounds:
            service.fault(f"keeps {control.state.staged} for a round that never comes")
        known = [id(slot) for slot in core.slots.values()]
        if any(slot.arena.is_open and id(slot) not in known for slot in service.ledger.made):
            service.fault("made a slot and lost it")
        sums = [
            k for k, slot in core.slots.items() if slot.sum and not getattr(control.state.staged.get(k), "counted", 0)
        ]
        if sums and not is_paused(cluster):
            service.fault(f"added up gradients of {sums} and never used them")
