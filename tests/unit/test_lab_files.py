"""DOES a matrix of one's own become the right cells? Files, axes, --set, seeds, lines; mistakes are sentences."""

import re
from pathlib import Path

import msgspec
import pytest

from paceline.cli.lab import KNOWN
from paceline.cli.main import main as cli
from paceline.cluster.toml_text import line_of
from paceline.errors import EXIT_USAGE, UsageError
from paceline.lab import MATRICES, SEEDED, axes
from paceline.lab.cells import Cell, Finished, Staleness, Worker
from paceline.lab.matrices import peers as peers_matrix
from paceline.lab.matrices import scale, user_file, user_matrix
from paceline.lab.matrices.user_file import parse
from paceline.lab.measuring.whole_runs import command_of, seed_hint, too_long
from paceline.lab.results.kept import earlier
from paceline.lab.results.result import provenance_of
from paceline.lab.run import SOAK, Request, chosen, told_left_out
from paceline.lab.scenario import Matrix
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import StepMs

ROOT = Path(__file__).parents[2]
SMALL = 'script = "train.py"\n'


def made(text: str, **fields: object) -> Matrix:
    return user_matrix.made(parse(SMALL + text, "mine.toml"), **fields).matrix  # type: ignore[arg-type]


def cells_of(text: str, **fields: object) -> tuple[Cell, ...]:
    (table,) = made(text, **fields).tables
    return table.cells


# --- cells --------------------------------------------------------------------------------------------------------


def test_every_combination_is_a_cell_with_its_command() -> None:
    cells = cells_of('[axes]\nps = [1, 2]\nworkers = 2\nmode = ["async", "sync"]\nlane = ["shm"]')
    assert [cell.title for cell in cells] == [
        f"{ps} ps + 2 workers, {mode}, shm" for ps in (1, 2) for mode in ("async", "sync")
    ]
    assert " ".join(cells[-1].command) == (
        "paceline run --ps 2 --workers 2 --mode sync --lane shm --save-every none train.py"
    )


def test_without_axes_there_is_one_cell() -> None:
    (cell,) = cells_of('args = ["--epochs", 2]')
    assert (cell.num_ps, cell.num_workers, cell.program) == (1, 2, ("train.py", "--epochs", "2"))


def test_the_scripts_own_axes_are_its_flags() -> None:
    cells = cells_of('[axes.args]\nsize = [1000, 60000]\ndeep = [true, false]\nmodel = ["", "cnn"]')
    assert len(cells) == 8
    assert cells[0].program == ("train.py", "--size", "1000", "--deep")
    assert cells[-1].program == ("train.py", "--size", "60000", "--model", "cnn")
    assert cells[-1].title == "1 ps + 2 workers, size 60000, model cnn" and cells[0].own["size"] == "1000"


def test_a_combination_without_sense_is_left_out_and_said() -> None:
    asked = parse(SMALL + '[axes]\nworkers = [1, 2]\nslow = ["", "worker:1=4x"]', "mine.toml")
    found = user_matrix.made(asked)
    assert len(found.matrix.titles) == 3
    ((title, why),) = found.left_out
    assert title == "1 ps + 1 worker, slow worker:1=4x" and "worker:1" in why


@pytest.mark.parametrize(
    ("axis", "told"),
    [
        (
            'mode = ["sync", "asink"]',
            "5: no combination with mode = 'asink' makes sense: Unknown mode 'asink'; did you",
        ),
        ('lane = ["inproc"]', "5: no combination of mine's axes makes sense: Lane inproc is for tests"),
        ("workers = [" + ", ".join(map(str, range(1, 10002))) + "]", "3: mine has 10001 combinations; 10000 are"),
        ("staleness = [3]", "5: no combination of mine's axes makes sense: --staleness only makes sense with --mode"),
        (
            'slow = ["", "worker:9=4x"]',
            "5: no combination with slow = 'worker:9=4x' makes sense: --slow names worker:9",
        ),
        ('slow = "worker:9=4x"\n[axes.args]\nsize = 1', "5: no combination of mine's axes makes sense: --slow names"),
    ],
)
def test_a_value_that_fits_nothing_is_refused_with_its_line(axis: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"^mine.toml, line {told}"):
        made(f'name = "mine"\n[axes]\nps = 1\n{axis}')


def test_a_value_of_set_that_fits_nothing_is_refused_by_its_flag() -> None:
    asked = parse(SMALL + "[axes]\nmode = ['async']", "mine.toml")
    told = "^--set mode=async,fast: no combination with mode = 'fast' makes sense: Unknown mode 'fast'"
    with pytest.raises(UsageError, match=told):
        user_matrix.made(user_file.replaced(asked, {"mode": ["async", "fast"]}))


def test_what_makes_no_sense_beside_is_told_with_its_line() -> None:
    text = "beside = { workers = 1 }\n[axes]\nworkers = [1, 2]\nslow = ['worker:1=4x', '']"
    with pytest.raises(UsageError, match=r"^mine\.toml, line 2: .* which makes no sense; name another cell"):
        made(text)


def test_what_is_left_out_for_one_reason_is_said_once() -> None:
    text = "[axes]\nps = [1, 2]\nworkers = [1, 2]\nmode = ['async', 'sync']\nslow = ['', 'worker:1=4x']"
    found = user_matrix.made(parse(SMALL + text, "mine.toml"))
    (said,) = told_left_out(found.left_out)
    assert said == (
        "4 combinations are left out: --slow names worker:1, which is no worker of this cluster; its workers are "
        "worker:0. (1 ps + 1 worker, async, slow worker:1=4x; 1 ps + 1 worker, sync, slow worker:1=4x; "
        "2 ps + 1 worker, async, slow worker:1=4x; and 1 more)"
    )
    assert len(told_left_out([("a", "x."), ("b", "y."), ("c", "x.")])) == 2


def test_seeds_repeat_every_cell_and_are_told_to_the_script() -> None:
    cells = cells_of("seeds = 2\n[axes]\nworkers = [1, 2]")
    assert [(cell.num_workers, cell.seed) for cell in cells] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert cells[-1].program == ("train.py", "--seed", "1") and cells[-1].title == "1 ps + 2 workers, seed 1"
    assert cells_of('seeds = [7]\nseed_flag = "--random"')[0].program == ("train.py", "--random", "7")
    assert cells_of('seeds = [7]\nseed_flag = ""')[0].program == ("train.py",)


@pytest.mark.parametrize(
    "cause",
    [
        "worker:0 failed with exit code 2 (train.py: error: unrecognized arguments: --seed 1); its log: x",
        "worker:0 failed with exit code 2 (Error: No such option: --seed); its log: x",
        "worker:0 failed with exit code 1 (UnrecognizedFlagError: Unknown command line flag 'seed'); its log: x",
    ],
)
def test_a_script_that_takes_no_seed_is_told_which_key_to_write(cause: str) -> None:
    cell = cells_of("seeds = [1]\n[axes.args]\nsize = 1")[0]
    assert seed_hint(cell, cause) == '. If the script takes no --seed, write seed_flag = "" into the file'
    assert seed_hint(cell, cause.replace("seed", "size")) == "", "that is another mistake"
    assert seed_hint(cell, "worker:0 failed (ValueError: seed must be even)") == ""
    assert seed_hint(cell, "worker:0 failed (KeyError: unknown column); its log: runs/mine/seed-1/x.log") == ""
    assert seed_hint(cells_of('seeds = [1]\nseed_flag = ""')[0], cause) == ""
    assert seed_hint(cells_of("")[0], cause) == ""


def test_a_run_of_a_file_that_took_too_long_names_the_key() -> None:
    assert too_long(cells_of("limit_s = 20")[0]) == "it did not end within 20 s; raise limit_s in the file"
    built_in = chosen(Request(matrix="budget"))[0].tables[0].cells[0]
    assert too_long(built_in) == "it did not end within 600 s", "which no file has set"


def test_only_leaves_what_its_cells_are_compared_with(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "mine.toml"
    path.write_text(SMALL + "beside = { workers = 1 }\n[axes]\nworkers = [1, 2, 3]")
    matrix, _ = chosen(Request(matrix=str(path), only="3 workers", reps=2))
    cells = matrix.tables[0].cells
    beside, again, asked = "1 ps + 1 worker", "A/A: 1 ps + 1 worker", "1 ps + 3 workers"
    assert sorted(cell.labels[0] for cell in cells) == sorted(2 * [beside, again, asked])
    one, _ = chosen(Request(matrix=str(path), only="3 workers, repetition 2", reps=2))
    assert {(cell.labels[0], cell.repetition) for cell in one.tables[0].cells} == {
        (beside, 1), (again, 1), (asked, 1),
    }  # fmt: skip
    with pytest.raises(UsageError, match="Nothing in mine has 'four'"):
        chosen(Request(matrix=str(path), only="four"))


def test_ratios_are_interleaved_with_an_a_a_row() -> None:
    text = 'seeds = 2\nbeside = { mode = "sync" }\n[axes]\nmode = ["async", "sync"]'
    cells = cells_of(text)
    assert len(cells) == 7 * 3
    orders = []
    for repetition in range(7):
        now = [cell for cell in cells if cell.repetition == repetition]
        assert sorted(cell.labels[0] for cell in now) == [
            "1 ps + 2 workers, async", "1 ps + 2 workers, sync", "A/A: 1 ps + 2 workers, sync",
        ]  # fmt: skip
        assert {cell.seed for cell in now} == {repetition % 2}
        orders.append(tuple(cell.labels[0] for cell in now))
    assert len(set(orders)) > 1
    assert len(cells_of(text, is_quick=True)) == 3 * 3 and len(cells_of(text, reps=1)) == 3
    titles = [cell.title for cell in cells]
    assert len(set(titles)) == len(titles)


# --- lines --------------------------------------------------------------------------------------------------------


def left(epoch_s: float, accuracy: float = 0.5) -> Finished:
    workers = [
        Worker(
            index=index,
            steps=10,
            discarded=index,
            step_ms=StepMs(1.0 + index, 9.0),
            first_epoch_s=9.0,
            epoch_s=epoch_s,
            samples_per_s=100.0,
            metrics={"accuracy": accuracy},
        )
        for index in range(2)
    ]
    return Finished(workers=workers, staleness=Staleness(mean=0.5), wall_s=12.0)


def shown(matrix: Matrix, done: dict[str, Finished]) -> list[dict[str, str]]:
    """The lines of the matrix when the cells whose title begins so left that."""
    (table,) = matrix.tables
    assert table.verdicts is not None
    ended = [(cell, next(each for begin, each in done.items() if cell.title.startswith(begin))) for cell in table.cells]
    head = (*table.verdicts.columns, "remark")
    return [dict(zip(head, line, strict=True)) for line in table.verdicts.lines(ended)]


def test_seeds_become_a_mean_and_a_spread() -> None:
    matrix = made("seeds = 2")
    (line,) = shown(matrix, {"1 ps + 2 workers, seed 0": left(1.0, 0.7), "1 ps + 2 workers, seed 1": left(2.0, 0.9)})
    assert line["runs"] == "2" and line["epoch s"] == "1.500 (1.000-2.000)"
    assert line["epoch 1 s"] == "9.000 (9.000-9.000)", "the first epoch is on its own"
    assert line["logged"] == "accuracy 0.8000 (0.7000-0.9000)" and line["discarded"] == "5.0 %"
    assert line["step ms"].startswith("2.000"), "of the slowest worker"


def test_ratios_are_lower_quartiles_against_the_same_repetition() -> None:
    matrix = made('reps = 2\nbeside = { mode = "sync" }\n[axes]\nmode = ["async", "sync"]')
    done = {
        "1 ps + 2 workers, sync, repetition 1": left(1.0),
        "1 ps + 2 workers, sync, repetition 2": left(10.0),
        "1 ps + 2 workers, async, repetition 1": left(2.0),
        "1 ps + 2 workers, async, repetition 2": left(40.0),
        "A/A": left(1.0),
    }
    again, beside, line = shown(matrix, done)
    assert (line["ratio"], line["spread"]) == ("2.500", "1.000") and beside["ratio"] == "1.000"
    assert again["configuration"] == "A/A: 1 ps + 2 workers, sync" and again["ratio"] == "0.325"


def test_what_failed_is_marked_and_one_epoch_is_no_steady_figure() -> None:
    matrix = made('reps = 1\nbeside = { mode = "sync" }\n[axes]\nmode = ["async", "sync"]')
    one = left(9.0)
    _, _, line = shown(matrix, {"1 ps + 2 workers, async": Finished(failed="it burned"), "": one})
    assert line["remark"] == "failed: 1 of 1 runs: it burned" and line["runs"] == "0" and line["ratio"] == "-"
    _, beside, _ = shown(matrix, {"": one})
    assert beside["epoch s"] == "-" and beside["remark"] == "no epoch_s to compare"


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('script = "a.py"\nargs = [', r"line 2: "),
        ('script = "a.py"\nseeds 3', r"line 2: 'seeds 3' is no TOML: Expected '='"),
        ('scrpt = "a.py"', r"line 1: there is no key 'scrpt'; did you mean 'script'\?"),
        ("seeds = 3", r"has no key 'script'; say which script"),
        ("script = 3", r"line 1: script is 3; it must be a text in quotes"),
        (SMALL + '[axes]\nmod = ["sync"]', r"line 3: there is no axis 'mod'; did you mean 'mode'\?"),
        (
            SMALL + "[axes]\nhidden = [1]",
            r"line 3: there is no axis 'hidden'; a flag of the script belongs into \[axes.args\]",
        ),
        (SMALL + "[axes]\nmode = []", r"line 3: axis mode is empty"),
        (SMALL + "[axes]\n\nworkers = [0]", r"line 4: axis workers has 0; it must be a whole number"),
        (SMALL + "[axes]\nworkers = ['2']", r"line 3: axis workers has '2'"),
        (SMALL + "[axes]\nkeep = ['a']", r"line 3: axis keep has 'a': expected `int`, got `str`"),
        (SMALL + "[axes]\nmode = ['sync', 'sync']", r"line 3: axis mode has a value twice"),
        (SMALL + "[axes.args]\nsize = []", r"line 3: axis args.size is empty"),
        (SMALL + "[axes.args]\nsize = [[1]]", r"line 3: axis args.size has \[1\]; a value is a text"),
        (SMALL + "axes = 3", r"line 2: axes is 3; it must be a table"),
        (SMALL + "seeds = 0", r"line 2: seeds is 0"),
        (SMALL + "seeds = ['a']", r"line 2: seeds is \['a'\]"),
        (SMALL + "limit_s = -1", r"line 2: limit_s is -1"),
        (SMALL + "reps = 0", r"line 2: reps is 0"),
        (SMALL + "args = 'x'", r"line 2: args is 'x'; it must be a list"),
        (SMALL + "name = 'a/b'", r"line 2: name is 'a/b'"),
        (SMALL + "compare = 'epoch'", r"line 2: compare is 'epoch'; did you mean 'epoch_s'\?"),
        (SMALL + "beside = { lane = 'tcp' }", r"line 2: beside names 'lane', which is no axis here"),
        (SMALL + "beside = { ps = 3 }\n[axes]\nps = [1, 2]", r"line 2: beside has ps = 3, and the axis has 1, 2"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=rf"^mine\.toml,? .*{told}|^mine\.toml {told}") as raised:
        parse(text, "mine.toml")
    assert "\n" not in str(raised.value)


def test_a_line_is_found_below_its_table() -> None:
    text = 'mode = 1\n[other]\nmode = 2\n[axes]\n"mode" = 3\n[axes.args]\nmode = 4'
    assert [line_of(text, *path) for path in [("mode",), ("axes", "mode"), ("axes", "args", "mode")]] == [1, 5, 7]
    assert line_of(text, "axes", "lane") == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "There is no file "),
        ('script = "nowhere.py"', "line 1: script is 'nowhere.py', and there is no file "),
        ('name = "modes"\nscript = "train.py"', "has the name 'modes' of a built-in matrix"),
    ],
)
def test_a_file_that_cannot_be_run_ends_with_2(
    text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    if text is not None:
        (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli(["lab", "run", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out")])
    assert ended.value.code == EXIT_USAGE
    assert told in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stem", "name"), [("mine", "mine"), ("a[1]", "a-1"), ("my runs, two", "my-runs-two"), ("ä.b+c", "ä.b+c")]
)
def test_a_file_without_a_name_gets_one_that_a_folder_can_have(stem: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / f"{stem}.toml"
    path.write_text(SMALL)
    asked = user_file.load(path)
    assert asked.name == name
    results = tmp_path / "out" / f"{asked.name}-1" / "results.jsonl"
    results.parent.mkdir(parents=True)
    matrix = user_matrix.made(asked).matrix
    results.write_bytes(msgspec.json.encode({"kind": "provenance", **msgspec.to_builtins(provenance_of(matrix, 0.0))}))
    assert [found for found, _ in earlier(tmp_path / "out", matrix.name)] == [results], "it goes on later"


def test_a_file_whose_name_is_no_name_is_told_to_have_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "[].toml"
    path.write_text(SMALL)
    with pytest.raises(UsageError, match=r"give it a name: name = "):
        user_file.load(path)


def test_help_message_and_page_list_every_matrix_in_one_order() -> None:
    every = [*MATRICES, SOAK]
    assert list(KNOWN) == every
    with pytest.raises(UsageError, match=re.escape(f"valid: {', '.join(every)};")):
        chosen(Request(matrix="zzz"))
    page = (ROOT / "docs" / "lab_matrices.md").read_text()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    head, _, *rows = lines
    assert head == ["name", "question", "quick", "whole", "page"]
    assert [row[0].strip("`") for row in rows] == every
    assert all(len(row) == 5 and all(row) for row in rows)
    below = re.findall(r"\(#(.+?)\)", page)
    assert below and all(f"\n## {name}\n" in page for name in below)


def test_the_help_says_what_set_and_only_leave(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli(["lab", "run", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "have TEXT in their title, and what those are compared with" in told
    assert "Of a file: these values instead of the axis's own, or an axis more." in told


# --- --set and --seeds --------------------------------------------------------------------------------------------


def test_set_replaces_the_axes_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "mine.toml"
    path.write_text(SMALL + "beside = { workers = 1 }\n[axes]\nworkers = [1, 2]\n[axes.args]\nsize = [10]")
    asked = Request(matrix=str(path), sets=("mode=sync", "size=20", "workers=1,3"), is_quick=True, reps=1)
    matrix, _ = chosen(asked)
    labels = {cell.labels[0] for cell in matrix.tables[0].cells}
    assert "1 ps + 3 workers, sync, size 20" in labels and len(labels) == 3
    for sets, told in (
        ("workers=2", "--set leaves out workers=1, which the others are compared with"),
        ("wrokers=2", "there is no axis 'wrokers'; did you mean 'workers'?"),
        ("hidden=2", "there is no axis 'hidden'; a flag of the script belongs into [axes.args]"),
        ("workers=two", "workers has 'two'; it must be a whole number"),
        ("workers", "write it as --set mode=sync,async"),
        ("mode=sync,sync", "has a value twice"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            chosen(Request(matrix=str(path), sets=(sets,)))
    with pytest.raises(UsageError, match="names mode twice"):
        chosen(Request(matrix=str(path), sets=("mode=sync", "mode=async")))


def test_set_restricts_a_built_in_matrix() -> None:
    overhead, _ = chosen(Request(matrix="overhead", sets=("lane=tcp",)))
    titles = [row.title for row in overhead.rows]
    assert titles[0].startswith("A/A") and titles[1:] == [
        "1 ps + 1 worker, tcp", "PyTorch DDP (gloo), 2 processes", "40 MB there and back, tcp, over a raw socket",
    ]  # fmt: skip
    peers, _ = chosen(Request(matrix="peers", sets=("mode=sync",)))
    rows = {row.title for row in peers.rows}
    assert {peers_matrix.SYNC, peers_matrix.DDP, peers_matrix.TF_ONE, peers_matrix.START} <= rows
    assert not {peers_matrix.ONE, peers_matrix.ASYNC} & rows
    assert {each.name for each in peers.scenarios} == {
        name for row in peers.rows for name in (row.scenario, row.beside)
    }
    modes, _ = chosen(Request(matrix="modes", sets=("mode=sync", "workers=2")))
    assert {(cell.settings.mode, cell.num_workers) for table in modes.tables for cell in table.cells} == {("sync", 2)}
    accuracy, _ = chosen(Request(matrix="accuracy", sets=("mode=sync",), seeds=1))
    assert {(cell.num_ps > 0, cell.seed) for cell in accuracy.tables[0].cells} == {(True, 1), (False, 1)}
    for matrix, sets, told in (
        ("overhead", "colour=red", "overhead has no axis 'colour' whose values differ; valid: ps, workers, mode, lane"),
        ("overhead", "lane=tpc", "no line of overhead has lane=tpc; did you mean 'tcp'?"),
        ("documents", "mode=sync", "documents has no axis 'mode' whose values differ; it has none: take --only"),
        ("modes", "lane=tcp", "modes has no axis 'lane' whose values differ"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            chosen(Request(matrix=matrix, sets=(sets,)))


def test_seeds_of_built_in_matrices() -> None:
    seeds = {cell.seed for cell in chosen(Request(matrix="accuracy", seeds=2))[0].tables[0].cells}
    assert seeds == {1, 2}
    assert {name for name in MATRICES if seeds_of(MATRICES[name](False))} == set(SEEDED)
    for name in SEEDED:
        three = chosen(Request(matrix=name, seeds=3, is_quick=True))[0]
        assert seeds_of(three) == {1, 2, 3}, "the two flags go together"
        assert len(set(three.titles)) == len(three.titles)
        assert seeds_of(chosen(Request(matrix=name, is_quick=True))[0]) == {1}
    assert seeds_of(chosen(Request(matrix="accuracy", seeds=7, is_short=True))[0]) == set(range(1, 8))
    assert {cell.seed for cell in chosen(Request(matrix="cards", seeds=1))[0].tables[0].cells} == {1}
    for matrix, count, told in (
        ("accuracy", 0, "--seeds is 0; it must be at least 1."),
        ("modes", 2, "modes is not repeated over seeds; its rows are measured side by side: take --reps 2 (--seeds is"),
        ("links", 2, "links is not repeated over seeds; run it again instead (--seeds is for accuracy, budget, seeds,"),
        ("soak", 2, "A soak is one run: --set and --seeds"),
    ):
        with pytest.raises(UsageError, match=re.escape(told)):
            cli_like(Request(matrix=matrix, seeds=count))


def seeds_of(matrix: Matrix) -> set[int]:
    return set(axes.seeds_of(cell for table in matrix.tables for cell in table.cells))


def cli_like(request: Request) -> None:
    from paceline.lab.run import main

    main(msgspec.structs.replace(request, is_dry=True))


ALL_ALIKE = {"documents", "apply", "towers"}  # matrices whose clusters do not differ in flags of `paceline run`


@pytest.mark.parametrize("name", MATRICES)
def test_the_axes_of_every_matrix_can_be_set(name: str) -> None:
    matrix = MATRICES[name](True)
    found = axes.axes_of(matrix)
    assert bool(found) is (name not in ALL_ALIKE), found
    for axis, values in found.items():
        for value in values:
            few = axes.restricted(matrix, {axis: [value]})
            assert axes.axes_of(few).get(axis) is None, "one value is left, and that of all lines that have the axis"
            assert axes.clusters(few) and len(few.titles) < len(matrix.titles)


def test_watch_can_be_restricted_to_a_model_a_size_of_data_and_a_division() -> None:
    asked = ("data=small", "model=large", "division=beside,apart", "algorithm=autoencoder")
    (table,) = chosen(Request(matrix="watch", sets=asked))[0].tables
    assert [cell.labels[1:] for cell in table.cells] == [
        ("small (20000)", "large", "ps beside worker 0"), ("small (20000)", "large", "ps apart"),
    ]  # fmt: skip
    (table,) = chosen(Request(matrix="scale", sets=("load=1 kB", "workers=1", "ps=1")))[0].tables
    assert [cell.labels[:2] for cell in table.cells] == [("1 kB", lane) for lane in scale.LANES]
    with pytest.raises(UsageError, match="no line of watch has data=smal; did you mean 'small'"):
        chosen(Request(matrix="watch", sets=("data=smal",)))


def test_values_that_no_line_has_at_once_are_refused() -> None:
    matrix = MATRICES["overhead"](True)
    with pytest.raises(UsageError, match="no line of overhead has all of these values at once"):
        axes.restricted(matrix, {"ps": ["2"], "lane": ["tcp"]})


def test_scale_tells_what_it_starts_and_can_be_restricted() -> None:
    matrix, _ = chosen(Request(matrix="scale", sets=("workers=32", "ps=4", "lane=tcp")))
    (table,) = matrix.tables
    assert [cell.labels for cell in table.cells] == [(size, "tcp", "4", "32") for size in ("1 kB", "1 MB", "100 MB")]
    assert {(cell.num_ps, cell.num_workers, cell.settings.lane) for cell in table.cells} == {(4, 32, "tcp")}
    assert all(cell.is_alone and cell.command[:3] == ("python", "-m", scale.SCRIPT) for cell in table.cells)
    assert "--told" in command_of(table.cells[0], RunPaths(Path("x")))


# --- the example and the page -------------------------------------------------------------------------------------


def test_the_example_is_what_it_says() -> None:
    matrix, left_out = chosen(Request(matrix=str(ROOT / "examples" / "lab.toml"), is_quick=True))
    labels = {cell.labels[0] for cell in matrix.tables[0].cells}
    cells = {f"1 ps + {who}, {mode}" for who in ("1 worker", "2 workers") for mode in ("async", "sync")}
    assert labels == {*cells, "A/A: 1 ps + 1 worker, async"} and not left_out


def test_the_example_of_the_page_is_understood() -> None:
    """All keys that there are, and nothing else."""
    page = (ROOT / "docs" / "lab.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    found = user_matrix.made(parse(text, "lab.md"))
    assert len(found.matrix.titles) > 10
    assert all(re.search(rf"^(\[?{key}\]?\b)", text, re.MULTILINE) for key in user_file.KEYS)
