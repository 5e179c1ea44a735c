"""IS everything as it should be? `paceline doctor`: this machine, and with --hosts the others and the ways between.

Called by cli/main. Must never start a task, nor import torch. Exit code 0: nothing is wrong (notes are worth reading);
1: something on this machine; 2: the flags; 3: a host that no cluster could use.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.host_options import ClusterFile, Hostfile, Hosts
from paceline.cli.table import print_table
from paceline.errors import EXIT_CLUSTER, EXIT_OK, EXIT_TRAINING
from paceline.telemetry.output import complain, json_text

if TYPE_CHECKING:
    from paceline.launchers.hosts.diagnosis import Problem
    from paceline.launchers.hosts.links import Link
    from paceline.launchers.hosts.machine import Machine
    from paceline.launchers.hosts.preflight import Report

HERE = "This machine"
NUM_PORTS = 16  # asked for, to see that ports can be had at all
BESIDE = 3
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, with everything that was found.")]


def doctor(hosts: Hosts = None, hostfile: Hostfile = None, cluster: ClusterFile = None, as_json: Json = False) -> None:
    """Look at this machine, and at the hosts of a cluster: versions, hardware, ports, clocks and links.

    Every problem comes with what to do. Exit code 0: nothing is wrong; 1: something on this machine; 2: the flags;
    3: a host that no cluster could use.
    """
    from paceline.cluster.host_files import named
    from paceline.launchers.hosts import diagnosis, machine
    from paceline.launchers.hosts.preflight import Report, look

    asked = named(hosts, hostfile, cluster)
    here, loopback, free = machine.look(), _loopback(), _free_ports()
    own = [*diagnosis.of_machine(here, HERE), *diagnosis.of_loopback(HERE, loopback, free, NUM_PORTS)]
    report = look(asked, {host.name: host.slots + 1 for host in asked}) if asked else Report()
    problems = [*own, *report.problems]
    if as_json:
        print(_json(here, loopback, free, report, problems))
    else:
        print_table(("fact", "this machine"), list(_facts(here, loopback, free).items()))
        if asked:
            _print_hosts(report)
        print("\n".join(_verdict(problems)))
    if code := _code(own, report):
        count = sum(each.is_fatal for each in problems)
        complain(f"{count} problem{'s were' if count != 1 else ' was'} found.")
    raise typer.Exit(code)


def _code(own: list["Problem"], report: "Report") -> int:
    from paceline.launchers.hosts.diagnosis import fatal

    if fatal(report.problems):
        return EXIT_CLUSTER
    return EXIT_TRAINING if fatal(own) else EXIT_OK


def _verdict(problems: list["Problem"]) -> list[str]:
    """Problems first; a sentence where there is none."""
    said = [f"Problem: {each.sentence}" for each in problems if each.is_fatal] or ["No problems found."]
    return said + [f"Note: {each.sentence}" for each in problems if not each.is_fatal]


def _facts(here: "Machine", loopback: "Link | str", free: int) -> dict[str, str]:
    """What this machine is."""
    from paceline.launchers.hosts.table import facts, link_words

    clock = {True: "kept right by ntp or the host", False: "nobody sets it", None: "not known"}[here.is_clock_set]
    return {
        **facts(here),
        "free ports": f"{free} of {NUM_PORTS} asked for",
        "loopback": link_words(loopback),
        "clock": clock,
    }


def _print_hosts(report: "Report") -> None:
    """A column a host, as many beside each other as a terminal has room for; then the ways between them."""
    from paceline.launchers.hosts.table import host_facts, matrix

    told = {name: host_facts(seen) for name, seen in report.seen.items()}
    names = list(told)
    width = BESIDE if sys.stdout.isatty() else len(names)
    for first in range(0, len(names), max(1, width)):
        shown = names[first : first + width]
        print()
        print_table(("host", *shown), [[fact, *(told[name][fact] for name in shown)] for fact in told[shown[0]]])
    if len(names) > 1:
        print()
        print_table(*matrix(report))


def _loopback() -> "Link | str":
    from paceline.launchers.hosts.links import loopback
    from paceline.launchers.hosts.probe import reason

    try:
        return loopback()
    except OSError as error:
        return reason(error)


def _free_ports() -> int:
    from paceline.launchers.ports import Reserved

    with Reserved() as reserved:
        try:
            return len(reserved.addresses(NUM_PORTS))
        except OSError:
            return 0


def _json(here: "Machine", loopback: "Link | str", free: int, report: "Report", problems: list["Problem"]) -> str:
    told = {
        "ok": not any(each.is_fatal for each in problems),
        "machine": here,
        "loopback": loopback,
        "free_ports": free,
        "hosts": list(report.seen.values()),
        "links": [{"from": a, "to": b, "link": link} for (a, b), link in report.links.items()],
        "unmeasured": [{"from": a, "to": b} for a, b in report.unmeasured],
        "problems": problems,
        "seconds": round(report.seconds, 3),
    }
    return json_text(told)
