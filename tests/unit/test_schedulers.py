"""WHAT does a scheduler say? Who is who under each, when it does not count, and what is refused with a sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.main import main
from paceline.cluster.discovery import discover, look_everywhere
from paceline.cluster.schedulers import SCHEDULERS, ask, look
from paceline.cluster.spec import Task
from paceline.errors import UsageError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
JOBSET = {
    "JOBSET_NAME": "mnist",
    "REPLICATED_JOB_NAME": "worker",
    "JOB_COMPLETION_INDEX": "1",
    "PACELINE_PS": "1",
    "PACELINE_WORKERS": "2",
}
STEP = {
    "SLURM_JOB_ID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "host[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_DISTRIBUTION": "block",
}
# Of a heterogeneous job of Slurm 22.05, as its tasks saw it: 1 task on host02, 2 on host01.
HET = {
    **STEP,
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "host[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "1,2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "host02",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "host01",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2",
}


def found(environ: dict[str, str]) -> tuple[str, str, dict[str, list[str]]]:
    last = look(environ)[-1]
    assert last.cluster is not None, last.why
    return last.source, str(last.task), last.cluster.as_dict()


def test_torchrun() -> None:
    cluster = {"ps": ["a:30240"], "worker": ["a:30241", "host1.invalid:30240", "host1.invalid:30241"]}
    assert found(TORCHRUN) == ("torchrun", "worker:0", cluster)
    assert found({**TORCHRUN, "RANK": "0", "PACELINE_PORT": "5000"})[1:] == (
        "ps:0",
        {"ps": ["a:5000"], "worker": ["a:5001", "host1.invalid:5000", "host1.invalid:5001"]},
    )
    assert found({**TORCHRUN, "PACELINE_PS": "2"})[1] == "ps:1"
    with pytest.raises(UsageError, match="1 of the first 3 are elsewhere; use a smaller PACELINE_PS"):
        look({**TORCHRUN, "PACELINE_PS": "3"})
    with pytest.raises(UsageError, match="unequal numbers"):
        look({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"})


def test_mpi() -> None:
    local = {"ps": ["127.0.0.1:2222"], "worker": ["127.0.0.1:2223", "127.0.0.1:2224"]}
    assert found(OPEN_MPI) == ("MPI", "worker:1", local)
    assert found(HYDRA)[:2] == ("MPI", "ps:0")
    apart = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match="where process 0 is; add -x MASTER_ADDR=HOST"):
        look(apart)
    assert found({**apart, "MASTER_ADDR": "b"})[2]["ps"] == ["b:2222"]
    assert found({**OPEN_MPI, "MASTER_ADDR": "fd00::1"})[2]["ps"] == ["[fd00::1]:2222"]


def test_jobset() -> None:
    cluster = {"ps": ["mnist-ps-0-0.mnist:2222"], "worker": [f"mnist-worker-0-{i}.mnist:2222" for i in (0, 1)]}
    assert found(JOBSET) == ("JobSet", "worker:1", cluster)
    assert found({**JOBSET, "JOBSET_SUBDOMAIN": "net"})[2]["ps"] == ["mnist-ps-0-0.net:2222"]
    with pytest.raises(UsageError, match="set PACELINE_PS and PACELINE_WORKERS"):
        look({name: value for name, value in JOBSET.items() if name != "PACELINE_WORKERS"})
    with pytest.raises(UsageError, match="one replica"):
        look({**JOBSET, "JOB_INDEX": "1"})
    assert "neither ps nor worker" in ask("JobSet", {**JOBSET, "REPLICATED_JOB_NAME": "driver"}).why
    assert "an indexed Job, but" in ask("JobSet", {"JOB_COMPLETION_INDEX": "1"}).why


def test_a_slurm_step() -> None:
    cluster = {"ps": ["host01:20256"], "worker": ["host01:20257", "host02:20256", "host02:20257"]}
    assert found(STEP) == ("Slurm", "worker:1", cluster)
    cyclic = {"ps": ["host01:20256", "host02:20256"], "worker": ["host01:20257", "host02:20257"]}
    assert found({**STEP, "SLURM_DISTRIBUTION": "cyclic:cyclic", "PACELINE_PS": "2"})[2] == cyclic
    with pytest.raises(UsageError, match="use --distribution=block"):
        look({**STEP, "SLURM_DISTRIBUTION": "plane"})
    with pytest.raises(UsageError, match="has 2 hosts, but SLURM_STEP_TASKS_PER_NODE has 1"):
        look({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4"})


def test_the_first_part_of_a_heterogeneous_job_is_ps() -> None:
    cluster = {"ps": ["host02:20256"], "worker": ["host01:20256", "host01:20257"]}
    assert found(HET) == ("Slurm", "worker:1", cluster)
    two = {**HET, "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2", "SLURM_STEP_NUM_TASKS": "4"}
    assert found({**two, "SLURM_PROCID": "1"})[1:] == (
        "ps:1",
        {"ps": ["host02:20256", "host02:20257"], "worker": ["host01:20256", "host01:20257"]},
    )
    one_part = {**HET, "SLURM_STEP_NODELIST": "host01", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    assert found({**one_part, "SLURM_STEP_NUM_TASKS": "2"})[1] == "worker:0", "a step of one part is like any other"


def test_what_runs_inside_comes_first() -> None:
    assert found({**STEP, **TORCHRUN})[0] == "torchrun"
    assert found({**STEP, **OPEN_MPI})[0] == "MPI"
    assert found({**STEP, "PMI_RANK": "2", "PMI_SIZE": "4"})[0] == "Slurm", "srun --mpi=pmi2 says the same twice"
    assert found({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})[0] == "MPI"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "host[01-02]"},  # salloc's shell
        {"SLURM_JOB_ID": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # sbatch's script
        {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "host01",
         "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS": "4"},  # srun --pty bash
        {"RANK": "captain", "WORLD_SIZE": "big", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"JOB_COMPLETION_INDEX": "3"},
        *({**environ, "PACELINE_PS": "0"} for environ in (TORCHRUN, OPEN_MPI, JOBSET, STEP, HET)),
        {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PACELINE_PS": "0"},
    ],
)  # fmt: skip
def test_nobody_becomes_a_cluster_by_surprise(environ: dict[str, str], tmp_path: Path) -> None:
    looks = look(environ)
    assert [each.source for each in looks] == list(SCHEDULERS) and not any(each.task for each in looks)
    assert discover(argv=[], environ={**environ, "XDG_CONFIG_HOME": str(tmp_path)}, script_dir=tmp_path) is None
    assert not list(tmp_path.iterdir()), "no secret is made for a process that trains alone"


def test_schedulers_come_last_and_say_why(tmp_path: Path) -> None:
    environ = {**TORCHRUN, "XDG_CONFIG_HOME": str(tmp_path)}
    by_torchrun = discover(argv=[], environ=environ, script_dir=tmp_path)
    assert by_torchrun is not None and by_torchrun.task == Task("worker", 0)
    assert by_torchrun.source == "torchrun: process 1 of 4 (RANK, WORLD_SIZE); the first is ps"
    config = {"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"type": "worker", "index": 0}}
    by_config = discover(argv=[], environ={**environ, "TF_CONFIG": json.dumps(config)}, script_dir=tmp_path)
    assert by_config is not None and by_config.source == "TF_CONFIG"


def test_a_job_that_the_scheduler_contradicts_is_refused(tmp_path: Path) -> None:
    environ = {**TORCHRUN, "XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(UsageError, match="--job_name is ps, but by torchrun this is worker:0"):
        discover(argv=["--job_name=ps"], environ=environ, script_dir=tmp_path)
    for fitting in ("worker", "my_own"):
        assert discover(argv=[f"--job_name={fitting}"], environ=environ, script_dir=tmp_path) is not None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"PACELINE_PS": "4"}, "leave one for a worker"),
        ({"PACELINE_PS": "one"}, "PACELINE_PS is 'one'; it must be a whole number"),
        ({"PACELINE_PORT": "high"}, "PACELINE_PORT is 'high'"),
        ({"RANK": "4"}, "numbers go from 0 to 3"),
    ],
)
def test_what_is_refused(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        look({**TORCHRUN, **change})


@given(
    st.integers(2, 12),
    st.integers(1, 4),
    st.integers(1, 11),
    st.sampled_from(["block", "cyclic"]),
    st.integers(0, 9999),
)
def test_every_task_of_a_step_sees_the_same_cluster(hosts: int, each: int, num_ps: int, how: str, job: int) -> None:
    size = hosts * each
    step = {
        **STEP,
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": f"h[1-{hosts}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{hosts})",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_DISTRIBUTION": how,
        "PACELINE_PS": str(min(num_ps, size - 1)),
    }
    looks = [ask("Slurm", {**step, "SLURM_PROCID": str(number)}) for number in range(size)]
    assert len({look.cluster for look in looks}) == 1
    cluster = looks[0].cluster
    assert cluster is not None and [look.task for look in looks] == [*cluster.ps, *cluster.workers]


@given(st.dictionaries(st.sampled_from([*TORCHRUN, *OPEN_MPI, *HYDRA, *JOBSET, *HET]), st.text(max_size=12)))
def test_any_environment_is_a_place_or_a_sentence(environ: dict[str, str]) -> None:
    for base in ({}, TORCHRUN, OPEN_MPI, JOBSET, HET):
        try:
            look({**base, **environ})
        except UsageError as error:
            assert str(error).count("\n") == 0 or "\n" in "".join(environ.values())


# --- paceline env --------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["env", *words])
    told = capsys.readouterr()
    assert ended.value.code == code, told.err
    return told.out


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in (*TORCHRUN, *OPEN_MPI, *HYDRA, *JOBSET, *HET, "TF_CONFIG", "PACELINE_TASK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_env_without_a_cluster(capsys: pytest.CaptureFixture[str], alone: pytest.MonkeyPatch) -> None:
    text = shown(capsys)
    assert text.startswith("No cluster was found: a script started here trains alone")
    told = json.loads(shown(capsys, "--json"))
    assert told["found_by"] is told["cluster"] is told["refused"] is None
    assert [each["source"] for each in told["looked_at"]] == [
        "launcher",
        "flags",
        "settings.py",
        "TF_CONFIG",
        *SCHEDULERS,
    ]
    assert not Path("config").exists()


def test_env_says_who_and_why(capsys: pytest.CaptureFixture[str], alone: pytest.MonkeyPatch) -> None:
    for name, value in HET.items():
        alone.setenv(name, value)
    lines = shown(capsys).splitlines()
    assert lines[:3] == [
        "Found by: Slurm: task 2 of 3 of step 4.0; the first is ps",
        "This task: worker:1 at host01:20257",
        "Cluster: job ps -> {0 -> host02:20256}",
    ]
    assert lines[-1] == "  Slurm        used: task 2 of 3 of step 4.0; the first is ps"
    flags = shown(capsys, "--job_name=ps", "--ps_hosts=a:1", "--worker-hosts=b:1")
    assert "Found by: flags" in flags and "but flags comes first" in flags
    Path("settings.py").write_text("ps_svrs = ['a:1']\nworker_svrs = ['b:1']\n")
    assert "Found by: settings.py" in shown(capsys, "--job_name=ps", "train.py")
    assert json.loads(shown(capsys, "--json"))["task"] == "worker:1"


def test_env_shows_a_refusal_and_no_secret(capsys: pytest.CaptureFixture[str], alone: pytest.MonkeyPatch) -> None:
    alone.setenv("TF_CONFIG", "{")
    assert shown(capsys, code=2).startswith("A task that is started like this is refused.")
    assert "not JSON" in json.loads(shown(capsys, "--json", code=2))["refused"]
    secret = "ab" * 32
    alone.setenv("PACELINE_SECRET", secret)
    task = {"cluster": {"ps": ["h:1"], "worker": ["h:2"]}, "task": {"job": "ps", "index": 0}, "incarnation": 1}
    alone.setenv("PACELINE_TASK", json.dumps({**task, "settings": {"run_id": "r"}}))
    text = shown(capsys) + shown(capsys, "--json")
    assert "Found by: launcher" in text and secret not in text


def test_looking_asks_all(tmp_path: Path) -> None:
    looks = {each.source: each for each in look_everywhere([], {**TORCHRUN, **STEP}, tmp_path)}
    assert looks["torchrun"].task == Task("worker", 0) and looks["Slurm"].task == Task("worker", 1)


@pytest.mark.parametrize("flags", [["--job_name=worker"], ["--job_name", "mine", "--task_index", "1"]])
def test_env_refuses_what_serve_refuses(flags: list[str], tmp_path: Path) -> None:
    looks = {each.source: each for each in look_everywhere(flags, {}, tmp_path)}
    assert looks["flags"].is_refused and "names a task but no cluster was found" in looks["flags"].why
    assert not any(each.is_refused for each in look_everywhere(["--job_name=mine"], {}, tmp_path)), "the script's own"
