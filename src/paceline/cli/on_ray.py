"""HOW is Ray meant? The flags of `paceline run --on ray`, and what becomes of them.

Called by cli/run. Must never import Ray: whoever does not use it need not have it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.cli.host_options import HOST_FLAGS
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.launchers import local

ITS_FLAGS: dict[str, object] = {"worker_cpus": 1, "worker_gpus": 0, "colocate": False}  # with what each is without it


def is_meant(params: Mapping[str, object]) -> bool:
    """Whether the run is for Ray; UsageError for flags that need it, or contradict it."""
    if params.get("on") is None:
        for name, plain in ITS_FLAGS.items():
            if params.get(name, plain) != plain:
                raise UsageError(f"--{name.replace('_', '-')} is for --on ray; add that, or leave it out.")
        return False
    for name in HOST_FLAGS:
        if params.get(name) is not None:
            raise UsageError(f"--on ray says where tasks go, and so does --{name}; leave one out.")
    return True


def start(request: "local.Request", params: Mapping[str, object]) -> int:
    """The same request, for the machines of a Ray cluster."""
    from paceline.launchers.ray import on_ray

    how = on_ray.OnRay(
        on=str(params["on"]),
        worker_cpus=float(str(params["worker_cpus"])),
        worker_gpus=float(str(params["worker_gpus"])),
        is_colocated=bool(params["colocate"]),
    )
    return on_ray.dry_run(request, how) if params["dry_run"] else on_ray.run(request, how)
