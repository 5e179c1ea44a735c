"""A live table in a terminal; plain lines with CI set. `--help` of every verb, without torch."""

import re
import sys
from pathlib import Path

import pytest
from processes import Processes

pytestmark = pytest.mark.timeout(120)

VERBS = [[], ["run"], ["serve"], ["demo"], ["kv"], ["kv", "ls"], ["kv", "get"], ["lab"], ["lab", "run"]]


@pytest.mark.slow
def test_a_terminal_gets_a_table_that_is_redrawn(processes: Processes, train: Path) -> None:
    words = ("run", "--workers=1", "--run-dir=made", train)
    process = processes.paceline(*words, in_terminal=True, TERM="xterm", COLUMNS="120").ends_with(0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", process.text)
    assert re.search(r"task +┃ +step +┃ +global step +┃ +steps/s +┃ +metrics +┃ +phase", plain), plain
    assert re.search(r"│ +worker:0 .*│ +ended", plain), "the last table shows the end"
    assert "\x1b[1A" in process.text, "the cursor goes up to redraw"
    assert "Training done; global step 40" in plain


@pytest.mark.slow
def test_ci_gets_plain_lines_also_in_a_terminal(processes: Processes, train: Path) -> None:
    words = ("run", "--workers=1", "--run-dir=made", train)
    process = processes.paceline(*words, in_terminal=True, TERM="xterm", CI="1").ends_with(0)
    assert re.search(r"^\[ *\d+ s\] global step \d+ \| worker:0", process.text, re.M)
    assert "\x1b[" not in process.text


def test_help_of_every_verb_imports_no_torch(processes: Processes) -> None:
    code = (
        "import sys\n"
        "from paceline.cli.main import main\n"
        f"for verb in {VERBS!r}:\n"
        "    try:\n"
        "        main([*verb, '--help'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, (verb, end.code)\n"
        "heavy = {'torch', 'numpy', 'tensorboardX', 'rich.live'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    process = processes.start(sys.executable, "-c", code, name="help").ends_with(0)
    assert process.text.count("Usage: paceline") == len(VERBS)
