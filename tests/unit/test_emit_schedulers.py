"""WHAT is emitted for schedulers? Read back as they would read it: YAML by the public models, scripts by a shell."""

import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from paceline.cli.main import main
from paceline.cluster.discovery import discover

pytestmark = pytest.mark.usefixtures("folder")
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    code = tmp_path / "my code"
    code.mkdir()
    (code / "train.py").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(code)
    return code


def emitted(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["emit", *words])
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    return told.out if code == 0 else told.err


def jobset(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JobSet, which the public model takes without leaving a field out."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    manifest = yaml.safe_load(emitted(capsys, "jobset", *words))
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    return manifest


def tfjob(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The TFJob, which Kubeflow's own model takes without leaving a field out."""
    manifest = yaml.safe_load(emitted(capsys, "tfjob", *words))
    assert as_kubeflow_reads(manifest) == manifest
    replicas = manifest["spec"]["tfReplicaSpecs"]
    assert set(replicas) <= {"PS", "Worker", "Chief", "Master", "Evaluator"}  # for the model any text is well
    assert all(each["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode") for each in replicas.values())
    return manifest


def as_kubeflow_reads(manifest: dict[str, Any]) -> object:
    """Through KubeflowOrgV1TFJob and back: what it does not know is lost on the way."""
    from kubeflow.training.api_client import ApiClient

    with ApiClient() as client:
        read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1TFJob")
        return client.sanitize_for_serialization(read)


def jobs(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {job["name"]: job["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["template"]["spec"]["containers"]
    return only


def test_a_jobset_has_names_that_are_known_before(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = jobset(capsys, "--name", "mnist", "--ps", "2", "--workers", "3", "train.py")
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert manifest["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": "mnist",
        "publishNotReadyAddresses": True,
    }
    for job, size in (("ps", 2), ("worker", 3)):
        spec = jobs(manifest)[job]
        assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (size, size, "Indexed")
        index, config = container(spec)["env"]
        assert index == {"name": "JOB_COMPLETION_INDEX", "valueFrom": INDEX}, "before the one that uses it"
        parsed = json.loads(config["value"].replace("$(JOB_COMPLETION_INDEX)", "1"))
        assert parsed["task"] == {"type": job, "index": 1}
        assert parsed["cluster"]["ps"] == [f"mnist-ps-0-{i}.mnist:2222" for i in range(2)]
        assert parsed["cluster"]["worker"] == [f"mnist-worker-0-{i}.mnist:2222" for i in range(3)]


def test_a_tfjob_leaves_tf_config_to_its_operator(capsys: pytest.CaptureFixture[str]) -> None:
    spec = tfjob(capsys, "--ps", "2", "--workers", "3", "--max-restarts", "1", "train.py")["spec"]
    assert [(name, each["replicas"]) for name, each in spec["tfReplicaSpecs"].items()] == [("PS", 2), ("Worker", 3)]
    assert spec["successPolicy"] == "AllWorkers", "not when the chief alone is done"
    assert spec["runPolicy"] == {"cleanPodPolicy": "None", "backoffLimit": 5}, "the ps save before they end"
    for replica in spec["tfReplicaSpecs"].values():
        one = container(replica)
        assert one["name"] == "tensorflow" and one["ports"] == [
            {"name": "tfjob-port", "containerPort": 2222, "protocol": "TCP"}
        ]
        assert "env" not in one and one["command"][:2] == ["paceline", "serve"]


@pytest.mark.parametrize(
    "place", ["spec", "spec.runPolicy", "spec.tfReplicaSpecs.PS", "spec.tfReplicaSpecs.PS.template"]
)
def test_kubeflow_has_no_other_fields(capsys: pytest.CaptureFixture[str], place: str) -> None:
    manifest = inner = tfjob(capsys, "train.py")
    for name in place.split("."):
        inner = inner[name]
    inner["unheardOf"] = 1
    assert as_kubeflow_reads(manifest) != manifest


@pytest.mark.parametrize("form", ["jobset", "tfjob"])
def test_what_pods_are_given(capsys: pytest.CaptureFixture[str], folder: Path, form: str) -> None:
    words = [
        "--code",
        "/app",
        "--claim",
        "shared",
        "--cpus",
        "4",
        "--gpus",
        "1",
        "--image",
        "me/mine:1",
        "--mode",
        "sync",
    ]
    words += ["--resume", "before", "train.py", "a b", "$(HOME)", "$$", "ü"]
    if form == "jobset":
        pods = [job["template"]["spec"] for job in jobs(jobset(capsys, *words)).values()]
    else:
        pods = [each["template"]["spec"] for each in tfjob(capsys, *words)["spec"]["tfReplicaSpecs"].values()]
    for pod in pods:
        (one,) = pod["containers"]
        assert (one["image"], one["workingDir"]) == ("me/mine:1", "/app")
        assert [(mount["mountPath"], mount.get("subPath")) for mount in one["volumeMounts"]] == [
            ("/app", "code"),
            ("/app/result", "result"),
            ("/etc/paceline/keys", None),
        ]
        assert pod["volumes"][1] == {"name": "keys", "secret": {"secretName": "paceline", "defaultMode": 0o400}}
        assert {"name": "OMP_NUM_THREADS", "value": "4"} in one["env"]
        flags = ["--mode", "sync", "--resume", "/app/before", "--run-dir=/app/result"]
        assert one["command"][2:8] == [*flags, "--secret-file=/etc/paceline/keys/secret"]
    ps, worker = (pod["containers"][0] for pod in pods)
    assert worker["command"][8:] == ["/app/train.py", "a b", "$$(HOME)", "$$$$", "ü"] and len(ps["command"]) == 8
    assert worker["resources"] == {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "1"}}
    assert ps["resources"] == {"requests": {"cpu": "4"}}


@pytest.mark.parametrize("form", ["jobset", "tfjob", "sbatch", "env"])
def test_no_secret_is_in_the_text(capsys: pytest.CaptureFixture[str], form: str, tmp_path: Path) -> None:
    text = emitted(capsys, form, "train.py")
    path = tmp_path / "config" / "paceline" / "secret"
    assert path.read_text().strip() not in text and str(path) in text
    comment = "kubectl create secret generic paceline --from-file=secret=" in text
    assert comment == (form in ("jobset", "tfjob"))
    insecure = emitted(capsys, form, "--insecure", "train.py")
    assert "secret-file" not in insecure and "kubectl create" not in insecure and "--insecure" in insecure


def test_with_tls_the_secret_has_the_certificate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "new", str(tmp_path / "keys")])
    capsys.readouterr()
    text = emitted(capsys, "jobset", "--tls", "--secret-file", str(tmp_path / "keys" / "secret"), "train.py")
    (line,) = [line for line in text.splitlines() if "kubectl create secret" in line]
    words = shlex.split(line.partition(": ")[2])
    assert [word.partition("=")[2].partition("=")[0] for word in words[5:]] == ["secret", "certificate.pem", "key.pem"]
    assert all(Path(word.rpartition("=")[2]).is_file() for word in words[5:])


def test_an_elastic_cluster_begins_with_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    spec = jobs(jobset(capsys, "--workers", "2:5", "train.py"))["worker"]
    assert spec["completions"] == 5 and "--workers=2:5" in container(spec)["command"]


def test_an_sbatch_has_two_parts(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    flags = ["--ps", "2", "--workers", "3", "--cpus", "4", "--gpus", "1", "--name", "mnist"]
    text = emitted(capsys, "sbatch", *flags, "--mode", "sync", "train.py", "it's", "$HOME")
    assert subprocess.run(["bash", "-n"], input=text, text=True, timeout=120).returncode == 0
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=mnist --output=mnist-%j.txt",
        "#SBATCH --ntasks=2 --cpus-per-task=4",
        "#SBATCH hetjob",
        "#SBATCH --ntasks=3 --cpus-per-task=4 --gpus-per-task=1",
    ]
    ps, worker = parts(text)
    assert ps[-5:-2] == ["serve", "--mode", "sync"] and f"--run-dir={folder}/result" in ps
    assert worker[-3:] == [str(folder / "train.py"), "it's", "$HOME"]
    assert "export OMP_NUM_THREADS=4" in lines and f"cd '{folder}'" in lines


def parts(text: str) -> tuple[list[str], list[str]]:
    """The words of srun's two parts."""
    words = shlex.split(text[text.index("srun ") :].replace("\\\n", " "))
    cut = words.index(":")
    return words[:cut], words[cut + 1 :]


def test_env_has_every_tasks_lines(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    text = emitted(capsys, "env", "--ps-hosts", "a:1", "--worker-hosts", "b:1,c:1", "--cpus", "2", "train.py", "it's")
    (folder / "cluster.sh").write_text(text)
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "paceline").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS"\necho "$TF_CONFIG"\nprintf "%s\\n" "$@"\n')
    (bin_ / "paceline").chmod(0o755)

    def task(*name: str) -> "subprocess.CompletedProcess[str]":
        environ = {"PATH": f"{bin_}:/usr/bin:/bin"}
        return subprocess.run(["sh", "cluster.sh", *name], capture_output=True, text=True, env=environ, timeout=120)

    threads, config, *words = task("worker-1").stdout.splitlines()
    assert threads == "2" and words[0] == "serve" and words[-2:] == [str(folder / "train.py"), "it's"]
    found = discover(argv=[], environ={"TF_CONFIG": config, "XDG_CONFIG_HOME": str(folder)}, script_dir=folder)
    assert found is not None and str(found.task) == "worker:1" and found.cluster.job_tasks("ps") == ["a:1"]
    assert json.loads(task("ps-0").stdout.splitlines()[1])["task"] == {"type": "ps", "index": 0}
    for wrong in ([], ["worker-2"]):
        assert task(*wrong).returncode == 2 and "sh cluster.sh ps-0|worker-0|worker-1" in task(*wrong).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["jobset", "--name", "My_Job", "train.py"], "--name is 'My_Job'; Kubernetes takes"),
        (["jobset", "--name", "a" * 41, "train.py"], "up to 40"),
        (["tfjob", "--claim", "x y", "train.py"], "--claim is 'x y'"),
        (["tfjob", "--secret-name", "", "train.py"], "--secret-name is ''"),
        (["jobset", "--gpus", "all", "train.py"], "a number of cards for each worker"),
        (["jobset", "--chaos", "kill=ps:0@5", "train.py"], "--chaos is for `paceline run`"),
        (["tfjob", "--image", "two words", "train.py"], "--image is 'two words'"),
        (["sbatch", "--gpus", "device=0", "train.py"], "a number of cards"),
        (["sbatch", "--name", "a;b", "train.py"], "--name is 'a;b'"),
        (["sbatch", "--cpus", "0", "train.py"], "--cpus is 0"),
        (["sbatch", "train.py", ":"], "another part for srun"),
        (["sbatch", "nothing.py"], "no script nothing.py"),
        (["env", "--ps-hosts", "a:1", "train.py"], "both --ps_hosts and --worker_hosts"),
        (["env", "--mode", "snyc", "train.py"], "did you mean 'sync'"),
        (["jobset", "--ps", "0", "train.py"], "at least 1"),
        (["tfjob", "--claim", "shared", "--run-dir", ".", "train.py"], "--run-dir is the folder of the code"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    told = emitted(capsys, *words, code=2)
    assert said in told and told.count("\n") == 1
