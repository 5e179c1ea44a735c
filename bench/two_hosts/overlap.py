"""DOES it pay to send gradients while backward runs? 40 M parameters over tcp between two network namespaces.

Run by hand as root, with `ip` and `tc`: `python bench/two_hosts/overlap.py [--rate 10gbit]`. One ps and one worker,
each in its own namespace, with and without --overlap in turn; every run is fresh processes without its first steps.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
PS, WORKER = "10.77.0.1:2222", "10.77.0.2:2222"


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def two_hosts(rate: str | None) -> Iterator[None]:
    """Namespaces paceline-a and paceline-b, joined by a pair of virtual cards, as slow as `rate`."""
    try:
        for name in ("a", "b"):
            sh(f"ip netns add paceline-{name}")
        sh("ip link add pl-a netns paceline-a type veth peer name pl-b netns paceline-b")
        for name, number in (("a", 1), ("b", 2)):
            sh(f"ip -n paceline-{name} addr add 10.77.0.{number}/24 dev pl-{name}")
            sh(f"ip -n paceline-{name} link set pl-{name} up")
            sh(f"ip -n paceline-{name} link set lo up")
            if rate:
                limit = f"tc qdisc add dev pl-{name} root tbf rate {rate} burst 4mb latency 50ms"
                sh(f"ip netns exec paceline-{name} {limit}")
        yield
    finally:
        for name in ("a", "b"):
            subprocess.run(f"ip netns del paceline-{name}".split(), check=False)


def step_ms(flags: list[str], mode: str, batch: str) -> float:
    """The median step of one run."""
    common = [f"--ps_hosts={PS}", f"--worker_hosts={WORKER}", f"--mode={mode}", "--save-every=none", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": tempfile.gettempdir()}

    def start(namespace: str, *args: str) -> "subprocess.Popen[str]":
        command = ["ip", "netns", "exec", f"paceline-{namespace}", sys.executable, "-m", "paceline", "serve"]
        return subprocess.Popen(
            [*command, *common, *args], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    ps = start("a", "--job_name=ps", "--task_index=0")
    worker = start("b", "--job_name=worker", "--task_index=0", str(HERE / "overlap_script.py"), batch)
    printed, _ = worker.communicate(timeout=300)
    ps.wait(timeout=60)
    found = re.search(r"median step ([0-9.]+) ms", printed)
    if found is None:
        raise SystemExit(f"the worker failed:\n{printed}")
    return float(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", help="of the link, as tc writes it: 10gbit; without: as fast as it goes")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--batch", default="64", help="samples a step: how long backward takes")
    args = parser.parse_args()
    took: dict[str, list[float]] = {"without": [], "with": []}
    with two_hosts(args.rate):
        for _ in range(args.reps):
            for name, flags in (("without", []), ("with", ["--overlap"])):
                took[name].append(step_ms(flags, args.mode, args.batch))
                print(f"{name:8} {took[name][-1]:8.1f} ms", flush=True)
    before, after = (statistics.median(took[name]) for name in ("without", "with"))
    print(f"link {args.rate or 'unlimited'}: without {before:.1f} ms, with {after:.1f} ms, ratio {after / before:.3f}")


if __name__ == "__main__":
    main()
