"""WHAT limits a cell, and would another ps or worker pay? Ordered rules over the facts of a run; a sentence comes out.

Called by lab/results/report and lab/results/telling with what lab/results/facts found. Pure. Must never guess: where a
rule's facts were not measured it does not apply, and when none does, the verdict says what is missing.

Two are first, because those runs may have made few steps, or none of their own: a cable between hosts whose rate is
known is full (full_cable); an in-graph client told how busy it is (client). Then the rules in this order; the first
that holds is the verdict:
1. slowest worker: the others wait a good part of their time, and one of them computes longer than the rest,
2. ps CPU: a ps applies updates nearly all the time, or uses nearly a whole core,
3. link: the bytes of a second are near what the lane carries,
4. feeder: a good part of a step is reading data, as far as that is known apart from the model's work,
5. compute: most of a step is the model's own work,
6. exchange: a good part of a step is push and pull, though ps and link have room,
7. rounds: a good part of a step is waiting, though nobody is slower than the rest.
That a run was too short to be told from its start (launch) is said in front; of next to no steps nothing else is.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from paceline.lab.results.facts import BOTH, COMPUTE, DATA, EXCHANGE, FEEDS, LONG_START, Facts, PsFacts
from paceline.telemetry.limit import Limit

MUCH_WAIT = 0.20  # of a step: more than rounds cost by themselves
SLOWER = 1.25  # times the median of the other workers
PS_BUSY = 0.60  # of the time: from here on pushes queue
PS_CORE = 0.85  # of one core: a ps applies on one thread
LINK_FULL = 0.70  # of what the lane carries
MUCH_DATA = 0.25  # of a step
MOST_COMPUTE = 0.50  # of a step
MUCH_EXCHANGE = 0.25  # of a step
CLIENT_BUSY = FEEDS  # of a step
FEWER_BYTES = "--wire bfloat16, --mode local, larger batches"
FULL_MACHINE = 0.90  # of all cores
PS_ROOM = 0.20  # of the time: below it another ps saves next to nothing
WAITED_FOR = 0.50  # of the wait that a slow worker explains: with less the others do not wait for that one
FEW_STEPS = 20  # of a worker: with fewer the first ones, which warm up, decide every mean


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What limits, the numbers that say so, and what would pay."""

    limit: Limit
    because: str
    advice: str = ""
    remark: str = ""  # what else a reader must know
    has_room: bool = False  # every ps has: another one would not pay

    def __str__(self) -> str:
        head = self.limit.value if self.limit in (Limit.NOTHING, Limit.UNKNOWN) else f"{self.limit.value} limits"
        sentences = [self.remark, f"{head}: {self.because}", self.advice]
        return " ".join(f"{_capital(text)}." for text in sentences if text)


def _capital(text: str) -> str:
    return text if text.startswith("ps") else text[:1].upper() + text[1:]  # a task's name stays as it is


def verdict(facts: Facts) -> Verdict:
    """The first rule that holds.

    >>> from paceline.lab.results.facts import Split, WorkerFacts
    >>> busy = WorkerFacts(name="worker:0", split=Split(data_ms=0.1, compute_ms=0.83, exchange_ms=0.07, wait_ms=0.0))
    >>> print(verdict(Facts(workers=(busy,), ps=(PsFacts(name="ps:0", busy_share=0.05, cores=0.12),))))
    Worker compute limits: 83 % of a step is compute, 10 % data, 7 % push and pull; ps:0 applies 5 % of the time \
and uses 0.12 cores. \
A second worker would pay as long as cores are free (how many there are is not known); a second ps would not.
    """
    rules = (full_cable, client, few, *RULES)
    found = next((told for rule in rules if (told := rule(facts)) is not None), None) or _nothing(facts)
    return msgspec.structs.replace(found, remark=_remark(facts))


# --- the rules --------------------------------------------------------------------------------------------------------


def full_cable(facts: Facts) -> Verdict | None:
    """Before all others: where a cable is full there are few steps."""
    cable = facts.cable
    if cable is None or cable.share < LINK_FULL:
        return None
    who = f", on the way to {' and '.join(cable.behind)}" if cable.behind else ""
    near = [worker.wait_share for worker in facts.workers if worker.name not in cable.behind]
    waits = max((wait for wait in near if wait is not None), default=None)
    advice = f"Fewer bytes would pay ({FEWER_BYTES})"
    if waits is not None and waits >= MUCH_WAIT:
        who += f", and the others wait {_percent(waits)} of their time"
        advice += ", or a mode that does not wait for it (async, k of n); another worker or ps would not"
    elif waits is not None:
        who += "; the others hardly wait for it"
        advice += " for whoever is behind it; for the others it changes nothing"
    else:
        advice += "; another worker or ps behind the same cable would not"
    because = f"the bytes keep the cable of {cable.rate} busy {_percent(cable.share)} of the time{who}"
    return Verdict(limit=Limit.LINK, because=because, advice=advice)


def client(facts: Facts) -> Verdict | None:
    """Also before `few`: the towers of an in-graph run make no steps of their own."""
    share = facts.client_share
    if share is None:
        return None
    if share >= CLIENT_BUSY:
        return Verdict(
            limit=Limit.CLIENT,
            because=f"it is busy {_percent(share)} of a step, and its workers wait meanwhile",
            advice="A further worker would wait for it; workers with data of their own would pay (between-graph)",
        )
    return Verdict(
        limit=Limit.COMPUTE,
        because=f"the client waits {_percent(1 - share)} of a step for its workers",
        advice="A further worker would pay as long as cores are free",
    )


def few(facts: Facts) -> Verdict | None:
    """Before the rest: too little ran to say anything."""
    if facts.num_steps is None or facts.num_steps >= FEW_STEPS:
        return None
    steps = f"{facts.num_steps} step{'' if facts.num_steps == 1 else 's'}"
    return Verdict(
        limit=Limit.UNKNOWN,
        because=f"no worker made more than {steps}, and fewer than {FEW_STEPS} are mostly warm-up",
        advice="Let it train longer",
    )


def slowest(facts: Facts) -> Verdict | None:
    """1. Only who waits is held up: an asynchronous worker that is slow costs nothing but its own steps."""
    if len(facts.workers) < 2:
        return None
    own = {worker.name: own_ms for worker in facts.workers if (own_ms := worker.own_ms) is not None}
    waits = [worker.wait_share for worker in facts.workers if worker.wait_share is not None]
    if len(own) < len(facts.workers) or not waits or max(waits) < MUCH_WAIT:
        return None
    name = max(own, key=lambda each: own[each])
    rest = sorted(value for each, value in own.items() if each != name)
    times = own[name] / max(rest[len(rest) // 2], 1e-9)
    if times < SLOWER or max(waits) < WAITED_FOR * (1 - 1 / times):
        return None
    slowed = next((worker.slowed_times for worker in facts.workers if worker.name == name), None)
    asked = f" (--slow asks for {slowed:g} times)" if slowed else ""
    return Verdict(
        limit=Limit.SLOWEST,
        because=f"{name} needs {times:.1f} times as long for its part of a step as the others{asked}, and they wait "
        f"{_percent(max(waits))} of their time",
        advice=f"Another worker or ps would not pay; a mode that does not wait for it would (async, k of n), or "
        f"{name} on a faster machine",
    )


def ps_cpu(facts: Facts) -> Verdict | None:
    """2."""
    full = [
        ps for ps in facts.ps
        if (ps.busy_share is not None and ps.busy_share >= PS_BUSY) or (ps.cores is not None and ps.cores >= PS_CORE)
    ]  # fmt: skip
    if not full:
        return None
    said = [_of_ps(ps) for ps in full]
    return Verdict(
        limit=Limit.PS,
        because="; ".join(said),
        advice=f"{_one_more(len(facts.ps), 'ps')} would pay{_if_cores(facts)}; {_one_more_worker(facts)} would not",
    )


def link(facts: Facts) -> Verdict | None:
    """3."""
    if facts.link_share is None or facts.link_share < LINK_FULL:
        return None
    return Verdict(
        limit=Limit.LINK,
        because=f"the bytes of a second are {_percent(facts.link_share)} of what {facts.lane or 'the lane'} carries",
        advice=f"{_one_more_worker(facts)} would not pay; a second ps would only behind a link of its own; fewer bytes "
        f"would ({FEWER_BYTES})",
    )


def feeder(facts: Facts) -> Verdict | None:
    """4."""
    shares = facts.shares
    if shares is None or DATA not in shares or shares[DATA] < MUCH_DATA or shares[DATA] < shares[EXCHANGE]:
        return None
    return Verdict(
        limit=Limit.FEEDER,
        because=_parts(shares, DATA),
        advice="A loader that reads ahead would pay first; " + _pay_workers(facts) + ", each with a share of the data; "
        + _pay_ps(facts),
    )  # fmt: skip


def compute(facts: Facts) -> Verdict | None:
    """5."""
    shares = facts.shares
    part = _compute(shares)
    if shares is None or shares[part] < MOST_COMPUTE:
        return None
    because = _parts(shares, part) + "".join(f"; {_of_ps(ps)}" for ps in facts.ps if _of_ps(ps))
    return Verdict(limit=Limit.COMPUTE, because=because, advice=f"{_pay_workers(facts)}; {_pay_ps(facts)}")


def exchange(facts: Facts) -> Verdict | None:
    """6."""
    shares = facts.shares
    if shares is None or shares[EXCHANGE] < MUCH_EXCHANGE:
        return None
    return Verdict(
        limit=Limit.EXCHANGE,
        because=_parts(shares, EXCHANGE) + "".join(f"; {_of_ps(ps)}" for ps in facts.ps if _of_ps(ps)),
        advice="Fewer exchanges would pay (larger batches, --mode local), or a faster lane; "
        f"{_one_more(len(facts.ps), 'ps')} only where the parameters are many",
    )


def rounds(facts: Facts) -> Verdict | None:
    """7."""
    waits = [worker.wait_share for worker in facts.workers if worker.wait_share is not None]
    if not waits or sum(waits) / len(waits) < MUCH_WAIT or len(facts.workers) < 2:
        return None
    return Verdict(
        limit=Limit.ROUNDS,
        because=f"workers wait {_percent(sum(waits) / len(waits))} of their time for each other, and none of them is "
        f"{SLOWER:g} times as slow as the rest",
        advice="Another mode would pay (async, bounded, k of n); another ps would not; "
        + (_crowd(facts) or "another worker waits as well"),
    )


RULES: tuple[Callable[[Facts], Verdict | None], ...] = (slowest, ps_cpu, link, feeder, compute, exchange, rounds)


def _nothing(facts: Facts) -> Verdict:
    """No rule holds: because nothing stands out, or because too little was measured to say so."""
    lacking = list(missing(facts))
    advice, room = _ps_room(facts), [ps.busy_share is not None and ps.busy_share < PS_ROOM for ps in facts.ps]
    if lacking:
        return Verdict(
            limit=Limit.UNKNOWN,
            because=f"not measured: {', '.join(lacking)}",
            advice=advice,
            has_room=bool(room) and all(room),
        )
    return Verdict(limit=Limit.NOTHING, because=_parts(facts.shares or {}, _compute(facts.shares)), advice=advice)


def _ps_room(facts: Facts) -> str:
    """What another ps would bring, and why; "" where nobody knows."""
    if _most_busy(facts) is None:
        return ""
    known = " and ".join(_of_ps(ps) for ps in facts.ps)
    saved = _saved(facts)
    return f"as {known}, {_one_more(len(facts.ps), 'ps')} {saved}" if saved else f"as {known}, another ps would not pay"


def _saved(facts: Facts) -> str:
    """What another ps would save at most: its part of the applying; "" where that is next to nothing, or not known."""
    busy = _most_busy(facts)
    if busy is None or busy < PS_ROOM:
        return ""
    return f"would save at most {_percent(busy / (len(facts.ps) + 1))} of the time"


def _most_busy(facts: Facts) -> float | None:
    """Of the time, that the busiest ps applies; None when any of them is not known."""
    busy = [ps.busy_share for ps in facts.ps if ps.busy_share is not None]
    return max(busy) if busy and len(busy) == len(facts.ps) else None


def missing(facts: Facts) -> Sequence[str]:
    """Which facts the rules lack.

    >>> from paceline.lab.results.facts import WorkerFacts
    >>> list(missing(Facts(workers=(WorkerFacts(name="worker:0", step_ms=1.0),), ps=(PsFacts(name="ps:0"),))))
    ['where a step goes (data, compute, push and pull)', 'how busy the ps are']
    """
    if not facts.workers:
        return ["what the workers did"]
    lacking = []
    if facts.shares is None:
        lacking.append("where a step goes (data, compute, push and pull)")
    if facts.ps and all(ps.busy_share is None and ps.cores is None for ps in facts.ps):
        lacking.append("how busy the ps are")
    return lacking


# --- words ------------------------------------------------------------------------------------------------------------


def _parts(shares: dict[str, float], first: str) -> str:
    rest = [f"{_percent(value)} {name}" for name, value in shares.items() if name != first and value >= 0.005]
    return ", ".join([f"{_percent(shares.get(first, 0.0))} of a step is {first}", *rest])


def _compute(shares: Mapping[str, float] | None) -> str:
    """What the model's own work is called: where nobody knows how much of it is reading data, it says so."""
    return BOTH if shares is not None and BOTH in shares else COMPUTE


def _of_ps(ps: PsFacts) -> str:
    """
    >>> _of_ps(PsFacts(name="ps:0", busy_share=0.5, cores=0.7)), _of_ps(PsFacts(name="ps:0"))
    ('ps:0 applies 50 % of the time and uses 0.70 cores', '')
    """
    said = [f"applies {_percent(ps.busy_share)} of the time"] if ps.busy_share is not None else []
    said += [f"uses {ps.cores:.2f} cores"] if ps.cores is not None else []
    return f"{ps.name} {' and '.join(said)}" if said else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _one_more(count: int, what: str) -> str:
    return f"a second {what}" if count == 1 else f"another {what}"


def _one_more_worker(facts: Facts) -> str:
    return _one_more(len(facts.workers), "worker")


def _crowd(facts: Facts) -> str:
    """Why nothing more would help on this machine; "" where it has cores to spare, or nobody knows."""
    used = facts.used_cores
    if used is None or facts.machine_cores is None or used < FULL_MACHINE * facts.machine_cores:
        return ""
    return f"{used:.1f} of the machine's {facts.machine_cores} cores are used: more tasks pay on another machine only"


def _pay_workers(facts: Facts) -> str:
    crowded = _crowd(facts)
    if crowded:
        return f"{_one_more_worker(facts)} would not pay here: {crowded}"
    used, cores = facts.used_cores, facts.machine_cores
    room = "how many there are is not known" if cores is None else f"the machine has {cores}"
    room = room if used is None or cores is None else f"{used:.1f} of {cores} are used"
    return f"{_one_more_worker(facts)} would pay as long as cores are free ({room})"


def _if_cores(facts: Facts) -> str:
    return f", on another machine ({_crowd(facts)})" if _crowd(facts) else ""


def _pay_ps(facts: Facts) -> str:
    if not facts.ps:
        return "there is no ps"
    return f"{_one_more(len(facts.ps), 'ps')} {_saved(facts) or 'would not'}"


def _remark(facts: Facts) -> str:
    """A run that hardly trained says little of its steps."""
    if facts.start_share is None or facts.start_share < LONG_START:
        return ""
    what = "launch takes" if facts.is_told else "launch, and what the script does beside its steps, take"
    return f"{what} {_percent(facts.start_share)} of the run's time, so a longer run says more"
