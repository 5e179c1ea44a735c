"""WHICH flags name the hosts? `--hosts`, `--hostfile`, `--cluster`: for every verb that reaches other machines.

Called by the verbs. Must never read a file, nor reach a host.
"""

from typing import Annotated

import typer

HOST_FLAGS = ("hosts", "hostfile", "cluster")
Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="HOST[:SLOTS],…", help="Hosts by ssh, a worker a slot: server1:2,me@server2:1."),
]
Hostfile = Annotated[
    str | None,
    typer.Option("--hostfile", metavar="FILE", help="The same, a host a line, as DeepSpeed, MPI or Horovod has it."),
]
ClusterFile = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="FILE", help="A cluster.toml: ssh target, python, folder, slots, roles of each host."
    ),
]
