"""MAY these flags stand together, and do keys reach a task? --tls, --insecure, `paceline keys new`."""

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.cluster.discovery import Assignment, discover, encode_for_child
from paceline.cluster.secret import INSECURE, new_keys
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check
from paceline.errors import UsageError
from paceline.launchers.local import notes
from paceline.transport.security import Secret, keys_dir_of

SPEC = ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]})
FLAGS = ["--job_name=ps", "--task_index=0", "--ps_hosts=h:1", "--worker_hosts=h:2"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (Settings(run_id="r", tls=True, insecure=True), "--insecure there is none; leave one out"),
        (Settings(run_id="r", tls=True, lane="shm"), "take --lane auto or tcp"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(settings: Settings, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check(settings, SPEC)


def test_insecure_is_said_loudly() -> None:
    assert any(line.startswith("WARNING: --insecure") for line in notes(Settings(run_id="r", insecure=True), SPEC))
    assert not any("insecure" in line for line in notes(Settings(run_id="r"), SPEC))


def test_by_hand_the_keys_lie_beside_the_secret_and_reach_the_script(tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    found = discover(argv=[*FLAGS, f"--secret_file={tmp_path}/keys/secret", "--tls"], environ={}, script_dir="/nowhere")
    assert found is not None and keys_dir_of(found.secret) == tmp_path / "keys"
    again = discover(argv=[], environ=encode_for_child(found))
    assert again is not None and again.secret == found.secret and keys_dir_of(again.secret) == tmp_path / "keys"
    plain = discover(argv=[*FLAGS, f"--secret_file={tmp_path}/keys/secret"], environ={}, script_dir="/nowhere")
    assert plain is not None and keys_dir_of(plain.secret) is None  # keys that are there are not enough


def test_insecure_by_hand_needs_no_file() -> None:
    found = discover(argv=[*FLAGS, "--insecure"], environ={}, script_dir="/nowhere")
    assert found is not None and found.secret == INSECURE and found.settings.insecure


def test_what_knows_the_secret_does_not_print_it() -> None:
    secret = Secret(b"hunter2!" * 4)
    assignment = Assignment(SPEC, Task("ps", 0), 1, Settings(run_id="r"), secret, "flags")
    for shown in (repr(assignment), str(assignment), f"{assignment}"):
        assert "hunter2" not in shown and secret.hex() not in shown


def test_keys_new_says_where_they_are_and_not_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", str(tmp_path / "keys")])
    assert not ended.value.code
    said = capsys.readouterr().out
    secret = (tmp_path / "keys" / "secret").read_text().strip()
    assert f"--secret-file {tmp_path}/keys/secret --tls" in said and secret not in said
    with pytest.raises(SystemExit) as refused:
        main(["keys", "new", str(tmp_path / "keys")])
    assert refused.value.code == 2 and "is there already" in capsys.readouterr().err
