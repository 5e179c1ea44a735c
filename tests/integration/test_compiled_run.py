"""DOES a script compile that nobody expected to? The nursery has not imported torch's compiler; bits stay equal."""

from pathlib import Path

import pytest
from process_fixtures import PROGRAMS
from processes import Processes


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["around", "in-place"])
def test_a_script_may_compile_after_its_first_steps(how: str, processes: Processes) -> None:
    script = (PROGRAMS / "compiles_late.py", how)
    processes.paceline("run", "--workers=1", "--run-dir=made", "--max-restarts=0", *script).ends_with(0)
    log = Path(processes.folder / "made" / "logs" / "worker-0.log").read_text()
    assert "compiled, and equal" in log
