"""HOW FAST is the lane between hosts? Push and pull of 1 to 400 MB over 1 to 4 connections, plain and with TLS.

A matrix of the lab: `paceline lab run links`; lab/scripts/links_script measures. Pure; the bars are the project's own.
Beside ours, on the same pair of hosts and in turn with it: a raw socket (with TLS: Python's own TLS socket) and Gloo.
Several connections are as many workers of one ps at the same time. And a link that is limited: how much of it a push
uses, by the bytes of its interface.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Table, number
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.crossed import GLOO, OURS, RAW, RAW_AGAIN, Crossed
from paceline.lab.tables import MAX_NOISE, MAX_OTHERS

SCRIPT = "paceline.lab.scripts.links_script"
SIZES = {"1 MB": 1_000_000, "40 MB": 40_000_000, "400 MB": 400_000_000}
LIMITS_S = {"1 MB": 240.0, "40 MB": 400.0, "400 MB": 1200.0}
CONNECTIONS = (1, 2, 3, 4)
PLAIN, TLS = "plain", "TLS"
BAR = 0.9  # of the better of the two
QUICK = (("1 MB", 1, PLAIN), ("40 MB", 1, PLAIN), ("40 MB", 2, PLAIN), ("40 MB", 1, TLS))
LIMIT_MBIT, LIMITED_BYTES = 100, 12_500_000
USED_BAR = 0.95
COPIES = 14  # of the load, of each connection, over all systems
TASK_BYTES = 250_000_000  # of each process: torch is in most of them
Kind = tuple[str, int, str]


def matrix(is_quick: bool = False) -> Matrix:
    """Every size with every number of connections, plain and encrypted; quick: four of them. And the limited link."""
    every = tuple((size, count, how) for how in (PLAIN, TLS) for size in SIZES for count in CONNECTIONS)
    cells = tuple(_cell(kind, is_quick) for kind in (QUICK if is_quick else every))
    return Matrix(name="links", tables=(_speeds(cells, 22.0 if is_quick else 105.0), _limited(is_quick)))


def _speeds(cells: tuple[Cell, ...], usual_s: float) -> Table:
    note = (
        "The load there and back between two network namespaces; GB/s: both ways, all connections together; lower "
        "quartiles over interleaved repetitions, in which every system has its turn, and over lives, in which all "
        "processes are new. paceline: a push that is answered with the parameters, frames, MACs and checksums as in "
        "training, no optimizer. raw socket: blocking, TCP_NODELAY, sendall, recv_into; nothing checked. of the "
        f"better: of raw socket and Gloo, the bar is {BAR:g}. A/A: the raw socket against itself."
    )
    columns = ("load", "connections", "", "paceline ms", "GB/s", "raw ms", "Gloo ms", "of the better", "A/A", "bar")
    title = "Push and pull between two hosts"
    return Table(title=title, columns=columns, cells=cells, line=line, note=note, usual_s=usual_s)


def _cell(kind: Kind, is_quick: bool) -> Cell:
    size, connections, how = kind
    amounts = ("--lives", "2", "--reps", "3") if is_quick else ("--lives", "3", "--reps", "7")
    load = ("--bytes", str(SIZES[size]), "--connections", str(connections), *(("--tls",) if how == TLS else ()))
    return Cell(
        title=f"{size}, {connections} connection{'' if connections == 1 else 's'}, {how}",
        labels=(size, str(connections), how),
        program=(SCRIPT, *load, *amounts),
        num_workers=connections,
        starts_tasks=True,
        settings=Settings(run_id="", lane="tcp", tls=how == TLS),
        limit_s=LIMITS_S[size],
        needs_bytes=needs_bytes(SIZES[size], connections),
        hosts=_hosts(connections),
    )


def needs_bytes(size_bytes: int, connections: int) -> int:
    """What a run takes of the memory, about."""
    return size_bytes * COPIES * connections + TASK_BYTES * (3 + 2 * connections)


def _hosts(connections: int) -> tuple[tuple[str, ...], ...]:
    return (("ps:0",), tuple(f"worker:{number}" for number in range(connections)))


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one load."""
    told = _told(done)
    ours, raw, gloo = (told.quartile_us(*systems) for systems in ((OURS,), (RAW, RAW_AGAIN), (GLOO,)))
    carried = 2 * SIZES[cell.labels[0]] * int(cell.labels[1])
    return (
        number(None if ours is None else ours / 1e3, 3),
        number(None if ours is None else carried / ours / 1e3, 2),
        number(None if raw is None else raw / 1e3, 3),
        number(None if gloo is None else gloo / 1e3, 3),
        number(told.share, 2),
        number(1 - told.noise, 2),
        number(BAR, 2),
        verdict(told.share, BAR, told.noise, told.others),
    )


def verdict(share: float | None, bar: float, noise: float = 0.0, others: float = 0.0) -> str:
    """
    >>> verdict(0.95, 0.9), verdict(0.88, 0.9, 0.03), verdict(0.8, 0.9)
    ('within the bar', 'within bar + A/A spread', 'BELOW THE BAR')
    >>> verdict(2.3, 0.9, 0.3), verdict(2.3, 0.9, others=1.5)
    ('too noisy to say', 'too noisy to say (others used 1.50 cores)')
    """
    if share is None:
        return "not measured"
    if others > MAX_OTHERS:
        return f"too noisy to say (others used {others:.2f} cores)"
    if noise > MAX_NOISE:
        return "too noisy to say"
    if share >= bar:
        return "within the bar"
    return "within bar + A/A spread" if share >= bar - noise else "BELOW THE BAR"


# --- a limited link -----------------------------------------------------------------------------------------------


def _limited(is_quick: bool) -> Table:
    size = f"{LIMITED_BYTES / 1e6:g} MB"
    amounts = ("--lives", "1", "--reps", "2") if is_quick else ("--lives", "2", "--reps", "3")
    load = ("--bytes", str(LIMITED_BYTES), "--limit-mbit", str(LIMIT_MBIT), "--seconds", "3")
    cell = Cell(
        title=f"{size} over a link of {LIMIT_MBIT} Mbit/s",
        labels=(size, f"{LIMIT_MBIT} Mbit/s"),
        program=(SCRIPT, *load, *amounts),
        num_workers=1,
        starts_tasks=True,
        settings=Settings(run_id="", lane="tcp"),
        limit_s=300.0,
        needs_bytes=needs_bytes(LIMITED_BYTES, 1),
        hosts=_hosts(1),
    )
    note = (
        "Pushes that are only acknowledged, one after the other, over a link that `tc tbf` limits; used: bytes of the "
        "worker's interface over the time of the pushes, of what the limit lets through; lower quartiles."
    )
    columns = ("push", "link", "paceline s", "used", "raw s", "raw used", "bar")
    title = "A limited link during a push"
    return Table(
        title=title, columns=columns, cells=(cell,), line=limited_line, note=note, usual_s=30.0 if is_quick else 60.0
    )


def limited_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """How much of the link was used."""
    told = _told(done)
    ours, raw = told.quartile_us(OURS), told.quartile_us(RAW, RAW_AGAIN)
    used = told.used_share(OURS)
    return (
        number(None if ours is None else ours / 1e6, 3),
        percent(used),
        number(None if raw is None else raw / 1e6, 3),
        percent(told.used_share(RAW)),
        percent(USED_BAR),
        verdict(used, USED_BAR),
    )


def percent(share: float | None) -> str:
    """
    >>> percent(0.957), percent(None)
    ('95.7 %', '-')
    """
    return NONE if share is None else f"{100 * share:.1f} %"


def _told(done: Finished) -> Crossed:
    return msgspec.json.decode(done.told, type=Crossed)
