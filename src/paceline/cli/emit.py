"""HOW is the same cluster started elsewhere? `paceline emit docker|compose|jobset|tfjob|sbatch|env`, with run's flags.

Called by cli/main. Prints text and starts nothing; of this machine it looks only at paths and at the user's secret.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from paceline.cli import options as o
from paceline.cli.run import hosts_or_count
from paceline.cluster.secret import own_path, secret_by_hand
from paceline.cluster.spec import ClusterSpec
from paceline.cluster.validate import check
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.launchers.emitting.docker import Shipment

FIRST_PORT = 2222
HERE = ("docker", "compose", "env")  # without addresses they start all tasks on this machine
CONTAINERS = ("docker", "compose")
IN_PODS = ("jobset", "tfjob")
DEFAULTS = {  # of flags that not every form has
    "ps_hosts": None,
    "worker_hosts": None,
    "image": "paceline:latest",
    "gpus": "",
    "cpus": None,
    "name": "paceline",
    "claim": "",
    "secret_name": "paceline",
}
OURS_FIRST = {"allow_interspersed_args": False}  # parsing ends at SCRIPT: the rest is the script's

app = typer.Typer(help="Print what starts the same cluster in containers or by a scheduler.", no_args_is_help=True)
Image = Annotated[str, typer.Option("--image", help="The image that tasks run in; deploy/Dockerfile makes it.")]
Code = Annotated[
    str | None, typer.Option("--code", metavar="DIR", help="The folder that tasks see.  [SCRIPT's; with -m: this one]")
]
PodCode = Annotated[
    str | None, typer.Option("--code", metavar="DIR", help="Where pods see SCRIPT's folder.  [as here]")
]
PodRunDir = Annotated[str, typer.Option("--run-dir", help="The run folder, as pods see it, in --code if relative.")]
Gpus = Annotated[str, typer.Option("--gpus", help="What workers see of the host's GPUs: all, 2, device=0,1.  [none]")]
RunDir = Annotated[str, typer.Option("--run-dir", help="The run folder, the same path on every host.")]
Cards = Annotated[str, typer.Option("--gpus", metavar="N", help="Cards for each worker.  [none]")]
Cpus = Annotated[int | None, typer.Option("--cpus", metavar="N", help="Cores for each task; also its threads.")]
Name = Annotated[str, typer.Option("--name", help="What the scheduler calls it.")]
SecretName = Annotated[
    str, typer.Option("--secret-name", help="The Kubernetes Secret that holds what all tasks share.")
]
Claim = Annotated[
    str, typer.Option("--claim", metavar="NAME", help="A PersistentVolumeClaim with the code, for the run folder, too.")
]
SecretFile = Annotated[str | None, typer.Option("--secret-file", help="What all tasks share.  [the user's own]")]


@app.command("compose", help="Print a file for `docker compose up`.", context_settings=OURS_FIRST)
@app.command("docker", help="Print a `docker run` line for every task.", context_settings=OURS_FIRST)
@o.with_settings
def emit(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    run_dir: RunDir = "result",
    secret_file: SecretFile = None,
    image: Image = "paceline:latest",
    code: Code = None,
    gpus: Gpus = "",
    module: o.Module = False,
) -> None:
    """Both forms take the same flags."""
    from paceline.launchers.emitting.docker import FORMS, check_gpus

    check_gpus(gpus)
    typer.echo(FORMS[str(ctx.command.name)](shipment(ctx)))


@app.command("tfjob", help="Print a TFJob for Kubeflow's training operator.", context_settings=OURS_FIRST)
@app.command("jobset", help="Print a JobSet for Kubernetes.", context_settings=OURS_FIRST)
@o.with_settings
def emit_kubernetes(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    run_dir: PodRunDir = "result",
    secret_file: SecretFile = None,
    secret_name: SecretName = "paceline",
    image: Image = "paceline:latest",
    code: PodCode = None,
    claim: Claim = "",
    name: Name = "paceline",
    cpus: Cpus = None,
    gpus: Cards = "",
    module: o.Module = False,
) -> None:
    """Both forms take the same flags; hosts are the scheduler's."""
    from paceline.launchers.emitting.kubernetes import FORMS, check_cards, check_names

    check_names(name, secret_name, claim)
    check_cards(gpus)
    typer.echo(FORMS[str(ctx.command.name)](shipment(ctx)))


@app.command("sbatch", help="Print a heterogeneous job for Slurm's sbatch.", context_settings=OURS_FIRST)
@o.with_settings
def emit_sbatch(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    run_dir: RunDir = "result",
    secret_file: SecretFile = None,
    code: Code = None,
    name: Name = "paceline",
    cpus: Cpus = None,
    gpus: Cards = "",
    module: o.Module = False,
) -> None:
    """Hosts are the scheduler's."""
    from paceline.launchers.emitting.kubernetes import check_cards
    from paceline.launchers.emitting.scripts import check_slurm, sbatch

    check_cards(gpus)
    made = shipment(ctx)
    check_slurm(made)
    typer.echo(sbatch(made))


@app.command("env", help="Print a shell script that has each task's environment.", context_settings=OURS_FIRST)
@o.with_settings
def emit_env(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    run_dir: RunDir = "result",
    secret_file: SecretFile = None,
    code: Code = None,
    cpus: Cpus = None,
    module: o.Module = False,
) -> None:
    """For whatever else starts processes."""
    from paceline.launchers.emitting.scripts import env

    typer.echo(env(shipment(ctx)))


def shipment(ctx: typer.Context) -> "Shipment":
    """What the flags describe, checked as `run` would check it."""
    from paceline.launchers import resume_check
    from paceline.launchers.emitting.docker import Shipment, check_image
    from paceline.launchers.entry import Program, check_program

    params = {**DEFAULTS, **ctx.params}
    script, is_module = str(params["script"]), bool(params["module"])
    program = Program(script=script, args=tuple(params["args"] or ()), is_module=is_module)
    check_program(program)
    check_image(params["image"])
    if params["cpus"] is not None and params["cpus"] < 1:
        raise UsageError(f"--cpus is {params['cpus']}; a task needs at least 1.")
    settings = o.settings(params)
    cluster = cluster_of(params)
    check(settings, cluster)
    is_one_host = ctx.command.name in HERE and not params["ps_hosts"] and not params["worker_hosts"]
    if ctx.command.name in IN_PODS and params["code"] and not os.path.isabs(params["code"]):
        raise UsageError(f"--code {params['code']} is where pods see the folder; give a whole path, such as /app.")
    code = os.path.abspath(params["code"] or (os.getcwd() if is_module else Path(script).parent))
    if is_one_host and not os.path.isdir(code):  # docker would make an empty one
        raise UsageError(f"--code {params['code']}: there is no such folder.")
    base = code if ctx.command.name in IN_PODS else os.getcwd()  # pods see nothing of this machine
    if settings.resume not in ("auto", "none"):
        if is_one_host:  # else it lies with the workers
            resume_check.check(settings, None, program)
        settings = msgspec.structs.replace(settings, resume=os.path.abspath(os.path.join(base, settings.resume)))
    path = os.path.join(code, Path(script).name) if ctx.command.name in IN_PODS else os.path.abspath(script)
    if ctx.command.name in CONTAINERS and not is_module and not Path(path).is_relative_to(code):
        raise UsageError(f"{script} is not below --code {code}, which is all that a container sees.")
    absolute = program if is_module else Program(script=path, args=program.args)
    secret = None
    if not settings.insecure:
        secret_by_hand(params["secret_file"], os.environ, settings.tls)  # made now: docker would make a folder of it
        secret = os.path.abspath(params["secret_file"] or own_path(os.environ))
    return Shipment(
        program=absolute,
        cluster=cluster,
        settings=settings,
        image=params["image"],
        code=code,
        results=os.path.abspath(os.path.join(base, params["run_dir"])),
        secret_file=secret,
        gpus=params["gpus"],
        cpus=params["cpus"],
        name=params["name"],
        claim=params["claim"],
        secret_name=params["secret_name"],
        is_one_host=is_one_host,
    )


def cluster_of(params: dict[str, object]) -> ClusterSpec:
    """At the addresses given; without any all tasks are on this machine, from port 2222 on."""
    if bool(params["ps_hosts"]) != bool(params["worker_hosts"]):
        raise UsageError("Give both --ps_hosts and --worker_hosts, or neither: then all tasks are on one machine.")
    ps = hosts_or_count("ps", params, default=1)
    workers = hosts_or_count("workers", {**params, "workers": o.num_workers(params)}, default=2)
    port, jobs = FIRST_PORT, {}
    for job, wanted in (("ps", ps), ("worker", workers)):
        if isinstance(wanted, int):
            jobs[job] = [f"127.0.0.1:{port + number}" for number in range(wanted)]
            port += wanted
        else:
            jobs[job] = list(wanted)
    return ClusterSpec(jobs)
