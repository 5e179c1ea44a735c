"""WHICH file starts this cluster on Kubernetes? A JobSet, or a TFJob of Kubeflow.

Called by `paceline emit`. Pure: text out, and nothing is applied. Every pod runs `paceline serve`, which learns its
place from TF_CONFIG: in a JobSet it is made of the pod's index and JobSet's names, a TFJob's operator sets it.
Must never write a secret into the text: a Kubernetes Secret holds it, and a comment has the command that makes one.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cluster.schedulers import jobset_cluster
from paceline.errors import UsageError
from paceline.launchers.emitting.docker import Shipment, behaviour

Value = object  # what a YAML file holds: mappings, lists, strings, numbers, truths
Fields = dict[str, Value]

PORT = 2222
KEYS = "/etc/paceline/keys"  # inside a pod
READABLE_BY_OWNER = 0o400
INDEX = "JOB_COMPLETION_INDEX"
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_GPUS = re.compile(r"[1-9][0-9]{0,2}")


def jobset(shipment: Shipment) -> str:
    """Two replicated jobs of indexed pods, each with a name in DNS that outlives a restart."""
    network = {"enableDNSHostnames": True, "subdomain": shipment.name, "publishNotReadyAddresses": True}
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    names = jobset_cluster(shipment.name, shipment.name, sizes(shipment), PORT)
    jobs: list[Value] = []
    for job, size in sizes(shipment).items():
        config = json.dumps({"cluster": names.as_dict(), "task": {"type": job, "index": INDEX}})
        environ: list[Value] = [
            {"name": INDEX, "valueFrom": index},
            {"name": "TF_CONFIG", "value": escaped(config).replace(f'"{INDEX}"', f"$({INDEX})")},
        ]
        template = pod(shipment, job, ("paceline", "paceline"), environ)
        spec: Fields = {"parallelism": size, "completions": size, "completionMode": "Indexed"}
        spec |= {"backoffLimit": shipment.settings.max_restarts * size, "template": template}
        jobs.append({"name": job, "replicas": 1, "template": {"spec": spec}})
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": shipment.name},
        "spec": {"network": network, "replicatedJobs": jobs},
    }
    return as_text(shipment, manifest)


def tfjob(shipment: Shipment) -> str:
    """A TFJob that is done when all workers are; the ps end by themselves, after the last checkpoint."""
    replicas: Fields = {}
    for job, size in sizes(shipment).items():
        template = pod(shipment, job, ("tensorflow", "tfjob-port"), [])  # the names that the operator looks for
        del template["spec"]["restartPolicy"]  # of the replicas here
        spec: Fields = {"replicas": size, "restartPolicy": "OnFailure", "template": template}
        replicas[{"ps": "PS", "worker": "Worker"}[job]] = spec
    restarts = shipment.settings.max_restarts * sum(sizes(shipment).values())
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": {"name": shipment.name},
        "spec": {
            "successPolicy": "AllWorkers",
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": restarts},
            "tfReplicaSpecs": replicas,
        },
    }
    return as_text(shipment, manifest)


FORMS = {"jobset": jobset, "tfjob": tfjob}


def sizes(shipment: Shipment) -> dict[str, int]:
    """How many pods each job has: of an elastic cluster all that there is room for, as the cluster can take them."""
    return {"ps": len(shipment.cluster.ps), "worker": len(shipment.cluster.workers)}


def pod(shipment: Shipment, job: str, names: tuple[str, str], environ: Sequence[Value]) -> dict[str, Fields]:
    """One task's pod, with the names of its container and port; files are mounted where its command looks for them."""
    command = ["paceline", "serve", *behaviour(shipment, job, f"{KEYS}/secret" if shipment.secret_file else None)]
    threads = [] if shipment.cpus is None else [{"name": "OMP_NUM_THREADS", "value": str(shipment.cpus)}]
    inside: Fields = {
        "name": names[0],
        "image": shipment.image,
        "workingDir": shipment.code,
        "command": [escaped(word) for word in command],
        "env": [*environ, *threads],
        "ports": [{"name": names[1], "containerPort": PORT, "protocol": "TCP"}],
        "resources": resources(shipment, job),
    }
    volumes: list[Value] = []
    mounts: list[Value] = []
    if shipment.claim:
        if shipment.code == shipment.results:
            raise UsageError("--run-dir is the folder of the code; on a volume it must be another one, such as result.")
        volumes.append({"name": "files", "persistentVolumeClaim": {"claimName": shipment.claim}})
        mounts.append({"name": "files", "mountPath": shipment.code, "subPath": "code"})
        mounts.append({"name": "files", "mountPath": shipment.results, "subPath": "result"})
    if shipment.secret_file:
        keys = {"secretName": shipment.secret_name, "defaultMode": READABLE_BY_OWNER}
        volumes.append({"name": "keys", "secret": keys})
        mounts.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    filled = {name: value for name, value in (inside | {"volumeMounts": mounts}).items() if value}
    spec: Fields = {"restartPolicy": "OnFailure", "containers": [filled]}
    return {"spec": spec | ({"volumes": volumes} if volumes else {})}


def resources(shipment: Shipment, job: str) -> Fields:
    """Cores for every task, and cards for the workers."""
    wanted: Fields = {}
    if shipment.cpus is not None:
        wanted["requests"] = {"cpu": str(shipment.cpus)}
    if shipment.gpus and job != "ps":
        wanted["limits"] = {"nvidia.com/gpu": shipment.gpus}
    return wanted


def escaped(text: str) -> str:
    """Text in which Kubernetes finds no variable: $(NAME) would be one, and two dollars are a dollar.

    >>> escaped("$(HOME)")
    '$$(HOME)'
    """
    return text.replace("$", "$$")


def as_text(shipment: Shipment, manifest: Mapping[str, Value]) -> str:
    """What to do first, as comments, and the file itself."""
    return "\n".join([*notes(shipment, str(manifest["kind"])), *yaml(manifest)])


def notes(shipment: Shipment, kind: str) -> list[str]:
    """What the reader must do first."""
    code = one_line(shipment.code)
    lines = [f"# {kind} {shipment.name}. Nothing was applied: kubectl apply -f FILE"]
    if shipment.claim:
        lines.append(
            f"# The volume of claim {shipment.claim} (ReadWriteMany) has two folders: code, with what pods see as"
        )
        lines.append(f"# {code}, and result, which becomes the run folder.")
    else:
        lines.append(
            f"# The image {shipment.image} has the script's folder as {code}. The run folder, with all checkpoints,"
        )
        lines.append("# ends with the pods; --claim NAME keeps it on a volume.")
    if shipment.secret_file is None:
        lines.append("# --insecure: whoever reaches a port can take part.")
        return lines
    files = {"secret": shipment.secret_file}
    if shipment.settings.tls:
        files |= {name: str(Path(shipment.secret_file).parent / name) for name in ("certificate.pem", "key.pem")}
    words = ["kubectl", "create", "secret", "generic", shipment.secret_name]
    words += [f"--from-file={name}={path}" for name, path in files.items()]
    return [*lines, f"# Its Secret, once: {one_line(shlex.join(words))}"]


def one_line(text: str) -> str:
    """A path in a comment, which a line break would end."""
    return text.replace("\n", " ").replace("\r", " ")


def yaml(value: Value, indent: str = "") -> list[str]:
    """The lines of a YAML file; strings are written as JSON, which YAML reads as it stands.

    >>> yaml({"a": [{"b": 1, "c": ["x"]}], "d": True})
    ['a:', '  - b: 1', '    c:', '      - "x"', 'd: true']
    """
    if isinstance(value, Mapping):
        lines = []
        for name, inner in value.items():
            if isinstance(inner, Mapping | list) and inner:
                lines += [f"{indent}{name}:", *yaml(inner, indent + "  ")]
            else:
                lines.append(f"{indent}{name}: {json.dumps(inner, ensure_ascii=False)}")
        return lines
    if isinstance(value, list):
        lines = []
        for inner in value:
            first, *rest = yaml(inner, indent + "  ")
            lines += [f"{indent}- {first.removeprefix(indent + '  ')}", *rest]
        return lines
    return [f"{indent}{json.dumps(value, ensure_ascii=False)}"]


def check_names(name: str, secret_name: str, claim: str) -> None:
    """Refuse what Kubernetes would not take as a name, or what makes a pod's name too long."""
    for flag, given in (("--secret-name", secret_name), ("--claim", claim or "none")):
        if not _SUBDOMAIN.fullmatch(given):
            raise UsageError(f"{flag} is {given!r}; Kubernetes takes small letters, digits, dashes and dots.")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name is {name!r}; Kubernetes takes up to 40 small letters, digits and dashes, such as mnist-2."
        )


def check_cards(gpus: str) -> None:
    """Refuse what only docker knows: a scheduler gives a number of cards, and chooses them."""
    if gpus and not _GPUS.fullmatch(gpus):
        raise UsageError(f"--gpus is {gpus!r}; a scheduler takes a number of cards for each worker, such as 1.")
