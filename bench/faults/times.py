"""HOW fast is a fault noticed, and how long until everybody trains again? `python bench/faults/times.py [REPETITIONS]`

Runs a small training script with one fault (--chaos) at a time and prints a table: medians over the repetitions. The
script writes down when each of its steps ended; the rest is in the run folder's telemetry.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

SCRIPT = Path(__file__).with_name("steps.py")
FAULTS = [
    ("worker `kill -9`", "kill=worker:1@200", "async", ()),
    ("worker `kill -9`", "kill=worker:1@200", "sync", ()),
    ("chief `kill -9`", "kill=worker:0@200", "sync", ()),
    ("worker stopped for 3 s, lease 1 s", "stop=worker:1@200:3s", "sync", ("--lease-s", "1")),
    ("worker stopped for 3 s, lease 1 s", "stop=worker:1@200:3s", "async", ("--lease-s", "1")),
    ("ps `kill -9`", "kill=ps:0@400", "async", ()),
    ("ps `kill -9`", "kill=ps:0@200", "sync", ()),
    ("one of two ps `kill -9`", "kill=ps:1@200", "sync", ("--ps", "2")),
    ("link of a worker cut for 2 s", "cut=worker:1@200:2s", "sync", ("--lane", "tcp", "--lease-s", "1")),
    ("a bit flipped on the way", "flip=worker:1@200", "sync", ("--lane", "tcp")),
]
NOTICES = ("restart", "gone")
AFTER_S = 8.0


def main() -> None:
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("| fault | mode | noticed after | the others' longest step | it trains again after |")
    print("|---|---|---|---|---|")
    for name, fault, mode, flags in FAULTS:
        found = [measured(fault, mode, flags) for _ in range(repetitions)]
        cells = [shown([each[n] for each in found]) for n in range(3)]
        print(f"| {name} | {mode} | {' | '.join(cells)} |", flush=True)


def shown(seconds: list[float | None]) -> str:
    known = [s for s in seconds if s is not None]
    return f"{median(known):.2f} s" if known else "–"


def measured(fault: str, mode: str, flags: tuple[str, ...]) -> tuple[float | None, float | None, float | None]:
    """Seconds from the fault until it was noticed; the longest step of another worker; until its victim trains."""
    victim = re.search(r"=(\w+:\d+)", fault)
    assert victim is not None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "run", "--run-dir", "made", "--mode", mode, "--chaos", fault]
        ran = subprocess.run([*command, *flags, str(SCRIPT)], cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise SystemExit(f"{fault}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}")
        lines = [line for path in Path(folder).glob("made/telemetry/*.jsonl") for line in path.open()]
        events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]
        steps = {path.stem: [float(line) for line in path.open()] for path in Path(folder).glob("steps-*")}
    began = min(e["t"] for e in events if e.get("kind") == "chaos")
    noticed = [e["t"] - began for e in events if e.get("kind") in NOTICES and e["t"] >= began]
    others = {name: times for name, times in steps.items() if not name.startswith(f"steps-{victim.group(1)}-")}
    gaps = [b - a for times in others.values() for a, b in pairwise(times) if began - 1 < b < began + AFTER_S]
    mine = [times for name, times in steps.items() if name not in others] or list(steps.values())
    back = [at - began for times in mine for at in times if at > began + 0.005]
    return min(noticed, default=None), max(gaps, default=None), min(back, default=None)


if __name__ == "__main__":
    main()
