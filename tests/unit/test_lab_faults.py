"""DOES the lab weigh safety and faults rightly? What is taken out is out, a plan is whole, a verdict can fail."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import paceline
from paceline.cluster import chaos
from paceline.cluster.spec import ClusterSpec
from paceline.errors import UsageError
from paceline.lab.cells import Finished
from paceline.lab.matrices import safety, soak
from paceline.lab.matrices.soak import FAILED, HOLDS, Kept, Phase, Plan, Sample, Soaked, Tick
from paceline.lab.measuring import leaks
from paceline.lab.run import Request, checked, soak_minutes

CLUSTER = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "a:3", "a:4"]})


# --- safety -------------------------------------------------------------------------------------------------------

TAKEN_OUT = """
import sys
from paceline.lab.scripts import bare
bare.take_out(sys.argv[1:])
from paceline.transport import channel
from paceline.transport.channel import Codec
from paceline.wire.frames import Kind
from paceline.frameworks.torch.gradients import Outgoing
codec = channel.Codec(b"1" * 32, b"2" * 32)
stranger = channel.Codec(b"3" * 32, b"4" * 32)
try:
    is_signed = stranger.unpack(bytearray(codec.pack(Kind.PUSH, 0, 1, 1, 0, b"", 7, 1, 0))).push_id != 7
except Exception:
    is_signed = True
is_hashed = channel._checksum([b"a"]) != channel._checksum([b"b"])
is_looked_at = Outgoing._looks_finite.__module__ == "paceline.frameworks.torch.gradients"
print(is_signed, is_hashed, is_looked_at)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "left"),
    [((), "True True True"), (("mac",), "False True True"), (("mac", "checks"), "False False False")],
)
def test_what_is_taken_out_is_out_and_only_that(parts: tuple[str, ...], left: str) -> None:
    done = subprocess.run([sys.executable, "-c", TAKEN_OUT, *parts], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == left, done.stderr


def test_only_the_lab_can_take_safety_out() -> None:
    source = Path(paceline.__file__).parent
    users = [
        path.relative_to(source)
        for path in source.rglob("*.py")
        if "scripts.bare" in path.read_text() or re.search(r"import.*\bbare\b", path.read_text())
    ]
    assert {path.parts[0] for path in users} == {"lab"}


def test_the_bar_of_safety_can_be_missed() -> None:
    [shm, tcp] = safety.matrix().tables[0].cells

    def line(frame_us: float, cell: object) -> tuple[str, ...]:
        told = safety.Parts(payload_bytes=318_040, frame_us=frame_us, finite_us=5.0, hash_us=6.0, record_us=0.2)
        return safety.parts_line(cell, Finished(told=msgspec.Raw(msgspec.json.encode(told))))  # type: ignore[arg-type]

    assert line(2.0, shm) == ("4.00", "5.00", "1.00", "10.00", "12", "within the bar")
    assert line(3.1, shm)[-1] == "OVER THE BAR"
    assert line(2.0, tcp) == ("4.00", "29.00", "1.00", "34.00", "-", "")


# --- the plan of a soak -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("minutes", "count", "period_s"), [(30, 62, 29.0), (3, 18, 10.0), (0.1, 2, 10.0)])
def test_a_plan_has_a_fault_every_period_between_quiet_times(minutes: float, count: int, period_s: float) -> None:
    plan = soak.plan(minutes)
    assert len(plan.faults) == len(set(plan.faults)) == count and plan.period_s == period_s
    chaos.check(",".join(plan.faults), "auto", CLUSTER)
    assert [phase.has_faults for phase in plan.phases] == [False, True] * (len(plan.phases) // 2) + [False]
    assert all(a.stop_s == b.start_s for a, b in zip(plan.phases, plan.phases[1:], strict=False))
    times = [fault.at_s for fault in chaos.parse(",".join(plan.faults))]
    for at_s in times:
        [phase] = [p for p in plan.phases if p.has_faults and p.start_s <= at_s and at_s + period_s <= p.stop_s]
        assert (at_s - phase.start_s) % period_s == 0
    assert sum(p.stop_s - p.start_s for p in plan.phases if p.has_faults) == count * period_s


def test_a_long_plan_mixes_everything_and_hits_everybody() -> None:
    faults = chaos.parse(",".join(soak.plan(30).faults))
    assert {f.kind for f in faults} == {"kill", "stop", "cut", "flip", "nan"}
    assert {f.who for f in faults if f.kind == "kill"} == {"ps:0", "worker:0", "worker:1", "worker:2"}
    assert soak.plan(30, seed=1).faults != soak.plan(30).faults == soak.plan(30).faults


def test_what_a_soak_cannot_take_is_refused() -> None:
    with pytest.raises(UsageError, match="--minutes is for a soak, not for overhead"):
        checked(Request(matrix="overhead", minutes=3.0))
    with pytest.raises(UsageError, match="A soak is one run"):
        soak_minutes(Request(matrix="soak", reps=3))
    with pytest.raises(UsageError, match="a day at most"):
        soak_minutes(Request(matrix="soak", minutes=-1.0))
    with pytest.raises(UsageError, match="--minutes is 0; it must be above 0"):
        soak_minutes(Request(matrix="soak", minutes=0.0))
    assert soak_minutes(Request(matrix="soak")) == 30 and soak_minutes(Request(matrix="soak", is_quick=True)) == 3


# --- its numbers --------------------------------------------------------------------------------------------------

THREE = (Phase(10, 20, False), Phase(20, 40, True), Phase(40, 50, False))


def told_every_second(rate: dict[range, float]) -> list[Tick]:
    version, ticks = 0.0, [Tick(0.0, 0)]
    for second in range(60):
        version += next((each for when, each in rate.items() if second in when), 100.0)
        ticks.append(Tick(second + 1.0, round(version)))
    return ticks


def test_a_fault_that_cost_a_second_of_twenty_leaves_95_percent() -> None:
    assert soak.kept(THREE, told_every_second({range(25, 26): 0.0})).share == pytest.approx(0.95)
    assert soak.kept(THREE, told_every_second({})).share == pytest.approx(1.0)


def test_a_machine_that_gets_slower_is_not_a_fault() -> None:
    slower = told_every_second({range(20): 120.0, range(20, 40): 100.0, range(40, 60): 80.0})
    kept = soak.kept(THREE, slower)
    assert kept.share == pytest.approx(1.0)
    assert kept.quiet == pytest.approx([120.0, 80.0]) and kept.faulty == pytest.approx([100.0])


def test_a_ps_that_told_nothing_while_it_was_away_is_counted_by_what_it_told_after() -> None:
    ticks = [tick for tick in told_every_second({range(25, 27): 0.0}) if not 24 < tick.at_s < 29]
    assert soak.kept(THREE, ticks).share == pytest.approx(0.9)


def samples(more: dict[str, int]) -> list[Sample]:
    plain = {"processes": 6, "threads": 40, "descriptors": 90, "memory": 500 << 20}
    late = {name: value + more.get(name, 0) for name, value in plain.items()}
    return [Sample(at_s=float(s), **(plain if s < 30 else late)) for s in range(60)]


def test_what_grew_is_named() -> None:
    assert soak.grown(samples({}), THREE[0], THREE[-1]) == {}
    assert soak.grown(samples({"processes": 1}), THREE[0], THREE[-1]) == {"processes": 1}
    assert soak.grown(samples({"descriptors": 18, "threads": 1}), THREE[0], THREE[-1]) == {"descriptors": 18}
    assert soak.grown(samples({"memory": 100 << 20}), THREE[0], THREE[-1]) == {"memory": 100 << 20}


GOOD = Soaked(
    plan=Plan(minutes=3, period_s=10, phases=THREE, faults=("kill=ps:0@20s",), references=3, reference_s=30),
    kept=Kept(share=0.97, quiet=[100.0, 101.0], faulty=[97.0]),
    loss=1.005,
    references=[1.0, 1.01],
    fired={"kill ps": 1},
    missed=[],
    restarts=1,
    lost=[],
    verified="0 violations in 12 records",
    is_verified=True,
    leaked=[],
)


@pytest.mark.parametrize(
    ("what", "values"),
    [
        ("faults", {"missed": ["kill=ps:0@20s"]}),
        ("throughput kept", {"kept": Kept(share=0.94, quiet=[100.0, 101.0], faulty=[94.0])}),
        ("final loss", {"loss": 1.03}),
        ("ledger", {"is_verified": False, "verified": "1 violation in 12 records"}),
        ("lost", {"lost": ["worker:1"]}),
        ("leaked", {"leaked": ["process 7"]}),
    ],
)
def test_every_promise_of_a_soak_can_be_broken(what: str, values: dict[str, object]) -> None:
    assert soak.is_ok(GOOD)
    broken = msgspec.structs.replace(GOOD, **values)
    assert [line[0] for line in soak.lines(broken) if line[-1] == FAILED] == [what]
    assert not soak.is_ok(broken)


def test_a_soak_that_is_too_short_to_measure_says_so() -> None:
    brief = msgspec.structs.replace(GOOD.plan, minutes=1)
    slow = msgspec.structs.replace(GOOD, plan=brief, kept=Kept(share=0.5, quiet=[1.0, 1.0], faulty=[0.5]), loss=99.0)
    verdicts = {line[0]: line[-1] for line in soak.lines(slow)}
    assert verdicts["throughput kept"] == verdicts["final loss"] == "too short to say" and soak.is_ok(slow)


def test_nothing_is_said_of_throughput_where_quiet_times_differ() -> None:
    noisy = msgspec.structs.replace(GOOD, kept=Kept(share=0.5, quiet=[100.0, 200.0], faulty=[75.0]))
    verdicts = {line[0]: line[-1] for line in soak.lines(noisy)}
    assert verdicts["throughput kept"].startswith("too noisy to say") and verdicts["lost"] == HOLDS


# --- leaks --------------------------------------------------------------------------------------------------------


def test_a_child_that_outlives_its_launcher_is_found(tmp_path: Path) -> None:
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as launcher:  # type: ignore[call-overload]
        child = int(launcher.stdout.readline())
        watch = leaks.Watch(launcher.pid)
        sample = watch.look(1.0)
        assert sample is not None and sample.processes == 2 and sample.descriptors > 0
        launcher.stdin.close()
        launcher.wait(10)
    leaks.psutil.Process(child)  # it lives
    try:
        assert watch.left_behind(tmp_path, gone_s=0.2) == [f"process {child}"]
    finally:
        leaks.psutil.Process(child).kill()


def test_half_written_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-7").mkdir(parents=True)
    (tmp_path / "summary.json").touch()
    (tmp_path / "checkpoints" / "model.tmp").touch()
    assert leaks.left_over(tmp_path) == ["checkpoints/.step-7", "checkpoints/model.tmp"]
