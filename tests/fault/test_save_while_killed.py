"""ctx.save() while a ps is killed and comes back: the chief asks again, and the run ends well."""

from pathlib import Path

import pytest
from processes import Processes

from paceline.checkpoint.read import load, verify

PROGRAM = Path(__file__).with_name("programs") / "saves.py"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_ps"), [("async", 1), ("sync", 2)])
def test_a_ps_is_killed_while_the_chief_saves(mode: str, num_ps: int, processes: Processes) -> None:
    faults = ",".join(f"kill=ps:{num_ps - 1}@{step}" for step in (30, 60, 90))
    run = processes.paceline(
        "run",
        "--ps",
        str(num_ps),
        "--workers",
        "2",
        "--mode",
        mode,
        "--run-dir",
        "run",
        "--chaos",
        faults,
        PROGRAM,
        "120",
    ).ends_with(0)
    assert "Training done; global step 120" in run.text
    checkpoint = processes.folder / "run" / "checkpoints" / "step-00000120"
    assert verify(checkpoint) == []
    assert {shard.version for shard in load(checkpoint).state.shards} == {120}
