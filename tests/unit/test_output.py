"""What a process prints ends nothing: not where a disk is full, a reader has gone, or a stream was never open."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys
from paceline.telemetry.output import keep_printing

keep_printing(is_task=True)
print("to stdout")
with open(sys.argv[1], "rb") as log:
    seen = log.read()
print("to stderr", file=sys.stderr)
with open(sys.argv[1], "rb") as log:
    seen += log.read()
assert (seen == b"to stdout\\nto stdout\\nto stderr\\n") == (sys.argv[2] == "1"), seen
"""
ALL_THE_SAME = """
import os, sys
from paceline.telemetry.output import keep_printing, unwritten

keep_printing(is_task=True)
keep_printing(is_task=True)
for number in range(3000):
    print("a line that is long enough to fill what a pipe holds", number, "\\N{SNOWMAN}", "\\udcff")
    print("and another", file=sys.stderr, flush=True)
lost = unwritten()
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY, 0o600)
assert file > 2, "it would be printed into"
os.write(file, (lost.strerror if lost else "nothing").encode())
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


@pytest.mark.parametrize(
    ("streams", "lost"),
    [
        ("> /dev/full 2> /dev/full", "No space left on device"),
        ("2> /dev/null | head -n 1 > /dev/null", "nothing"),  # it has what it wanted
        (">&- 2>&- <&-", "nothing"),
        ("> /dev/null 2>&-", "nothing"),
    ],
)
def test_printing_goes_on(streams: str, lost: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    for environ in ({}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONIOENCODING": "ascii"}):
        line = f"'{sys.executable}' -c \"$CODE\" '{told}' {streams}; exit ${{PIPESTATUS[0]}}"
        given = {**os.environ, **environ, "CODE": ALL_THE_SAME}
        done = subprocess.run(["bash", "-c", line], env=given, timeout=120, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert told.read_text() == lost


def test_a_verb_whose_answer_is_lost_says_so(tmp_path: Path) -> None:
    """A gone reader wanted no more; a full disk has cost the answer."""
    for streams, code, said in (("> /dev/full", 1, "No space left on device"), ("| true", 0, ""), (">&-", 0, "")):
        line = f"'{sys.executable}' -m paceline chaos kill=ps:0@5 {streams}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=60, capture_output=True, check=False)
        assert done.returncode == code, (streams, done.stderr)
        assert (said in done.stderr.decode()) if said else (done.stderr == b""), (streams, done.stderr)
