"""Change one decision of the program at a time, and fail if the tests of continuous integration do not notice.

Run by `make nightly`, and by hand: `python tests/mutations.py [TEXT...]` (those whose name contains a text; without
one, all). Each mutation is a line of the program and what it becomes, in a copy of the tree. The line is looked for in
all files, so it may move; it must be there once (tests/test_mutations.py), else the mutation says nothing. The tests
that are named with it are run until one fails; before that, on the copy as it is, they must pass.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "runs")
LIMIT_S = 600.0  # of the tests of one mutation; most fail within seconds
SURVIVED, CAUGHT = 0, 1  # pytest's exit codes; any other one is an error of its own


class Mutation(NamedTuple):
    """A wrong program: `line` becomes `wrong`, and `tests` (pytest's words) find out."""

    name: str
    line: str
    wrong: str
    tests: tuple[str, ...]


MUTATIONS = (
    # control
    Mutation(
        "control: one ticket too many is granted",
        "if applied + len(self._granted) < self.total:",
        "if applied + len(self._granted) <= self.total:",
        ("tests/sim/test_rounds.py", "-k", "budget and async"),
    ),
    Mutation(
        "control: a push that is sent again counts again",
        "if (incarnation, push_id) <= self.applied.get(worker, (0, 0)):",
        "if (incarnation, push_id) < self.applied.get(worker, (0, 0)):",
        ("tests/sim/test_rounds.py", "tests/fault/test_reconnect.py", "-k", "retries or every_push_counts_once"),
    ),
    Mutation(
        "control: a vote without a finite gradient is decided into its round",
        "for w, b in sorted(self.votes.items()) if b.counted)",
        "for w, b in sorted(self.votes.items()))",
        ("tests/sim/test_rounds.py", "-k", "everything"),
    ),
    Mutation(
        "control: a bounded worker may be a step further ahead",
        "return self.mode.may_read(self.clocks.get(worker, 0) - self._slowest())",
        "return self.mode.may_read(self.clocks.get(worker, 0) - self._slowest() - 1)",
        ("tests/sim/test_rounds.py", "-k", "bounded"),
    ),
    # journal
    Mutation(
        "journal: a whole value is written over the one that holds",
        "place = self._whole ^ 1\n",
        "place = self._whole\n",
        ("tests/unit/test_journal.py", "tests/unit/test_survival.py"),
    ),
    Mutation(
        "journal: an update is found half done, and taken as it is",
        "self._put_back((mark & DONE) - 1, block, regions)",
        "pass",
        ("tests/unit/test_survival.py",),
    ),
    Mutation(
        "journal: what is copied ahead is not forgotten when something else changes the numbers",
        "self._copied_ahead = None\n        if self._counts[area] != len(moves):",
        "if self._counts[area] != len(moves):",
        ("tests/unit/test_survival.py", "tests/traps/test_trap_12_undo.py"),
    ),
    # session
    Mutation(
        "session: on a new connection the gradient in the slot is left behind",
        "            self.slot[:] = old\n",
        "            pass\n",
        ("tests/fault/test_reconnect.py",),
    ),
    Mutation(
        "session: a changed option is not sent with the push",
        "if values == self._sent_options:",
        "if self._sent_options is not None:",
        ("tests/numerics/test_state.py", "tests/seam/test_seam.py", "-k", "state or test_one_worker"),
    ),
    Mutation(
        "session: a gradient that is not finite is pushed as one that is",
        "is_finite = looks_finite or self._is_finite(gradients)",
        "is_finite = True",
        ("tests/traps/test_trap_09_nan_check.py",),
    ),
)


def places_of(line: str, root: Path = ROOT) -> list[Path]:
    """Return the file of each occurrence of this line, relative to the root."""
    files = sorted((root / "src" / "paceline").rglob("*.py"))
    return [path.relative_to(root) for path in files for _ in range(path.read_text().count(line))]


def run(tests: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run these tests of the copy until one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly", *tests]
    environ = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S)


def check(each: Mutation, folder: Path) -> str:
    """Return what is wrong with the tests; nothing where they pass, and fail with the mutation."""
    (place,) = places_of(each.line)
    right = (folder / place).read_text()
    try:
        done = run(each.tests, folder)
        if done.returncode != SURVIVED:
            return f"they do not pass without it:\n{done.stdout[-2000:]}"
        (folder / place).write_text(right.replace(each.line, each.wrong))
        done = run(each.tests, folder)
    except subprocess.TimeoutExpired:
        return f"they took more than {LIMIT_S:g} s"
    finally:
        (folder / place).write_text(right)
    if done.returncode == CAUGHT:
        (failed, *_) = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        print(f"  caught by {failed.split()[1]}", flush=True)
        return ""
    return "no test noticed" if done.returncode == SURVIVED else f"pytest could not run:\n{done.stdout[-2000:]}"


def main(texts: list[str]) -> int:
    """Check the mutations whose name contains one of these texts; the exit code."""
    chosen = [each for each in MUTATIONS if not texts or any(text in each.name for text in texts)]
    wrong = 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "tree"
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        for each in chosen:
            began_s = time.monotonic()
            print(each.name, flush=True)
            said = check(each, folder)
            wrong += bool(said)
            print(f"  {said or 'so the tests hold it'} ({time.monotonic() - began_s:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutations are caught")
    return bool(wrong) or not chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
