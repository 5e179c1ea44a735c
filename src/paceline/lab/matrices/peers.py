"""WHAT do other systems take for the same? Document 000's recipe on each, beside one process of the same framework.

A matrix of the lab: `paceline lab run peers`. Pure. The bars compare ours with TensorFlow's runtime and PyTorch DDP,
so these are measured together; what other peers' idle processes use would disturb them, so each has a group of its own.
"""

from collections.abc import Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab import tables
from paceline.lab.cells import NONE, number
from paceline.lab.scenario import Amounts, Kind, Matrix, Measured, Pair, Row, RowVerdicts, Scenario

SINGLE = "PyTorch, single process"
AGAIN = "PyTorch, single process again"
ONE = "paceline, 1 ps + 1 worker"
ASYNC = "paceline, 1 ps + 2 workers, async"
SYNC = "paceline, 1 ps + 2 workers, sync"
TF_SINGLE = "TensorFlow's runtime, single process"
TF_ONE = "TensorFlow's runtime, 1 ps + 1 worker"
TF_ASYNC = "TensorFlow's runtime, 1 ps + 2 workers, async"
TF_SYNC = "TensorFlow's runtime, 1 ps + 2 workers, sync"
DDP = "PyTorch DDP (gloo), 2 processes"
RPC_ONE = "torch RPC, 1 ps + 1 worker"
RPC_ASYNC = "torch RPC, 1 ps + 2 workers, async"
STRATEGY_ONE = "ParameterServerStrategy, 1 ps + 1 worker"
STRATEGY_ASYNC = "ParameterServerStrategy, 1 ps + 2 workers, async"
RAY_ONE = "Ray actors, 1 ps + 1 worker"
RAY_ASYNC = "Ray actors, 1 ps + 2 workers, async"
START = "paceline run, 1 ps + 2 workers: first step"
IMPORTS = "import torch, 3 processes at once"
AA = "A/A: single against single"
BARS, RPC, STRATEGY, RAY, STARTS = range(5)  # the groups, one after the other
ASYNC_SHM, SYNC_SHM = Settings(run_id="", lane="shm"), Settings(run_id="", mode="sync", lane="shm")

ONE_BAR = 1.15
ASYNC_SHARE = 1 / 3  # of TensorFlow's ratio
SYNC_SHARE = 1 / 2  # of DDP's
START_S = 1.0  # more than the imports take
PAIRS = (
    ("1 ps + 1 worker", ONE, TF_ONE),
    ("1 ps + 1 worker", ONE, STRATEGY_ONE),
    ("1 ps + 1 worker", ONE, RPC_ONE),
    ("1 ps + 1 worker", ONE, RAY_ONE),
    ("2 workers, async", ASYNC, TF_ASYNC),
    ("2 workers, async", ASYNC, STRATEGY_ASYNC),
    ("2 workers, async", ASYNC, RPC_ASYNC),
    ("2 workers, async", ASYNC, RAY_ASYNC),
    ("2 workers, sync", SYNC, TF_SYNC),
    ("2 workers, sync", SYNC, DDP),
)
OF_RATIOS = "of the ratios: not measured together"
APART = "not measured together: the machine's mood is in it"
NOTE = (
    "Ratios: each to one process of the same framework, measured right before and after it. theirs ÷ ours: of the "
    "times of a step where both were measured together; of the ratios where they were not, and both are to the same "
    "single process, because the machine may be slower by then. Every system: "
    "the same model, data, batch of 100 a worker, SGD, one thread a process."
)


def matrix(is_quick: bool = False) -> Matrix:
    """Eighteen scenarios in fifteen rows, and two tables of what they say together."""
    verdicts = (
        RowVerdicts(title="The bars", columns=("what", "ours", "theirs", "may be", "is"), lines=bars),
        RowVerdicts(
            title="Between the systems",
            columns=("what", "system", "ours µs", "theirs µs", "theirs ÷ ours", "our ratio", "their ratio"),
            lines=between,
            note=NOTE,
        ),
    )
    amounts = Amounts(reps=3, steps=100) if is_quick else Amounts()
    return Matrix(
        name="peers", scenarios=_scenarios(), rows=_rows(), amounts=amounts, verdicts=verdicts, usual_step_us=1_800.0
    )


def _scenarios() -> tuple[Scenario, ...]:
    def ours(name: str, num_workers: int, settings: Settings) -> Scenario:
        return Scenario(name=name, kind=Kind.CLUSTER, num_ps=1, num_workers=num_workers, settings=settings)

    def theirs(name: str, what: str, num_ps: int, num_workers: int, kind: Kind = Kind.PEER) -> Scenario:
        return Scenario(name=name, kind=kind, what=what, num_ps=num_ps, num_workers=num_workers)

    def in_sync(peer: Scenario) -> Scenario:
        return msgspec.structs.replace(peer, settings=SYNC_SHM)

    def stopped(peer: Scenario) -> Scenario:
        """TensorPipe looks for news without pause: six idle processes used two thirds of a core."""
        return msgspec.structs.replace(peer, is_stopped_between=True)

    return (
        Scenario(name=SINGLE, kind=Kind.SINGLE),
        Scenario(name=AGAIN, kind=Kind.SINGLE),
        ours(ONE, 1, ASYNC_SHM),
        ours(ASYNC, 2, ASYNC_SHM),
        ours(SYNC, 2, SYNC_SHM),
        theirs(TF_SINGLE, "tensorflow_graph", 0, 1),
        theirs(TF_ONE, "tensorflow_graph", 1, 1),
        theirs(TF_ASYNC, "tensorflow_graph", 1, 2),
        in_sync(theirs(TF_SYNC, "tensorflow_graph", 1, 2)),
        theirs(DDP, "ddp_gloo", 0, 2),
        stopped(theirs(RPC_ONE, "torch_rpc", 1, 1)),
        stopped(theirs(RPC_ASYNC, "torch_rpc", 1, 2)),
        theirs(STRATEGY_ONE, "tensorflow_strategy", 1, 1, Kind.DRIVER),
        theirs(STRATEGY_ASYNC, "tensorflow_strategy", 1, 2, Kind.DRIVER),
        theirs(RAY_ONE, "ray_actors", 1, 1, Kind.DRIVER),
        theirs(RAY_ASYNC, "ray_actors", 1, 2, Kind.DRIVER),
        Scenario(name=START, kind=Kind.START, what="run", num_ps=1, num_workers=2),
        Scenario(name=IMPORTS, kind=Kind.START, what="imports", num_ps=1, num_workers=2),
    )


def _rows() -> tuple[Row, ...]:
    def row(name: str, beside: str, group: int, bar: float | None = None) -> Row:
        return Row(title=name, scenario=name, beside=beside, group=group, bar=bar)

    return (
        Row(title=AA, scenario=AGAIN, beside=SINGLE, is_noise=True),
        row(ONE, SINGLE, BARS, ONE_BAR),
        row(ASYNC, SINGLE, BARS),
        row(SYNC, SINGLE, BARS),
        row(TF_ONE, TF_SINGLE, BARS),
        row(TF_ASYNC, TF_SINGLE, BARS),
        row(TF_SYNC, TF_SINGLE, BARS),
        row(DDP, SINGLE, BARS),
        row(RPC_ONE, SINGLE, RPC),
        row(RPC_ASYNC, SINGLE, RPC),
        row(STRATEGY_ONE, TF_SINGLE, STRATEGY),
        row(STRATEGY_ASYNC, TF_SINGLE, STRATEGY),
        row(RAY_ONE, SINGLE, RAY),
        row(RAY_ASYNC, SINGLE, RAY),
        row(START, IMPORTS, STARTS),
    )


class Bar(msgspec.Struct, frozen=True):
    """A number of ours, and what it may be at most; `share` of theirs where the bar is theirs."""

    what: str
    ours: str
    theirs: str
    share: float | None


RATIO_BARS = (
    Bar("1 ps + 1 worker, ratio", ONE, TF_ONE, None),
    Bar("2 workers, async, ratio: a third of TensorFlow's", ASYNC, TF_ASYNC, ASYNC_SHARE),
    Bar("2 workers, sync, ratio: below half of DDP's", SYNC, DDP, SYNC_SHARE),
)


def bars(measured: Measured) -> list[tuple[str, ...]]:
    """The bars, each computed from what was measured in this very run."""
    noise = ratios(measured, AA)[1]
    lines = []
    for bar in RATIO_BARS:
        ours, theirs = (ratios(measured, title)[0] for title in (bar.ours, bar.theirs))
        limit = ONE_BAR if bar.share is None else theirs * bar.share if theirs is not None else None
        is_strict = bar.ours == SYNC
        judged = verdict(ours, limit, noise, measured.others.get(BARS, 0.0), is_strict)
        lines.append((bar.what, number(ours, 2), number(theirs, 2), number(limit, 2), number(ours, 2), judged))
    return [*lines, first_step(measured)]


def first_step(measured: Measured) -> tuple[str, ...]:
    """Seconds from the command to the first step, against as many imports at once."""
    pairs = measured.pairs.get(START, ())
    what = "first step after start, s more than 3 × import torch at once"
    if not pairs:
        return (what, *[NONE] * 4, "not measured")
    ours_s, theirs_s = (tables.quantile([us / 1e6 for us in times], 0.25) for times in zip(*_times(pairs), strict=True))
    more_s = ours_s - theirs_s
    judged = verdict(more_s, START_S, 0.0, measured.others.get(STARTS, 0.0))
    return (what, f"{ours_s:.2f} s", f"{theirs_s:.2f} s", f"{START_S:.2f} s", f"{more_s:.2f} s", judged)


def _times(pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    return [(pair.us, pair.beside_us) for pair in pairs]


def ratios(measured: Measured, title: str) -> tuple[float | None, float]:
    """(The lower quartile of a row's ratios, the distance between its quartiles)."""
    values = [pair.ratio for pair in measured.pairs.get(title, ())]
    if not values:
        return None, 0.0
    low = tables.quantile(values, 0.25)
    return low, tables.quantile(values, 0.75) - low


def verdict(value: float | None, limit: float | None, noise: float, others: float, is_strict: bool = False) -> str:
    """As lab/tables judges a row; with a limit that was measured, too.

    >>> verdict(1.2, 1.5, 0.02, 0.0), verdict(1.6, 1.5, 0.02, 0.0), verdict(1.5, 1.5, 0.02, 0.0, is_strict=True)
    ('within the bar', 'OVER THE BAR', 'within bar + A/A spread')
    """
    if value is None or limit is None:
        return "not measured"
    if noise > tables.MAX_NOISE:
        return f"too noisy to say (A/A spread {noise:.2f})"
    if others > tables.MAX_OTHERS:
        return f"too noisy to say (others used {others:.2f} cores)"
    if value < limit or (value == limit and not is_strict):
        return "within the bar"
    return "within bar + A/A spread" if value <= limit + noise else "OVER THE BAR"


def between(measured: Measured) -> list[tuple[str, ...]]:
    """Ours beside each of theirs: times of a step, and the ratios that each has to its own single process."""
    lines = []
    for what, ours, theirs in PAIRS:
        system = theirs.partition(", ")[0]
        times = [quartile_us(measured, title) for title in (ours, theirs)]
        own = [ratios(measured, title)[0] for title in (ours, theirs)]
        are_together, are_alike = _compared(ours, theirs)
        mine, other = own if are_alike and not are_together else times
        quotient = None if mine is None or other is None else other / mine
        remark = "" if are_together else OF_RATIOS if are_alike else APART
        shown = [*(number(each, 0) for each in times), number(quotient, 2), *(number(each, 2) for each in own)]
        lines.append((what, system, *shown, "not measured" if quotient is None else remark))
    return lines


def _compared(ours: str, theirs: str) -> tuple[bool, bool]:
    """(Whether two rows were measured together, whether they are beside the same single process)."""
    mine, other = (next(row for row in _rows() if row.title == title) for title in (ours, theirs))
    return mine.group == other.group, mine.beside == other.beside


def quartile_us(measured: Measured, title: str) -> float | None:
    """The lower quartile of a row's step times."""
    times = [pair.us for pair in measured.pairs.get(title, ())]
    return tables.quantile(times, 0.25) if times else None
