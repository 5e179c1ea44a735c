"""WHICH script starts this cluster? A heterogeneous job for Slurm's sbatch, or a shell script for anything else.

Called by `paceline emit`. Pure: text out, and nothing is submitted. Slurm's tasks learn their place from its variables
(cluster/schedulers), those of the shell script from TF_CONFIG. Must never write a secret into the text, only its path.
"""

import json
import re
import shlex

from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.launchers.emitting.docker import Shipment, behaviour
from paceline.launchers.emitting.kubernetes import one_line

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def sbatch(shipment: Shipment) -> str:
    """One job in two parts, and one step over both: the ps part first."""
    num_ps, num_workers = len(shipment.cluster.ps), len(shipment.cluster.workers)
    cores = f" --cpus-per-task={shipment.cpus}" if shipment.cpus else ""
    cards = f" --gpus-per-task={shipment.gpus}" if shipment.gpus else ""
    return "\n".join(
        [
            "#!/bin/bash",
            "# Nothing was submitted: sbatch FILE. Its two parts, ps and workers, are never on the same host.",
            "# What your cluster needs besides (--partition, --account, --time) belongs into both.",
            *secret_notes(shipment),
            f"#SBATCH --job-name={shipment.name} --output={shipment.name}-%j.txt",
            f"#SBATCH --ntasks={num_ps}{cores}",
            "#SBATCH hetjob",
            f"#SBATCH --ntasks={num_workers}{cores}{cards}",
            "set -eu",
            f"cd {shlex.quote(shipment.code)}",
            *exports(shipment),
            f"srun --label --distribution=block --het-group=0 {served(shipment, 'ps')} \\",
            f"  : --distribution=block --het-group=1 {served(shipment, 'worker')}",
        ]
    )


def env(shipment: Shipment) -> str:
    """Each task's environment and command, one of which is chosen by the script's argument."""
    tasks = [*shipment.cluster.ps, *shipment.cluster.workers]
    names = [f"{task.job}-{task.index}" for task in tasks]
    lines = [
        "#!/bin/sh",
        "# One task of the cluster, on any host and in any order: sh FILE TASK. A task's lines are all that it needs.",
        f"# TASK is one of: {' '.join(names)}",
        *secret_notes(shipment),
        f"cd {shlex.quote(shipment.code)} || exit 2",
        *exports(shipment),
        'case "${1-}" in',
    ]
    for name, task in zip(names, tasks, strict=True):
        lines += [
            f"{name})",
            f"  export TF_CONFIG={shlex.quote(tf_config(shipment, task))}",
            f"  exec {served(shipment, task.job)}",
            "  ;;",
        ]
    usage = f"Which task? Use: sh $0 {'|'.join(names)}"
    return "\n".join([*lines, "*)", f'  echo "{usage}" >&2', "  exit 2", "  ;;", "esac"])


FORMS = {"sbatch": sbatch, "env": env}


def served(shipment: Shipment, job: str) -> str:
    """The command of a task, quoted for a shell."""
    words = behaviour(shipment, job, shipment.secret_file)
    return shlex.join(["paceline", "serve", *words])


def tf_config(shipment: Shipment, task: Task) -> str:
    """The cluster and this task's place in it."""
    return json.dumps({"cluster": shipment.cluster.as_dict(), "task": {"type": task.job, "index": task.index}})


def exports(shipment: Shipment) -> list[str]:
    """What every task's environment has."""
    return [f"export OMP_NUM_THREADS={shipment.cpus}"] if shipment.cpus else []


def secret_notes(shipment: Shipment) -> list[str]:
    """Where the secret must lie, as a comment."""
    if shipment.secret_file is None:
        return ["# --insecure: whoever reaches a port can take part."]
    return [f"# All tasks share one secret: {one_line(shipment.secret_file)} must be on every host (mode 0600)."]


def check_slurm(shipment: Shipment) -> None:
    """Refuse what sbatch or srun would take for something else."""
    if not _NAME.fullmatch(shipment.name):
        raise UsageError(f"--name is {shipment.name!r}; use letters, digits, dots, dashes and underscores.")
    if ":" in shipment.program.args:
        raise UsageError("The script's argument ':' would begin another part for srun; write it otherwise.")
