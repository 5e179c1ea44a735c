"""A run folder or script below a folder that may not be entered: a sentence and exit code 2, by every verb.

Root may enter everything, so it starts the command without that capability.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Processes

pytestmark = pytest.mark.timeout(180)

SERVE = ("serve", "--insecure", "--ps_hosts=127.0.0.1:1", "--worker_hosts=127.0.0.1:2", "--task_index=0")
VERBS = [
    ("kv", "ls", "{run}"),
    ("kv", "get", "{run}", "weight"),
    ("ctl", "show", "{run}"),
    ("ctl", "mode", "sync", "{run}"),
    ("verify", "{run}"),
    ("run", "--run-dir", "{run}", "{open}"),
    ("run", "--run-dir", "{new}", "{open}"),
    ("run", "--run-dir", "{run}", "--resume", "auto", "{open}"),
    ("run", "--resume", "{run}", "{open}"),
    ("run", "{script}"),
    ("run", "--hosts", "localhost:1", "--run-dir", "{run}", "{open}"),
    ("run", "--plain", "{script}"),
    ("demo", "--run-dir", "{run}"),
    ("serve", "--join", "{run}"),
    (*SERVE, "--job_name=worker", "{script}"),
    (*SERVE, "--job_name=ps", "--run-dir", "{run}"),
    ("ckpt", "ls", "{run}"),
    ("ckpt", "inspect", "{run}"),
    ("ckpt", "verify", "{run}"),
    ("ckpt", "diff", "{run}", "{run}"),
    ("ckpt", "export", "{run}", "out"),
    ("plan", "{script}"),
    ("lab", "report", "{run}"),
    ("emit", "docker", "{script}"),
]
EACH = """
import json, os, sys, traceback
from paceline.cli.main import main
for argv in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 1); os.dup2(write, 2); os.close(write)
        code = 99
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(); sys.stderr.flush()
        os._exit(code or 0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps({"argv": argv, "code": code, "text": text}), flush=True)
"""
AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "closed"
    (folder / "run").mkdir(parents=True)
    (folder / "script.py").write_text("import paceline\n")
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


def prefix(closed: Path) -> list[str]:
    """What takes root's privilege away."""
    if os.geteuid() != 0:
        return []
    look = [sys.executable, "-c", f"import os; raise SystemExit(os.access({str(closed / 'run')!r}, os.R_OK))"]
    if shutil.which("setpriv") and not subprocess.run([*AS_OTHERS, *look], timeout=60, check=False).returncode:
        return AS_OTHERS
    pytest.skip("SKIPPED, so closed folders are NOT tested here: root, and no setpriv that gives up its privilege")


@pytest.mark.slow
def test_every_verb_says_in_a_sentence_that_it_may_not_go_there(
    processes: Processes, closed: Path, tmp_path: Path
) -> None:
    (tmp_path / "open.py").write_text("import paceline\n")
    names = {"run": closed / "run", "new": closed / "new", "script": closed / "script.py", "open": tmp_path / "open.py"}
    verbs = [[word.format(**names) for word in verb] for verb in VERBS]
    done = processes.start(*prefix(closed), sys.executable, "-c", EACH, json.dumps(verbs), within_s=150).ends_with(0)
    told = [json.loads(line) for line in done.lines]
    assert [each["argv"] for each in told] == verbs
    for each in told:
        assert each["code"] == 2, each
        assert "Traceback" not in each["text"] and str(closed) in each["text"].replace("\n", " "), each
        assert "ermission denied" in each["text"], each
        assert sum(line.startswith("paceline: ") for line in each["text"].splitlines()) == 1, each
