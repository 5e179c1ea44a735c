"""DO the matrices of the documents ask what the documents asked? Recipes, figures, titles, lines, what is skipped."""

import time
from pathlib import Path

import msgspec
import pytest
import torch

from paceline.lab import MATRICES
from paceline.lab.cells import REMARK, Cell, Finished, Table, Worker, settings_text
from paceline.lab.matrices import cards, scale, seeds, slow_link, towers, watch
from paceline.lab.matrices.accuracy import SINGLE
from paceline.lab.measuring.hosts import Host
from paceline.lab.measuring.processes import Failed
from paceline.lab.measuring.whole_runs import check_cards, check_memory, command_of
from paceline.lab.scenario import Kind, only
from paceline.lab.scripts import cards_script, hosts_script
from paceline.lab.scripts.curves import Curve, Point, Timed
from paceline.lab.scripts.learned import Learned
from paceline.lab.scripts.learned import Point as LearnedPoint
from paceline.lab.scripts.pushes import Pushed, Pushes, growth
from paceline.lab.scripts.watched import Look, Watched, net_of
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import StepMs
from paceline.telemetry.usage import Net

KINDS = ("seeds", "watch", "cards", "towers", "scale", "links")


def told(value: object, *workers: Worker) -> Finished:
    return Finished(workers=list(workers), told=msgspec.Raw(msgspec.json.encode(value)))


def line_of(table: Table, cell: Cell, done: Finished) -> dict[str, str]:
    return dict(zip(table.head, (*cell.labels, *table.line(cell, done)), strict=True))


def flag(cell: Cell, name: str) -> str:
    return cell.program[cell.program.index(name) + 1]


def found(cells: tuple[Cell, ...], text: str) -> Cell:
    (cell,) = [each for each in cells if text in each.title]
    return cell


@pytest.mark.parametrize("name", KINDS)
def test_quick_is_smaller(name: str) -> None:
    whole, quick = MATRICES[name](False), MATRICES[name](True)
    assert len(quick.titles) < len(whole.titles) or quick.amounts.reps < whole.amounts.reps
    assert quick.name == whole.name == name


# --- seeds: document 000 ------------------------------------------------------------------------------------------


def test_seeds_has_the_recipe_and_the_figures_of_document_000() -> None:
    table, _ = seeds.matrix().tables
    assert len(table.cells) == 5 * len(seeds.ROWS) == 60
    assert {(flag(c, "--lr"), flag(c, "--batches"), flag(c, "--epochs")) for c in table.cells} == {
        ("0.001", "550", "100"),
        ("0.002", "550", "100"),
    }
    figures = {row.number: (row.times.epoch_s, row.topology.document) for row in seeds.ROWS[:9]}
    assert figures == {
        "0": ((1.3,), 0.72),
        "1": ((3.8,), 0.72),
        "2": ((5.45, 5.45), 0.80),
        "3": ((5.24, 5.35), None),
        "4": ((5.35, 5.35), 0.72),
        "5": ((6.6, 6.6), 0.80),
        "6": ((6.9, 6.9), 0.72),
        "7": ((4.2, 6.2), 0.80),
        "8": ((5.75, 5.85, 6.5), 0.83),
    }
    assert [row.times.first_s for row in seeds.ROWS[5:9]] == [(9, 37), (40, 38), (15.5, 37), (12, 42, 37)]
    assert flag(found(only(seeds.matrix(True), "single process").tables[0].cells, "single"), "--times") == "3"


def test_quick_is_the_short_recipe_from_one_seed() -> None:
    quick = seeds.matrix(is_quick=True).tables[0].cells
    assert {(cell.labels[2], flag(cell, "--batches")) for cell in quick} == {("1", "55")}


def test_what_the_author_gave_up_is_there() -> None:
    cells = seeds.matrix(True).tables[0].cells
    sync = found(cells, "two hosts: 1 ps + 2 workers, sync")
    assert sync.settings.mode == "sync" and sync.hosts == (("ps:0", "worker:0"), ("worker:1",))
    assert found(cells, "in-graph").program[0] == "paceline.lab.scripts.in_graph_script"
    assert flag(found(cells, "lr x 2"), "--lr") == "0.02"
    assert {cell.labels[0] for cell in cells if len(cell.hosts) == 2} == {"7", "8", "9, given up"}


def learned(*accuracies: float) -> Learned:
    points = [LearnedPoint(5500 * (n + 1), each, "x") for n, each in enumerate(accuracies)]
    return Learned(points, first_epoch_s=0.3, epoch_s=0.1)


def test_a_seeds_line_and_the_means_have_the_document_beside_them() -> None:
    table = seeds.matrix(True).tables[0]
    single, sync = found(table.cells, SINGLE.title), next(cell for cell in table.cells if cell.labels[0] == "4")
    workers = [Worker(index=n, first_epoch_s=0.5, epoch_s=0.15) for n in (0, 1)]
    ended = [(single, told(learned(0.73, 0.81, 0.83))), (sync, told(learned(0.77), *workers))]
    line = line_of(table, *ended[1])
    assert (line["first epoch s"], line["epoch s"], line["document's"]) == ("0.5 / 0.5", "0.15 / 0.15", "5.35 / 5.35")
    lines = {each[0]: dict(zip((*seeds.VERDICTS.columns, REMARK), each, strict=True)) for each in _verdicts(ended)}
    assert lines["4"]["off"] == "+0.0500" and lines["4"][REMARK].startswith("OVER THE BAR: the mean is 0.0500 off")
    assert (lines["4"]["over single"], lines["4"]["document's"]) == ("1.50", "4.12")
    assert lines["0, x 200"]["accuracy"] == "0.8100" and lines["0, x 300"]["off"] == "+0.0000"
    assert lines["0"][REMARK] == "within the bars (1 of 5 seeds)" and lines["0"]["spread"] == "-"


def test_means_over_the_seeds_have_their_spread() -> None:
    cells = [cell for cell in seeds.matrix(True, 2).tables[0].cells if cell.labels[1] == SINGLE.title]
    both = zip(cells, [learned(0.73, 0.81, 0.83), learned(0.71, 0.80, 0.83)], strict=True)
    lines = _verdicts([(cell, told(each)) for cell, each in both])
    assert [line[3:5] for line in lines] == [("0.7200", "0.0200"), ("0.8050", "0.0100"), ("0.8300", "0.0000")]


def _verdicts(ended: list[tuple[Cell, Finished]]) -> list[tuple[str, ...]]:
    return seeds.verdict_lines(ended)


@pytest.mark.parametrize(
    ("waited_s", "first_ms", "says"),
    [
        ((3.0, 0.0), (1.0, 1.0), "yes with its wait for the others, no without"),
        ((0.0, 0.0), (1.0, 1.0), "no with its wait for the others, no without"),
        ((0.0, 0.0), (2.0, 1.0), "yes with its wait for the others, yes without"),
    ],
)
def test_c43_is_counted_with_and_without_the_wait(
    waited_s: tuple[float, float], first_ms: tuple[float, float], says: str
) -> None:
    table = seeds.matrix(True).tables[1]
    both = zip(waited_s, first_ms, strict=True)
    workers = [
        Worker(index=n, steps=500, first_100_steps_ms=ms, waited_at_start_s=s, step_ms=StepMs(0.5, 1.0))
        for n, (s, ms) in enumerate(both)
    ]
    done = Finished(workers=workers)
    assert seeds.start_verdicts([(table.cells[0], done)])[0][-1] == f"worker 0 the slowest: {says}"
    assert line_of(table, table.cells[0], done)["later ms"] == "0.500 / 0.500"
    assert any("late" in cell.title and flag(cell, "--late-s") != "0" for cell in table.cells)


# --- hosts --------------------------------------------------------------------------------------------------------


def test_a_cell_with_hosts_is_started_by_the_script_that_has_them(tmp_path: Path) -> None:
    cell = found(seeds.matrix(True).tables[0].cells, "two hosts: 1 ps + 2 workers, sync")
    command = command_of(cell, RunPaths(tmp_path))
    assert command[3:7] == ["paceline.lab.scripts.hosts_script", "--run-dir", str(tmp_path), "--hosts"]
    args = hosts_script.arguments(command[4:])
    assert args.hosts == "ps:0,worker:0/worker:1" and args.program == list(cell.program)
    assert msgspec.json.decode(args.settings) == {"mode": "sync", "save_every": "none"}
    assert settings_text(cell.settings) == args.settings


def test_a_host_is_entered_by_the_process_that_holds_it() -> None:
    assert Host(42, "10.77.0.1").enter == ("nsenter", "--net=/proc/42/ns/net")


def test_what_is_not_there_is_skipped_and_said() -> None:
    gpu = found(seeds.matrix(True).tables[0].cells, "worker 1 on gpu 1")
    with pytest.raises(Failed, match=r"^skipped: it needs 2 GPUs, and none can be seen here"):
        check_cards(gpu, 0)
    with pytest.raises(Failed, match="and 1 can be seen"):
        check_cards(gpu, 1)
    check_cards(gpu, 2)


# --- watch: document 003 ------------------------------------------------------------------------------------------


def test_watch_is_everything_with_everything_and_quick_one_thing_at_a_time() -> None:
    whole, quick = (watch.matrix(is_quick).tables[0].cells for is_quick in (False, True))
    assert len(whole) == 2 * 2 * 2 * 4
    base = found(quick, "autoencoder, data small, model small, one host, tcp")
    for cell in quick:
        if cell.labels[0] == base.labels[0] and cell is not base:
            assert sum(a != b for a, b in zip(cell.labels, base.labels, strict=True)) == 1
    assert {len(cell.hosts) for cell in whole} == {1, 2}
    assert found(whole, "transformer, data large, model large, ps apart").program[-1] == "--larger"


def net(loopback: int, received: int = 0, sent: int = 0) -> Net:
    return Net(loopback_bytes=loopback, outer_received_bytes=received, outer_sent_bytes=sent)


def test_loopback_and_outer_interface_are_told_apart() -> None:
    head = "Inter-| Receive\n face |bytes\n"
    text = f"{head}  lo: 500 1 0 0 0 0 0 0 500 1\n outer: 30 1 0 0 0 0 0 0 70 1 0\n"
    assert net_of(text) == net(500, 30, 70)
    looks = [Look(at_s=0.0, cores={}, hosts=[net(10, 1, 2), Net()]), Look(at_s=2.0, cores={"ps:0": 0.5}, hosts=[
        net(510, 31, 72), net(0, 70, 30)])]  # fmt: skip
    seen = Watched(looks=looks, wall_s=2.0, cpu_s={"ps:0": 1.0})
    assert (seen.loopback_bytes, seen.outer_bytes, seen.cores("ps:0")) == (500, 100, 0.5)


def test_claims_of_document_003_are_held_against_ratios() -> None:
    table = watch.matrix(True).tables[0]
    ended = []
    for cell in table.cells:
        heavy = 2.0 if cell.labels[2] == "large" else 1.0
        looks = [Look(at_s=0.0, cores={}, hosts=[Net()]), Look(at_s=10.0, cores={}, hosts=[net(int(heavy * 1e6))])]
        value = Watched(looks=looks, wall_s=10.0, cpu_s={"worker:0": 5.0 * heavy, "worker:1": 5.0})
        workers = [Worker(index=n, step_ms=StepMs(2.0, 3.0), samples_per_s=100.0) for n in (0, 1)]
        ended.append((cell, told(value, *workers)))
    lines = {(line[0], line[1]): line for line in watch.verdict_lines(ended)}
    assert lines["C40", "a bigger model: more network"][2:] == ("2.00", "2.00", "it holds; one run each")
    assert lines["C37", "more data: cores unchanged"][-1] == "it holds; one run each"
    assert lines["C41", "divided servers: slower steps"][2:] == ("1.00", "-", "it does not hold; one run each")
    chief = lines["C36", "the chief is loaded more (cores over worker 1's)"]
    assert chief[2] == "1.00" and chief[-1] == "not shown: its work is checkpoints, which are off here; one run each"
    assert {name for name, _ in lines} == {"C36", "C37", "C38", "C39", "C40", "C41", "C42"}
    assert all(len(line) == len(watch.VERDICTS.columns) + 1 for line in lines.values())
    assert line_of(table, *ended[0])["loopback MB"] == "1.0"


# --- cards and towers: document 001 -------------------------------------------------------------------------------


def curve(at_s: float | None, seconds: float = 10.0) -> Curve:
    point = Point(at_s, 50, 0.7) if at_s is not None else None
    points = [point] if point else [Point(1.0, 5, 0.1)]
    timed = Timed(samples=3200, began_s=5.0, ended_s=5.0 + seconds)
    return Curve(
        seconds=seconds, updates=100, reached=point, points=points, tail=[], jitter=0.1, device="/cpu:0", timed=timed
    )


def test_cards_tells_time_to_score_beside_throughput() -> None:
    table = cards.matrix(True).tables[0]
    one, two = found(table.cells, "one device, seed"), found(table.cells, "two devices, towers")
    ended = [(one, told(curve(8.0))), (two, told(curve(2.0, seconds=5.0)))]
    line = line_of(table, *ended[0])
    assert (line["samples/s"], line["on"], line[REMARK]) == ("320", "/cpu:0", "")
    lines = {line[0]: line for line in cards.verdict_lines(ended)}
    assert lines["two devices, towers of one process"][1:] == (
        "1 of 1", "2.00", "-", "4.00", "-", "C25 holds: more than three times sooner; one run",
    )  # fmt: skip
    noisy = cards.verdict_lines([ended[0], (two, told(curve(2.0, seconds=2.5)))])[1]
    assert noisy[-1] == "too noisy to say: 2 devices cannot do 4.00 times the samples; one run"
    assert line_of(table, two, told(curve(None)))[REMARK] == "the score was not reached"
    assert cards.verdict_lines([(one, told(curve(8.0))), (two, told(curve(None)))])[1][-1] == (
        "C25: no score to compare; one run"
    )


def test_cards_says_how_far_its_seeds_are_apart() -> None:
    cells = cards.matrix(True, 2).tables[0].cells
    ones, twos = (
        [c for c in cells if c.labels[0] == title] for title in (cards.ONE, "two devices, towers of one process")
    )
    both = zip([*ones, *twos], [curve(8.0), curve(8.0), curve(4.0, 5.0), curve(6.0, 4.0)], strict=True)
    line = cards.verdict_lines([(cell, told(each)) for cell, each in both])[1]
    assert line[1:6] == ("2 of 2", "2.25", "0.50", "1.60", "0.25")


def test_cards_has_one_device_two_devices_two_machines() -> None:
    ways = [(len(c.hosts) or 1, c.num_workers, c.num_ps) for c in cards.matrix(True).tables[0].cells]
    assert set(ways) == {(1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1), (2, 2, 1)}
    window: dict[str, float | None] = {cards.SAMPLES: 500.0, cards.BEGAN_S: 7.0, cards.ENDED_S: 17.0}
    workers = [Worker(index=n, metrics={**window, cards.DEVICE: float(n)}) for n in (0, 1)]
    cell = found(cards.matrix(True).tables[0].cells, "two devices, 1 ps + 2 workers, sync")
    assert cards.throughput(cell, told(curve(1.0), *workers)) == 100.0
    assert cards.device(told(curve(1.0), *workers)) == "1 of 2 on a card"


def test_workers_that_trained_one_after_the_other_are_no_faster_than_one() -> None:
    cell = found(cards.matrix(True).tables[0].cells, "two devices, 1 ps + 2 workers, async")
    workers = [
        Worker(index=n, metrics={cards.SAMPLES: 500.0, cards.BEGAN_S: 10.0 * n, cards.ENDED_S: 10.0 * (n + 1)})
        for n in (0, 1)
    ]
    assert cards.throughput(cell, told(curve(1.0), *workers)) == 50.0
    assert cards.throughput(cell, told(curve(1.0), Worker(index=0))) is None, "it told nothing"


def test_steps_that_warm_a_device_up_are_not_in_its_throughput() -> None:
    args = cards_script.arguments(["--steps", "25", "--batch", "4", "--towers", "2"])
    ended_s: list[float] = []

    def step() -> float:
        ended_s.append(time.monotonic())
        return 1.0

    course = cards_script.course(args, None, torch.nn.Linear(1, 1), step, lambda: len(ended_s), looks=False)
    assert course.updates == 25 and course.timed is not None
    assert course.timed.samples == (25 - cards_script.WARM_UP) * 4 * 2
    assert ended_s[cards_script.WARM_UP - 1] <= course.timed.began_s <= ended_s[cards_script.WARM_UP]
    assert course.timed.ended_s >= ended_s[-1]
    with pytest.raises(SystemExit):
        cards_script.arguments(["--steps", str(cards_script.WARM_UP)])


def test_towers_divide_the_same_samples() -> None:
    matrix = towers.matrix()
    assert {each.num_workers * (each.batch or 0) for each in matrix.scenarios} == {towers.SAMPLES}
    assert {each.kind for each in matrix.scenarios} == {Kind.SINGLE, Kind.TOWERS, Kind.IN_GRAPH}
    assert {each.what for each in matrix.scenarios} == {"", "convolutions"}


# --- scale --------------------------------------------------------------------------------------------------------


def pushes(count: int, us: float, workers: int = 1) -> Pushes:
    one = Pushed(count=count, passed_s=1.0, took_us=[us], ready_at_s=0.0)
    return Pushes(workers=[one] * workers, started_s=0.5)


def test_scale_has_every_load_workers_ps_and_lane() -> None:
    cells = scale.matrix().tables[0].cells
    assert len(cells) == 3 * 6 * 3 * 3
    assert {(cell.labels[1], flag(cell, "--lane")) for cell in cells} == {
        (lane, lane) for lane in ("shm", "tcp", "grpc")
    }
    assert {flag(cell, "--bytes") for cell in cells} == {"1000", "1000000", "100000000"}
    assert {int(flag(cell, "--workers")) for cell in cells} == {1, 2, 4, 8, 16, 32}
    assert {int(flag(cell, "--ps")) for cell in cells} == {1, 2, 4}


def test_large_loads_say_what_memory_they_need_and_are_skipped_without() -> None:
    cells = scale.matrix().tables[0].cells
    largest = max(cells, key=lambda cell: cell.needs_bytes)
    assert largest.labels == ("100 MB", "shm", "4", "32") and largest.needs_bytes > 9_600_000_000
    with pytest.raises(Failed, match=r"^skipped: it needs about 1\d\.\d GB of memory, and 1\.0 GB are free"):
        check_memory(largest, 1_000_000_000)


def test_how_a_push_grows_is_told() -> None:
    table = scale.matrix(True).tables[0]
    kind = [cell for cell in table.cells if cell.labels[:3] == ("1 MB", "shm", "1")]
    runs = [told(pushes(1000, 100.0)), told(pushes(400, 250.0, 4)), told(pushes(100, 850.0, 16))]
    ended = list(zip(kind, runs, strict=True))
    (line,) = scale.verdict_lines(ended)
    assert line == (
        "1 MB",
        "shm",
        "1",
        "100 (1 worker)",
        "50",
        "8.50 (1 to 16)",
        "1600 (4 workers)",
        "more than 4 workers bring less than 10 % more pushes/s; one run each",
    )
    assert line_of(table, *ended[0])["MB/s"] == "2000"
    assert growth([(4, 1.0)]) is None
    assert scale.verdict_lines(ended[:1])[0][3:] == (
        "100 (1 worker)", "-", "-", "1000 (1 worker)", "one number of workers says nothing of growth; one run each",
    )  # fmt: skip
    assert scale.verdict_lines(ended[:2])[0][-1] == "still grows with 4 workers; one run each"


def test_a_queue_that_bends_the_line_has_no_negative_times() -> None:
    """The times of a run whose straight line is at -57 us with no worker."""
    kind = [cell for cell in scale.matrix(True).tables[0].cells if cell.labels[:3] == ("1 kB", "tcp", "1")]
    runs = [told(pushes(1920, 85.0)), told(pushes(2051, 257.0, 4)), told(pushes(536, 1449.0, 16))]
    (line,) = scale.verdict_lines(list(zip(kind, runs, strict=True)))
    assert line[3:5] == ("85 (1 worker)", "93") and line[6] == "8576 (16 workers)"
    assert line[-1].startswith("more than 4 workers bring less than 10 % more"), "more, but not worth it"


def test_samples_that_were_discarded_do_not_count() -> None:
    metrics = {cards.SAMPLES: 1000.0, cards.BEGAN_S: 10.0, cards.ENDED_S: 20.0}
    workers = [Worker(index=0, metrics=metrics), Worker(index=1, metrics=metrics, discarded=4)]
    done = Finished(workers=workers)
    assert slow_link.throughput(done) == 160.0 and slow_link.throughput(done, only=1) == 60.0
    assert slow_link.throughput(Finished(workers=[Worker(index=0)])) is None
    assert slow_link.throughput(Finished()) is None


def test_the_slow_cable_is_the_last_hosts() -> None:
    cells = slow_link.matrix(True).tables[0].cells
    assert [cell.rate for cell in cells] == ["", *["10mbit"] * 5]
    args = hosts_script.arguments(["--run-dir", "r", *cells[1].command[3:]])
    assert args.rate == "10mbit" and args.hosts.split("/")[-1] == "worker:2"
