"""WHICH commands start this cluster in containers? `docker run`, a line a task, or a file for Docker Compose.

Called by `paceline emit`; kubernetes and scripts take their commands from here. Pure: text out. Every
container runs the command that one would type by hand, with the code, the results and the secret at the same paths as
outside; so the very same commands also work without containers.
Must never start anything, and must never write a secret into the text.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task, split_address
from paceline.errors import UsageError
from paceline.launchers.entry import Program
from paceline.launchers.resume_command import flags

PLAIN = Settings(run_id="")


class Shipment(msgspec.Struct, frozen=True, kw_only=True):
    """What is to run in containers, and what they need from their hosts."""

    program: Program  # its script's path is absolute
    cluster: ClusterSpec
    settings: Settings  # the path of --resume is absolute
    image: str
    code: str  # the folder with the script
    results: str  # the run folder
    secret_file: str | None  # None: --insecure
    gpus: str = ""  # what the workers' containers see: all, device=0, …; none for a ps
    cpus: int | None = None  # cores a task; None: the scheduler's own choice
    name: str = "paceline"  # what the scheduler calls all of it
    claim: str = ""  # of Kubernetes: the volume with code and results; "": the image has the code
    secret_name: str = ""  # of Kubernetes: the Secret that holds what lies at secret_file
    is_one_host: bool = False  # all tasks on this machine: they share its network


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """One task's container."""

    task: Task
    host: str
    port: int
    command: tuple[str, ...]
    mounts: tuple[str, ...]
    gpus: str
    is_later: bool = False  # of an elastic cluster: one that need not be there at the start

    @property
    def name(self) -> str:
        """What it is called: ps-0, as its log would be."""
        return f"{self.task.job}-{self.task.index}"


def containers(shipment: Shipment) -> list[Container]:
    """One for every task: the ps first, as a reader expects it; any order works."""
    made = []
    started = shipment.cluster.workers[: shipment.settings.started_workers]
    for task in [*shipment.cluster.ps, *shipment.cluster.workers]:
        host, port = split_address(shipment.cluster.address(task))
        made.append(
            Container(
                task=task,
                host=host,
                port=port,
                command=tuple(command(shipment, task)),
                mounts=tuple(mounts(shipment, task)),
                gpus="" if task.job == "ps" else shipment.gpus,
                is_later=task.job != "ps" and task not in started,
            )
        )
    return made


def command(shipment: Shipment, task: Task) -> list[str]:
    """What runs inside: `paceline serve` with TensorFlow's four flags, then ours, then the script, if it is no ps."""
    cluster = shipment.cluster
    place = [f"--job_name={task.job}", f"--task_index={task.index}"]
    place += [f"--{job}_hosts={','.join(cluster.job_tasks(job))}" for job in cluster.jobs]
    return ["paceline", "serve", *place, *behaviour(shipment, task.job, shipment.secret_file)]


def behaviour(shipment: Shipment, job: str, secret_file: str | None) -> list[str]:
    """What `serve` is told beside the place of a task, which TF_CONFIG or a scheduler may know as well."""
    program = shipment.program
    words = given(shipment.settings, len(shipment.cluster.workers))
    words += [f"--run-dir={shipment.results}"]
    words += [f"--secret-file={secret_file}"] if secret_file else []
    if job == "ps":
        return words
    return [*words, *(["-m"] if program.is_module else []), program.script, *program.args]


def given(settings: Settings, num_workers: int) -> list[str]:
    """The settings that differ from the defaults, as flags of `serve`; how often to restart is the engine's."""
    if settings.chaos:
        raise UsageError("--chaos is for `paceline run`, which knows all tasks; `paceline chaos` hurts one by hand.")
    words = list(flags(msgspec.structs.replace(settings, max_restarts=PLAIN.max_restarts)))
    words += [] if settings.resume == PLAIN.resume else ["--resume", settings.resume]
    words += [f"--workers={settings.started_workers}:{num_workers}"] if settings.started_workers else []
    return words


def mounts(shipment: Shipment, task: Task) -> list[str]:
    """What the container sees of its host, at the same paths."""
    written = [shipment.code, shipment.results]
    read = []
    secret = shipment.secret_file
    if secret is not None:  # with --tls the certificate lies beside it
        read.append(f"{Path(secret).parent if shipment.settings.tls else secret}")
    if task.job != "ps" and (checkpoint := resumed_from(shipment)) is not None:
        read.append(checkpoint)
    for path in (*written, *read):
        if ":" in path:
            raise UsageError(f"{path} has a colon in its name, which docker's -v cannot take; choose another folder.")
    return [*(f"{path}:{path}" for path in written), *(f"{path}:{path}:ro" for path in read)]


def resumed_from(shipment: Shipment) -> str | None:
    """The folder of --resume PATH, where no other mount holds it already."""
    path = shipment.settings.resume
    if path in ("auto", "none") or any(Path(path).is_relative_to(seen) for seen in (shipment.code, shipment.results)):
        return None
    return path


def notes(shipment: Shipment, made: Sequence[Container]) -> list[str]:
    """What the reader must do first, as comments."""
    hosts = list(dict.fromkeys(container.host for container in made))
    lines = [f"# The image: docker build -f deploy/Dockerfile -t {shipment.image} ."]
    if shipment.is_one_host:
        lines.append("# All tasks on this machine.")
    else:
        lines.append(f"# Each on its own host: {', '.join(hosts)}. The code lies at {shipment.code} on each of them.")
    if shipment.secret_file is None:
        lines.append("# --insecure: whoever reaches a port can take part.")
    elif not shipment.is_one_host:
        lines.append(f"# All tasks share one secret: copy {shipment.secret_file} to every host first (mode 0600).")
    if not shipment.is_one_host and shipment.settings.resume not in ("auto", "none"):
        lines.append(f"# --resume: the checkpoint lies at {shipment.settings.resume} on every worker's host.")
    return lines


def docker(shipment: Shipment) -> str:
    """A `docker run` line for every task, in the shape that the documents have."""
    made = containers(shipment)
    lines = notes(shipment, made)
    for container in made:
        words = ["docker", "run", "-itd", "--name", f"paceline-{container.name}"]
        words += ["--network", "host"] if shipment.is_one_host else ["-p", f"{container.port}:{container.port}"]
        words += ["--gpus", in_csv(container.gpus)] if container.gpus else []
        restarts = shipment.settings.max_restarts
        words += ["--restart", f"on-failure:{restarts}"] if restarts != PLAIN.max_restarts else []
        for mount in container.mounts:
            words += ["-v", mount]
        words += ["-w", shipment.code, shipment.image, *container.command]
        later = ", which may also come later" if container.is_later else ""
        lines += ["", f"# {container.task} on {container.host}{later}", shlex.join(words)]
    return "\n".join(lines)


def in_csv(gpus: str) -> str:
    """A value of --gpus, which docker reads as a line of CSV.

    >>> in_csv("all"), in_csv("device=0,1")
    ('all', '"device=0,1"')
    """
    return f'"{gpus}"' if "," in gpus else gpus


def compose(shipment: Shipment) -> str:
    """The same as a compose file; on several hosts each starts its own services from it."""
    made = containers(shipment)
    how = "docker compose up" if shipment.is_one_host else "docker compose up SERVICE … on each host"
    lines = [*notes(shipment, made), f"# {how}", "services:"]
    for container in made:
        lines += service(shipment, container)
    return "\n".join(lines)


def service(shipment: Shipment, container: Container) -> list[str]:
    """One service; strings are written as JSON, which YAML reads as it stands."""
    lines = [
        f"  {container.name}:  # on {container.host}",
        f"    image: {quoted(shipment.image)}",
        "    network_mode: host",
        f"    working_dir: {quoted(shipment.code)}",
        f"    command: [{', '.join(quoted(word) for word in container.command)}]",
        "    volumes:",
        *(f"      - {quoted(mount)}" for mount in container.mounts),
    ]
    if shipment.settings.max_restarts != PLAIN.max_restarts:
        lines.append(f"    restart: {quoted(f'on-failure:{shipment.settings.max_restarts}')}")
    if container.is_later:
        lines.append("    profiles: [later]  # docker compose --profile later up")
    if container.gpus:
        lines += ["    deploy:", f"      resources: {{reservations: {{devices: [{reservation(container.gpus)}]}}}}"]
    return lines


def reservation(gpus: str) -> str:
    """What docker's `--gpus` says, in a compose file's words.

    >>> reservation("all")
    '{driver: nvidia, count: all, capabilities: [gpu]}'
    >>> reservation("device=0,1")
    '{driver: nvidia, device_ids: ["0", "1"], capabilities: [gpu]}'
    """
    kind, _, numbers = gpus.partition("=")
    if kind == "device":
        which = f"device_ids: [{', '.join(quoted(number) for number in numbers.split(','))}]"
    else:
        which = f"count: {gpus}"
    return f"{{driver: nvidia, {which}, capabilities: [gpu]}}"


def quoted(text: str) -> str:
    """A string of a compose file, where a dollar begins a variable unless there are two."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


FORMS = {"docker": docker, "compose": compose}


def check_image(name: str) -> None:
    """Refuse what docker would take for something else."""
    if not name or name.startswith("-") or any(letter.isspace() for letter in name):
        raise UsageError(f"--image is {name!r}; it must be the name of an image, such as paceline:latest.")


def check_gpus(text: str) -> None:
    """Refuse what docker's --gpus would not take.

    >>> check_gpus("all"), check_gpus("device=0,1"), check_gpus("")
    (None, None, None)
    """
    kind, equals, numbers = text.partition("=")
    is_named = kind == "device" and equals and all(numbers.split(","))
    if text and text != "all" and not text.isdecimal() and not is_named:
        raise UsageError(f"--gpus is {text!r}; use all, a number of cards, or device=0,1.")
