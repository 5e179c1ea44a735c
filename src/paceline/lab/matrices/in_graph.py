"""WHERE does a single feeder become the bottleneck? In-graph beside between-graph, with more workers, larger batches.

A matrix of the lab: `paceline lab run in-graph`. Pure; both sides train document 000's model in sync mode. In-graph one
client holds data, values and optimizer and hands out everything; between-graph each worker has its own data, a ps has
the values.
"""

from paceline.cluster.settings import Settings
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario

SAMPLE_BYTES = 784 * 4 + 8  # an image and its label, as they travel
BATCHES, QUICK_BATCHES = (100, 400, 1600), (100, 1600)
WORKERS = (1, 2)
SYNC = Settings(run_id="", mode="sync", lane="auto", save_every="none")
AGAIN = "again"


def matrix(is_quick: bool = False) -> Matrix:
    """In-graph beside between-graph for each size; and what a second worker brings on either side."""
    batches = QUICK_BATCHES if is_quick else BATCHES
    return Matrix(
        name="in-graph",
        title="One client that hands out everything (step) beside ps and workers with data of their own; sync, 318 kB",
        scenarios=_scenarios(batches),
        rows=_rows(batches),
        amounts=Amounts(reps=3, steps=30, warmup_steps=5) if is_quick else Amounts(steps=60, warmup_steps=20),
        usual_step_us=7_000.0,
    )


def shown(batch: int) -> str:
    """A batch as titles have it.

    >>> shown(100)
    'batch 100 (0.3 MB)'
    """
    return f"batch {batch} ({batch * SAMPLE_BYTES / 1e6:.1f} MB)"


def in_graph(workers: int, batch: int) -> str:
    return f"in-graph, {workers} worker{'s' if workers > 1 else ''}, {shown(batch)}"


def between(workers: int, batch: int) -> str:
    return f"between-graph, {workers} worker{'s' if workers > 1 else ''}, {shown(batch)}"


def _scenarios(batches: tuple[int, ...]) -> tuple[Scenario, ...]:
    made = []
    for batch in batches:
        for count in WORKERS:
            made.append(Scenario(name=in_graph(count, batch), kind=Kind.IN_GRAPH, num_workers=count, batch=batch))
            made.append(
                Scenario(
                    name=between(count, batch),
                    kind=Kind.CLUSTER,
                    num_ps=1,
                    num_workers=count,
                    settings=SYNC,
                    batch=batch,
                )
            )
    first = made[0]
    made.append(Scenario(name=f"{first.name} {AGAIN}", kind=first.kind, num_workers=1, batch=first.batch))
    return tuple(made)


def _rows(batches: tuple[int, ...]) -> tuple[Row, ...]:
    first = in_graph(1, batches[0])
    rows = [Row(title=f"A/A: {first}, and again", scenario=f"{first} {AGAIN}", beside=first, is_noise=True)]
    for batch in batches:
        rows += [
            Row(title=in_graph(count, batch), scenario=in_graph(count, batch), beside=between(count, batch))
            for count in WORKERS
        ]
    for kind, name in (("in-graph", in_graph), ("between-graph", between)):
        rows += [
            Row(
                title=f"{kind}, 2 workers beside 1, {shown(batch)} each", scenario=name(2, batch), beside=name(1, batch)
            )
            for batch in batches
        ]
    return tuple(rows)
