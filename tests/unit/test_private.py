"""No key leaves with the user's folder: by tar, by rsync and by Ray, whose own code says what it would copy."""

import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cluster.hosts import Host
from paceline.launchers.hosts import syncing
from paceline.launchers.private import for_rsync, private_below
from paceline.launchers.ray.on_ray import runtime_env

RUN = ("cluster.json", "secret", "logs/ps-0.log")
KEYS = ("secret", "certificate.pem", "key.pem")
RUNS = (
    "result",
    "out/exp1",
    "a/b/c/deep",
    "run[1]",
    "out/what?",
    "out/star*",
    "back\\slash",
    "back\\[x]",
    "two  ",
    "#1",
)
OTHERS = (
    "other/cluster.json",
    "other/config.json",
    "other/telemetry/ps-0.jsonl",
    "other/model.bin",
)  # a run whose secret is elsewhere
CODE = {
    "train.py", "lib/a.py", "lib/cluster.json", "lib/certificate.pem", "run1/b.py", "out/stars/c.py", "secrets/d.py",
    "web/key.pem", "mine/train.py", "mine/cluster.json", "lib/secret/e.py", "tuned/cluster.json", "tuned/config.json",
    "tuned/models/f.py",
}  # fmt: skip


def made(folder: Path) -> Path:
    """A project with code, run folders, keys of its own and, in `mine`, a script in its own run folder."""
    runs = [f"{run}/{name}" for run in RUNS for name in RUN]
    keys = [f"{below}{name}" for below in ("", "conf/keys/") for name in KEYS]
    for name in [*CODE, *runs, *keys, "mine/secret", "tls/key.pem", "tls/certificate.pem", "runs/r1/secret", *OTHERS]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("0")
    return folder


def by_tar(source: Path, _: Path) -> set[str]:
    packed = io.BytesIO()
    syncing.pack(source, packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        return {member.name.removeprefix("./") for member in tar if member.isfile()}


def by_rsync(source: Path, there: Path) -> set[str]:
    if shutil.which("rsync") is None:
        pytest.skip("there is no rsync here")
    there.mkdir()
    here = Host(name="localhost", target="localhost")
    assert syncing.copy(source, syncing.Way(here, syncing.RSYNC, str(there)), []) == ""
    return {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}


def by_ray(source: Path, _: Path) -> set[str]:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    excludes = runtime_env(source)["excludes"]
    copied: list[Path] = []
    packaging._dir_travel(source, [packaging._get_excludes(source, excludes)], copied.append, include_gitignore=True)
    return {path.relative_to(source).as_posix() for path in copied if path.is_file()}


WAYS = pytest.mark.parametrize("way", [by_tar, by_rsync, by_ray])
Way = Callable[[Path, Path], set[str]]


@WAYS
def test_run_folders_and_keys_stay_at_any_depth_and_by_any_name(way: Way, tmp_path: Path) -> None:
    assert way(made(tmp_path / "project"), tmp_path / "there") == CODE


@WAYS
def test_links_take_no_keys_along(way: Way, tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    made(elsewhere)
    source.mkdir()
    (source / "train.py").touch()
    (source / "linked").symlink_to(elsewhere / "conf")
    (source / "itself").symlink_to("itself")
    assert {name for name in way(source, tmp_path / "there") if "/" in name} == set()


@WAYS
def test_links_in_a_circle_end_and_take_no_keys_along(way: Way, tmp_path: Path) -> None:
    source = made(tmp_path / "project")
    (source / "lib" / "back").symlink_to(source)
    assert way(source, tmp_path / "there") - CODE <= {"lib/back"}  # the link itself


def test_what_is_not_copied_is_not_searched(tmp_path: Path) -> None:
    made(tmp_path)
    for name in ("lib/runs", ".venv-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").touch()
    assert "runs/r1/secret" in private_below(tmp_path)
    assert not [path for path in private_below(tmp_path, ("runs", ".venv*")) if "runs" in path or ".venv" in path]
    assert "lib/runs/secret" in private_below(tmp_path, ("/runs",))
    assert "runs/r1/secret" not in private_below(tmp_path, ("/runs",))


def test_a_pattern_begins_at_the_folder() -> None:
    assert for_rsync("secret") == "/secret"
