"""Nobody hangs: a worker that is stopped, stalled or cut off is left behind within its limit, and comes back fenced.

The lease is short. Whoever was evicted joins again as a newer incarnation; the push that it had not heard of is
void, all others count once. Processes where a signal is needed, threads of one process where bytes must be swallowed.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from partition_proxy import Proxy
from processes import DEADLINE_S, Gate, Processes
from test_reconnect import Counter
from test_worker_killed import COUNT, LEASE, Told, up_to

import paceline
from paceline.errors import TrainingFailed
from paceline.telemetry.ledger import Kind, read
from paceline.transport import security
from paceline.worker.requests import client as clients
from paceline.worker.requests import heartbeat

pytestmark = pytest.mark.timeout(180)

STEPS, AT = 20, 8
NIGHTLY = pytest.mark.nightly("one that is left behind in the other mode, or cut off in the other direction")
MODES = {"sync": ["--mode=sync"], "async": ["--mode=async"], "bounded": ["--mode=bounded", "--staleness=30"]}


def until(condition: Callable[[], object], what: str) -> None:
    """Look until it is so; a condition that never holds fails the test."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.02)  # the file of another process cannot wake us


def says(log: Path, text: str) -> bool:
    return log.exists() and text in log.read_text()


@pytest.mark.parametrize(
    ("mode", "lane", "num_ps"),
    [
        pytest.param("sync", "tcp", 2, marks=pytest.mark.slow),
        pytest.param("sync", "shm", 1, marks=NIGHTLY),
        pytest.param("async", "shm", 2, marks=pytest.mark.slow),
        pytest.param("bounded", "tcp", 1, marks=NIGHTLY),
    ],
)
def test_a_stopped_worker_is_left_behind_and_comes_back_fenced(
    mode: str, lane: str, num_ps: int, processes: Processes, tmp_path: Path
) -> None:
    flags = [*MODES[mode], f"--lane={lane}", f"--ps={num_ps}", "--placement=round_robin", "--ledger", LEASE]
    launcher = processes.paceline("run", *flags, "--run-dir=made", COUNT, f"--steps={STEPS}", f"--stop=1:{AT}")
    logs = tmp_path / "made" / "logs"
    until(lambda: says(logs / "ps-0.log", "Evicted: worker:1 was silent for"), "the eviction")
    until(lambda: says(logs / "worker-0.log", "Training ends"), "the others' end, while it is stopped")
    stopped = processes.task("worker", 1)
    assert stopped.status() == psutil.STATUS_STOPPED
    stopped.resume()
    launcher.ends_with(0)
    told = Told(tmp_path / "made", num_ps)
    assert told.summary["ok"] and told.summary["restarts"] == 0
    assert says(logs / "worker-1.log", "worker:1 was given up, and comes back")
    for index, applied in enumerate(told.applied):
        # Its push number AT was void; where every push is an update, the other shards may have it before it knew.
        first = up_to(AT - 1) + ([AT] if index and mode != "sync" and AT in applied[1, 1] else [])
        assert applied == {(0, 1): up_to(STEPS), (1, 1): first, (1, 2): list(range(AT + 1, STEPS + 1))}
    for name, weights in enumerate(told.weights):
        assert weights == {float(told.updates[told.shard_of(name)])}


@pytest.mark.slow
def test_one_that_stands_still_is_named_and_at_the_limit_evicted(
    processes: Processes, gate: Gate, tmp_path: Path
) -> None:
    """It lives, so its lease holds through twenty times as long; then the stall limit counts."""
    flags = ["--mode=sync", "--ledger", LEASE, "--stall-s=12", "--run-dir=made"]
    script = [COUNT, f"--steps={STEPS}", f"--stand=1:{AT}", f"--gate={gate.path}"]
    launcher = processes.paceline("run", *flags, *script)
    arrival = gate.arrival()
    logs, device = tmp_path / "made" / "logs", "/job:worker/replica:0/task:1"
    until(lambda: says(logs / "worker-0.log", f"Still waiting for response from worker: {device} (1"), "its name")
    told = (logs / "worker-0.log").read_text()
    assert f"{device} lives, and computes its step, since 1" in told and "; evicted in " in told
    until(lambda: says(logs / "worker-0.log", "Training ends"), "the other one's end")
    assert "Evicted: worker:1 made no progress for 12 s" in (logs / "ps-0.log").read_text()
    arrival.release()
    launcher.ends_with(0)
    (applied,) = Told(tmp_path / "made", 1).applied
    assert applied == {(0, 1): up_to(STEPS), (1, 1): up_to(AT - 1), (1, 2): list(range(AT + 1, STEPS + 1))}


# --- bytes that never arrive ------------------------------------------------------------------------------------------


class Behind:
    """Worker 1 sits behind a proxy; worker 0 does not."""

    def __init__(self, swallows: set[str], heals_after: int) -> None:
        self._swallows = swallows
        self._heals_after = heals_after
        self._steps = threading.Condition()
        self._done = 0
        self._has_begun = threading.Event()
        self.proxy: Proxy | None = None
        self.swallowed = 0

    def script(self, ctx: Any) -> None:
        if ctx.worker_index == 1:
            me = ctx._session.identity()
            self.proxy = Proxy(me.ps_addresses[0])
            behind = dataclasses.replace(me, ps_addresses=(self.proxy.address,))
            ctx._session.identity = lambda: behind
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model().backward()
            if ctx.worker_index == 1 and step == AT:
                self.partition()
            elif step == AT:
                self._has_begun.wait(DEADLINE_S)  # else the other one is through before anything happens
            optimizer.step()
            if ctx.worker_index == 0:
                with self._steps:
                    self._done = step
                    self._steps.notify_all()
        ctx.pull()
        if ctx.worker_index == 1 and self.proxy is not None:
            self.swallowed = self.proxy.swallowed

    def partition(self) -> None:
        assert self.proxy is not None
        self.proxy.swallows = self._swallows
        self._has_begun.set()
        threading.Thread(target=self._heal, daemon=True, name="healer").start()

    def _heal(self) -> None:
        """When the others have got on without it, and it has said something that nobody heard: in async they may be
        through before it has sent a byte."""
        assert self.proxy is not None
        with self._steps:
            self._steps.wait_for(lambda: self._done >= self._heals_after, DEADLINE_S)
        self.proxy.has_swallowed.wait(DEADLINE_S)
        self.proxy.swallows = set()


@pytest.mark.parametrize(
    ("swallows", "mode"),
    [
        ({"up", "down"}, "sync"),
        pytest.param({"down"}, "async", marks=pytest.mark.slow),
        pytest.param({"up"}, "sync", marks=pytest.mark.slow),
        pytest.param({"down"}, "sync", marks=NIGHTLY),
        pytest.param({"up", "down"}, "async", marks=pytest.mark.slow),
        pytest.param({"up"}, "async", marks=NIGHTLY),
    ],
)
def test_I2_a_partition_ends_and_nothing_counts_twice(
    swallows: set[str], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (clients, "SILENT_S"),
        (heartbeat, "STATUS_S"),
        (heartbeat, "ATTACH_S"),
        (security, "HANDSHAKE_S"),
    ):
        monkeypatch.setattr(module, name, 0.5)
    behind = Behind(swallows, heals_after=STEPS)  # in sync the other one gets there when this one is out
    began_s = time.monotonic()
    paceline.launch(
        behind.script, workers=2, mode=mode, lane="tcp", lease_s=1.5, wait_s=60.0, ledger=True, run_dir=str(tmp_path)
    )
    assert time.monotonic() - began_s < 60
    assert behind.proxy is not None and (behind.swallowed > 0 or behind.proxy.swallowed > 0), "the fault fired"
    behind.proxy.close()
    applied: dict[tuple[int, int], list[int]] = {}
    for record in read(tmp_path / "ledger" / "ps-0.bin"):
        if record.kind == Kind.APPLY:
            applied.setdefault((record.other, record.incarnation), []).append(record.push_id)
    assert applied.pop((0, 1)) == up_to(STEPS)
    pushes = sorted(push for key in applied for push in applied[key])
    assert len(pushes) == len(set(pushes)), "each once, whichever life sent it"
    assert set(up_to(STEPS)) - set(pushes) <= {AT, AT + 1}, "at most the one that was void, and one that came late"
    weight = {float(max(r.version for r in read(tmp_path / "ledger" / "ps-0.bin")))}
    assert weight == {float(STEPS + len(pushes))} or mode == "sync"


def test_I6_a_ps_that_never_comes_back_is_named_at_the_deadline() -> None:
    """The wait has an end, and says for whom it was."""

    def script(ctx: Any) -> None:
        me = ctx._session.identity()
        proxy = Proxy(me.ps_addresses[0])
        ctx._session.identity = lambda: dataclasses.replace(me, ps_addresses=(proxy.address,))
        model = Counter(5)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        proxy.close()
        model().backward()
        optimizer.step()

    began_s = time.monotonic()
    with pytest.raises(TrainingFailed, match=r"WaitTimeout.*gave up after \d s: /job:ps/replica:0/task:0 at 127.0.0.1"):
        paceline.launch(script, workers=1, lane="tcp", wait_s=1.5, lease_s=0.5)
    assert time.monotonic() - began_s < 40
