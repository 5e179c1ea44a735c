"""What a task prints is in its log at once, also where a full disk must not end it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys
from paceline.launchers.output import keep_printing

keep_printing()
print("to stdout")
with open(sys.argv[1], "rb") as log:
    seen = log.read()
print("to stderr", file=sys.stderr)
with open(sys.argv[1], "rb") as log:
    seen += log.read()
assert (seen == b"to stdout\\nto stdout\\nto stderr\\n") == (sys.argv[2] == "1"), seen
"""


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_line_is_in_the_log_at_once_where_the_interpreter_was_told_so(unbuffered: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with log.open("wb") as output:
        command = [sys.executable, "-c", PRINTS, str(log), unbuffered]
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environ, check=False, timeout=60
        ).returncode
    told = log.read_text()
    assert code == 0, told
    assert sorted(told.splitlines()) == ["to stderr", "to stdout"]
