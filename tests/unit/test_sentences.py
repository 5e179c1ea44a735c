"""WHAT is a mistake told? One sentence, of what was given, in words that are true and that help."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from op_servers import Serving, serving

import paceline
from paceline.cli.main import main
from paceline.cli.run import hosts_or_count
from paceline.cluster.discovery import discover_as
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import ConnectionLost, UsageError
from paceline.ingraph import values
from paceline.ingraph.config import ConfigProto, GPUOptions
from paceline.ingraph.remote import Remote
from paceline.ingraph.together import Awaited
from paceline.launchers.demos import DEMOS
from paceline.launchers.ports import Reserved
from paceline.modes.spec import ModeSpec, check
from paceline.transport.channel import accept
from paceline.transport.tcp import TcpLane

__all__ = ["serving"]
A = {"a": ["localhost:1"]}


@pytest.fixture
def free_address() -> Iterator[str]:
    with Reserved() as ports:
        address = ports.addresses(1)[0]
        ports.before_start()
        yield address


def refusal(call: object) -> str:
    with pytest.raises(UsageError) as found:
        call()  # type: ignore[operator]
    return str(found.value)


def code_of(*words: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_nested_tensor_cannot_travel() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "a nested tensor cannot travel" in refusal(lambda: values.pack(nested))


@pytest.mark.parametrize("index", ["0", 0.0, True])
def test_a_task_index_is_a_whole_number(index: object) -> None:
    told = refusal(lambda: paceline.Server(A, job_name="a", task_index=index))  # type: ignore[arg-type]
    assert told == f"task_index is {index!r}; it must be a whole number, such as 0."


def test_an_index_of_numpy_is_one(serving: Serving) -> None:
    made = discover_as(A, "a", np.int64(0))  # type: ignore[arg-type]
    assert made.task == Task("a", 0) and type(made.task.index) is int


@pytest.mark.parametrize("job", [0, None, b"a"])
def test_a_job_is_named_by_a_string(job: object) -> None:
    two = {"a": ["localhost:1"], "b": ["localhost:2"]}
    assert "job_name" in refusal(lambda: paceline.Server(two, job_name=job, task_index=0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: ConfigProto(nosuch=1), "ConfigProto has no option 'nosuch'; valid: "),  # type: ignore[call-arg]
        (lambda: GPUOptions(alow_growth=True), "did you mean 'allow_growth'?"),  # type: ignore[call-arg]
        (
            lambda: ConfigProto(allow_soft_placement="maybe"),  # type: ignore[arg-type]
            "allow_soft_placement is 'maybe'; it must be True or False.",
        ),
        (
            lambda: GPUOptions(per_process_gpu_memory_fraction="x"),  # type: ignore[arg-type]
            "per_process_gpu_memory_fraction is 'x'; it must be a number.",
        ),
        (
            lambda: setattr(ConfigProto().gpu_options, "per_process_gpu_memory_fraction", "x"),
            "per_process_gpu_memory_fraction is 'x'; it must be a number.",
        ),
        (
            lambda: ConfigProto(operation_timeout_in_ms="3"),  # type: ignore[arg-type]
            "operation_timeout_in_ms is '3'; it must be a number.",
        ),
        (lambda: ConfigProto(gpu_options=1), "gpu_options is 1; it must be a GPUOptions."),  # type: ignore[arg-type]
    ],
)
def test_an_option_that_is_none_or_has_no_such_value_is_refused(made: object, told: str) -> None:
    assert told in refusal(made)


def test_the_options_of_tensorflows_programs_are_taken() -> None:
    config = ConfigProto(GPUOptions(True, np.float32(0.5)), allow_soft_placement=1, operation_timeout_in_ms=10)  # type: ignore[arg-type]
    assert config.allow_soft_placement is True and config.gpu_options.per_process_gpu_memory_fraction == 0.5
    assert ConfigProto(log_device_placement=None).log_device_placement is None


@pytest.mark.parametrize("image", ["", " ", "two words", "-v"])
@pytest.mark.parametrize("form", ["docker", "compose"])
def test_containers_need_the_name_of_an_image(
    form: str, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    script = tmp_path / "x.py"
    script.touch()
    assert code_of("emit", form, f"--image={image}", str(script)) == 2
    told = capsys.readouterr()
    assert f"--image is {image!r}; it must be the name of an image, such as paceline:latest." in told.err
    assert told.out == ""


# --- words ------------------------------------------------------------------------------------------------------------


def test_an_op_of_main_is_better_off_in_a_module(serving: Serving) -> None:
    serving.start(0)
    told = refusal(lambda: serving.client.remote(Task("worker", 0)).call("__main__:record"))
    assert told.startswith("Op '__main__:record' is not registered on /job:worker/replica:0/task:0, where")
    assert "put it into a module that both sides import" in told
    assert "must import '__main__'" not in told and "did you mean" not in told


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (ModeSpec(name="async", replicas_to_aggregate=2), "(or local with --outer sync), not async."),
        (
            ModeSpec(name="local", outer="async", grace_ms=2),
            "(or local with --outer sync), not local with --outer async.",
        ),
    ],
)
def test_a_number_of_rounds_in_a_mode_without(mode: ModeSpec, told: str) -> None:
    assert refusal(lambda: check(mode, 2)).endswith(told)


def test_an_empty_cluster_may_be_filled_with_any_job() -> None:
    told = refusal(lambda: ClusterSpec({}))
    assert told == 'The cluster is empty; it needs at least one job, such as {"worker": ["host:2222"]}.'


def test_an_evaluator_is_offered_only_where_there_are_parameters(serving: Serving) -> None:
    assert refusal(lambda: discover_as(A, "b", 0)).endswith("valid: a.")
    assert refusal(lambda: discover_as({**A, "ps": ["localhost:2"]}, "b", 0)).endswith("valid: a, ps, evaluator.")


def test_a_placeholder_that_is_fetched_itself_is_named_once() -> None:
    graph = paceline.Graph()
    x = graph.placeholder("x")
    told = refusal(lambda: paceline.Session(graph=graph).run(x))
    assert told == "Placeholder 'x' has no value; give session.run feed_dict={x: …}."


def test_lanes_are_offered_as_help_has_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.touch()
    assert code_of("run", "--lane=foo", "--dry-run", str(script)) == 2
    assert "Unknown lane 'foo'; valid: auto, shm, tcp, grpc." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "hosts", "told"),
    [
        ("workers", "a:1", "--workers is 3 but --worker_hosts has 1 address; leave out --workers."),
        ("ps", "a:1,b:1", "--ps is 3 but --ps_hosts has 2 addresses; leave out --ps."),
    ],
)
def test_a_number_that_is_not_that_of_the_addresses(flag: str, hosts: str, told: str) -> None:
    params = {"ps": 3, "workers": 3, "ps_hosts": hosts, "worker_hosts": hosts}
    assert refusal(lambda: hosts_or_count(flag, params, 1)) == told


def test_a_task_that_went_away_is_named_once(free_address: str) -> None:
    secret = b"s" * 32
    listener = TcpLane.listen(free_address)

    def leave() -> None:
        channel = accept(listener.accept(), secret)
        channel.recv()
        channel.close()
        listener.close()

    threading.Thread(target=leave, daemon=True).start()
    with pytest.raises(ConnectionLost) as found:
        Remote("/job:w/replica:0/task:1", free_address, secret, 5.0, "tcp").call("srv:quit")
    who = f"/job:w/replica:0/task:1 at {free_address}"
    assert str(found.value) == f"{who} went away while it ran srv:quit: it closed the connection"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: values.pack(object()), "; an object cannot travel there"),
        (lambda: values.pack({1}), "; a set cannot travel there"),
        (lambda: paceline.Session().run(1, feed_dict=1), "not an int"),  # type: ignore[arg-type]
        (lambda: ClusterSpec(1), "not an int"),  # type: ignore[arg-type]
        (lambda: paceline.device(1), "not an int"),  # type: ignore[arg-type]
    ],
)
def test_a_or_an(call: object, told: str) -> None:
    assert told in refusal(call)


def test_two_tasks_have_their_parts() -> None:
    missing = [Task("w", 1), Task("w", 0)]
    assert str(Awaited(timeout_s=1).over(2, missing)).endswith("task:0 have not ended their parts of the step")
    assert str(Awaited(timeout_s=1).over(2, missing[:1])).endswith("task:1 has not ended its part of the step")


def test_a_demo_that_was_given_arguments_does_not_advise_them() -> None:
    demo = DEMOS["autoencoder"]
    assert demo.advice(()).endswith("keep of each. Try -- --noise 0.5 (a row more), or -- --hidden 20.")
    for given in (("--noise", "0.5"), ("--noise=0.5",)):
        assert demo.advice(given).endswith("keep of each. Try -- --hidden 20.")
    assert demo.advice(("--hidden", "5", "--noise=0.5")).endswith("keep of each.")
