"""WHAT does the carrier cost? The same bytes by memcpy, a raw socket and a ps over each lane; and training over each.

A matrix of the lab: `paceline lab run carriers`; lab/scripts/carriers is what is measured. Pure. Between lines of one
size, and between lines that train, only the carrier differs: "the cost of gRPC" is the line of grpc over tcp.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import NONE, Cell, Finished, Table, middle, number
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario
from paceline.telemetry.usage import TaskUse

SINGLE = "single process"
AGAIN = "single process again"
LANES = ("shm", "tcp", "grpc")
LARGE = "40 MB"
SIZES = {"318 kB": 318_040, LARGE: 40_000_000}  # MNIST's 784-100-10, and a model of ten million
MNIST = "paceline.launchers.demos.mnist"
ASYNC = Settings(run_id="", save_every="none")
SYNC = Settings(run_id="", mode="sync")


def matrix(is_quick: bool = False) -> Matrix:
    """Three whole runs that tell what they carried and used; five scenarios that train, ten that only carry."""
    return Matrix(
        name="carriers",
        tables=(_runs(is_quick),),
        title="The same bytes, there and back, and the same steps; only the carrier differs",
        scenarios=_scenarios(),
        rows=_rows(),
        amounts=Amounts(reps=3, steps=30, warmup_steps=10) if is_quick else Amounts(),
    )


# --- side by side -------------------------------------------------------------------------------------------------


def trains(lane: str) -> str:
    return f"1 ps + 1 worker, {lane}"


def carries(size: str, what: str) -> str:
    return f"{size} there and back, {what}"


SOCKET, SOCKET_BYTES = carries(LARGE, "socket"), SIZES[LARGE]  # what loopback can carry


def _on(settings: Settings, lane: str) -> Settings:
    return msgspec.structs.replace(settings, lane=lane)


def _scenarios() -> tuple[Scenario, ...]:
    found = [Scenario(name=SINGLE, kind=Kind.SINGLE), Scenario(name=AGAIN, kind=Kind.SINGLE)]
    for lane in LANES:
        found.append(Scenario(name=trains(lane), kind=Kind.CLUSTER, num_ps=1, settings=_on(ASYNC, lane)))
    for size, load_bytes in SIZES.items():
        for what in ("memcpy", "socket"):
            alone = Scenario(name=carries(size, what), kind=Kind.CARRIER, what=what, load_bytes=load_bytes)
            found.append(alone)
        for lane in LANES:
            asked = _on(SYNC, lane)
            name = carries(size, lane)
            found.append(
                Scenario(name=name, kind=Kind.CARRIER, what="ps", num_ps=1, settings=asked, load_bytes=load_bytes)
            )
    return tuple(found)


def _rows() -> tuple[Row, ...]:
    found = [Row(title="A/A: single against single", scenario=AGAIN, beside=SINGLE, is_noise=True)]
    for lane in LANES:
        found.append(Row(title=trains(lane), scenario=trains(lane), beside=SINGLE))
    found.append(Row(title="the cost of gRPC: training, over tcp", scenario=trains("grpc"), beside=trains("tcp")))
    for size in SIZES:
        for what in ("memcpy", *LANES):
            name = carries(size, what)
            found.append(Row(title=f"{name}, over a raw socket", scenario=name, beside=carries(size, "socket")))
        grpc, tcp = carries(size, "grpc"), carries(size, "tcp")
        found.append(Row(title=f"the cost of gRPC: {size}, over tcp", scenario=grpc, beside=tcp))
    return tuple(found)


# --- whole runs ---------------------------------------------------------------------------------------------------


def _runs(is_quick: bool) -> Table:
    program = (MNIST, "--epochs", "1" if is_quick else "3")
    cells = tuple(
        Cell(
            title=f"MNIST, 2 workers, {lane}",
            labels=(lane,),
            program=program,
            num_workers=2,
            settings=_on(ASYNC, lane),
        )
        for lane in LANES
    )
    columns = (
        "lane", "step ms", "pushed kB/step", "pulled kB/step", "TCP_INFO/counted", "ps cores", "worker cores", "ps MB",
        "worker MB", "telemetry ms/s",
    )  # fmt: skip
    note = (
        "MNIST, 784-100-10, batch 100 a worker, async, 1 ps; mean over the workers. pushed and pulled: tensors, "
        "counted in the transport (on shm: copied into the slot, and out of the ps's memory). TCP_INFO/counted: what "
        "the kernel carried both ways over what was counted; what is above 1 are frames, MACs and messages. cores and "
        "MB: from the start of training, MB at the peak. telemetry: processor time of its threads in a task, the most."
    )
    return Table(
        title="What the lanes carried and used",
        columns=columns,
        cells=cells,
        line=carried_line,
        note=note,
        usual_s=5.0 if is_quick else 10.0,
    )


def carried_line(cell: Cell, done: Finished) -> tuple[str, ...]:
    """The numbers of one run."""
    steps = sum(worker.steps for worker in done.workers)
    pushed, pulled = sum(p.pushed_bytes for p in done.pairs), sum(p.pulled_bytes for p in done.pairs)
    by_kernel = [both for pair in done.pairs for both in (pair.tcp_sent_bytes, pair.tcp_received_bytes) if both]
    ps, workers = _of(done.tasks, "ps:"), _of(done.tasks, "worker:")
    spent = [use.telemetry_ms_per_s for use in done.tasks if use.telemetry_ms_per_s is not None]
    return (
        number(middle([worker.step_ms.median for worker in done.workers if worker.step_ms is not None]), 3),
        number(pushed / steps / 1e3 if steps else None, 1),
        number(pulled / steps / 1e3 if steps else None, 1),
        number(sum(by_kernel) / (pushed + pulled), 4) if by_kernel and pushed + pulled else NONE,
        number(middle([use.cpu_cores for use in ps if use.cpu_cores is not None]), 2),
        number(middle([use.cpu_cores for use in workers if use.cpu_cores is not None]), 2),
        number(middle([use.peak_memory_mb for use in ps if use.peak_memory_mb is not None]), 0),
        number(middle([use.peak_memory_mb for use in workers if use.peak_memory_mb is not None]), 0),
        number(max(spent, default=None), 2),
        "",
    )


def _of(tasks: list[TaskUse], job: str) -> list[TaskUse]:
    return [use for use in tasks if use.name.startswith(job)]
