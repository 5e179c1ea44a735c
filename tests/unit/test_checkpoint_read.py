"""IS a checkpoint read back bit for bit, and is every other file refused with a sentence that names it?"""

import json
import math
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from small_checkpoint import STATE, filled, write_step

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.read import examine, find, load, load_newest, named, newest, verify
from paceline.checkpoint.state import State, decode, encode
from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import Entry, entries, header, values
from paceline.errors import CheckpointError

FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "ema.safetensors",
    "workers.safetensors",
    "state.json",
    "MANIFEST.json",
]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = write(tmp_path, filled(1), filled(2), STATE, averages=filled(3), workers=filled(4))
    loaded = load(folder)
    assert loaded.state == STATE
    assert loaded.path == folder
    for seed, read in enumerate((loaded.model, loaded.optimizer, loaded.averages, loaded.workers), start=1):
        assert read is not None
        assert list(read) == list(filled(seed))
        for name, wrote in filled(seed).items():
            assert (read[name].dtype, read[name].shape, read[name].data) == (wrote.dtype, wrote.shape, wrote.data)


def test_what_was_not_given_is_not_there(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, {}, {}, STATE))
    assert (loaded.model, loaded.optimizer, loaded.averages, loaded.workers) == ({}, {}, None, None)


def test_tensors_stay_readable_after_the_checkpoint_was_removed(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, filled(1), {}, STATE))
    write(tmp_path, filled(2), {}, STATE)
    assert loaded.model["float32"].data == filled(1)["float32"].data


def test_values_are_numbers() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80], dtype=np.uint16).tobytes()
    assert values(Entry("bfloat16", (3,), bits)).tolist() == [1.0, -2.0, math.inf]
    assert values(Entry("int64", (), (5).to_bytes(8, "little"))).item() == 5
    assert values(Entry("float32", (0, 3), b"")).shape == (0, 3)


def test_state_keeps_what_json_cannot_say() -> None:
    scheduler = {"best": math.inf, "worst": -math.inf, "milestones": {30: 1, 80: 2}, "deep": [{"a": {1: [math.inf]}}]}
    worker = msgspec.structs.replace(STATE.workers[0], schedulers=[scheduler, None])
    state = msgspec.structs.replace(STATE, workers=[worker], groups=[{"lr": 0.1 + 0.2, "eps": math.nan}])
    read = decode(encode(state))
    assert read.workers == [worker]
    assert read.groups[0]["lr"] == 0.1 + 0.2
    assert math.isnan(read.groups[0]["eps"])  # type: ignore[arg-type]


def test_a_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state.json cannot be written: .*object"):
        write(tmp_path, {}, {}, msgspec.structs.replace(STATE, groups=[{"lr": object()}]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("depth", [100, 900, 3_000, 100_000])
def test_a_state_that_is_nested_too_deep_is_refused(depth: int) -> None:
    """How deep is too deep is the Python's affair, and whether reading or unspelling finds it; never another error."""
    deep = encode(STATE).replace(b'"lr": 0.1', b'"lr": ' + b"[" * depth + b"]" * depth)
    try:
        groups = decode(deep).groups
    except CheckpointError as refused:
        assert str(refused).startswith("state.json: ") and depth > 100
    else:
        assert msgspec.json.encode(groups[0]["lr"]).count(b"[") == depth < sys.getrecursionlimit()


def test_fields_of_a_later_paceline_are_left_out_and_missing_ones_have_defaults() -> None:
    least = {
        "run_id": "r",
        "global_step": 1,
        "mode": {"name": "sync"},
        "optimizer": "SGD",
        "groups": [],
        "paceline": "9",
    }
    read = decode(json.dumps({**least, "novelty": [1]}).encode())
    assert isinstance(read, State)
    assert (read.lineage, read.workers, read.worker(0)) == (0, [], None)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_noticed_and_the_file_named(name: str, tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    last = write_step(tmp_path, 2)
    good = (last / name).read_bytes()
    for offset in sorted({*range(0, len(good), 37), *range(16), len(good) - 1}):
        for bit in (0, 5, 7):
            damaged = bytearray(good)
            damaged[offset] ^= 1 << bit
            (last / name).write_bytes(damaged)
            problems = verify(last)
            assert problems, (name, offset, bit)
            assert problems[0].startswith(f"{name}: "), problems
    warnings: list[str] = []
    loaded = load_newest(tmp_path, warnings.append)
    assert loaded is not None
    assert loaded.state.global_step == 1
    assert len(warnings) == 1
    assert f"{last} is damaged and left out: " in warnings[0]
    assert name in warnings[0]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_cut_is_noticed_without_hashing(name: str, tmp_path: Path) -> None:
    first, last = write_step(tmp_path, 1), write_step(tmp_path, 2)
    good = (last / name).read_bytes()
    for length in {*range(0, len(good), 61), len(good) - 1}:
        (last / name).write_bytes(good[:length])
        assert verify(last)[0].startswith(f"{name}: "), length
        warnings: list[str] = []
        assert newest(tmp_path, warnings.append) == first
        assert len(warnings) == 1
        assert name in warnings[0]
    (last / name).write_bytes(good + b" ")
    assert name == "MANIFEST.json" or newest(tmp_path) == first
    (last / name).unlink()
    assert newest(tmp_path) == first
    assert verify(last) == [f"{name}: it is missing."]


def test_the_newest_is_the_last_step_of_the_last_lineage(tmp_path: Path) -> None:
    for step, lineage in ((1, 0), (900, 0), (500, 1), (600, 1)):
        write_step(tmp_path, step, lineage=lineage)
    assert [found.global_step for found in find(tmp_path)] == [600, 500, 900, 1]
    assert newest(tmp_path) == tmp_path / "step-00000600"


def test_what_resume_may_name(tmp_path: Path) -> None:
    """A checkpoint, a checkpoints/ folder, a run folder."""
    older, newer = (write_step(tmp_path / "checkpoints", step) for step in (10, 20))
    assert named(older) == older
    assert named(tmp_path / "checkpoints") == named(tmp_path) == newer
    assert named(tmp_path / "nowhere") is None


def test_no_folder_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") is None
    assert load_newest(tmp_path) is None
    (tmp_path / "step-abc").mkdir()
    assert load_newest(tmp_path) is None
    (tmp_path / "step-00000001").mkdir()
    assert newest(tmp_path) is None


def test_when_all_are_damaged_nobody_starts_anew_by_accident(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = write_step(tmp_path, step)
        (folder / "model.safetensors").write_bytes(b"\0" * (folder / "model.safetensors").stat().st_size)
    (tmp_path / "step-00000003").mkdir()
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match="all 3 are damaged"):
        load_newest(tmp_path, warnings.append)
    assert len(warnings) == 3


def test_one_set_aside_counts_while_its_step_has_no_other(tmp_path: Path) -> None:
    folder = write_step(tmp_path, 5)
    aside = tmp_path / ".step-00000005.older"
    folder.rename(aside)
    assert newest(tmp_path) == aside
    write_step(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"], "swept back"
    assert newest(tmp_path) == folder


def test_a_newer_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_step(tmp_path, 1)
    (folder / "MANIFEST.json").write_text('{"format": 2, "pieces": {}}')
    assert verify(folder) == [
        "MANIFEST.json: format 2 was written by a newer paceline; this one reads format 1: upgrade it."
    ]
    with pytest.raises(CheckpointError, match="newer paceline"):
        load(folder)


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    write_step(tmp_path, 1).rename(tmp_path / "step-00000009")
    assert newest(tmp_path) is None
    assert verify(tmp_path / "step-00000009") == ["MANIFEST.json: it is of step 1, the folder is not."]


@pytest.mark.timeout(10)
def test_a_pipe_or_a_folder_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_step(tmp_path, 1)
    for name in ("model.safetensors", "MANIFEST.json"):
        good = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert verify(folder) == [f"{name}: it is not a plain file."]
        assert newest(tmp_path) is None
        (folder / name).unlink()
        (folder / name).write_bytes(good)
    assert verify(folder) == []


def doctored(**changes: object) -> bytes:
    """A manifest with other contents and the right hash of itself."""
    said = {"model.safetensors": (1, "0" * 64), "optimizer.safetensors": (1, "0" * 64), "state.json": (1, "0" * 64)}
    files = {name: manifests.FileHash(*f) for name, f in {**said, **changes}.items() if f}  # type: ignore[misc]
    return manifests.encode(manifests.made(1, 0, files))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "it is not the JSON"),
        (b"[]", "it is not the JSON"),
        (b"[" * 100_000, "it is not the JSON"),
        (b'{"format": "\xff"}', "it is not the JSON"),
        (b'{"format": -1}', "it is not the JSON"),
        (b'{"format": 0}', "there is no format 0"),
        (b'{"format": 1}', "it is not the JSON"),
        (doctored(**{"../../etc/passwd": (1, "0" * 64)}), "'../../etc/passwd' is no file of a checkpoint"),
        (doctored(**{"state.json": None}), "it does not list state.json"),
        (doctored().replace(b'"global_step": 1', b'"global_step": 2'), "its own hash differs"),
    ],
)
def test_malformed_manifests(content: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        manifests.decode(content)


def tensor_file(said: object, data: bytes = b"") -> memoryview:
    encoded = said if isinstance(said, bytes) else json.dumps(said).encode()
    return memoryview(len(encoded).to_bytes(8, "little") + encoded + data)


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (memoryview(b""), "0 bytes are too few"),
        (memoryview((1 << 63).to_bytes(8, "little") + b"{}"), "claims 9223372036854775808 bytes; at most"),
        (memoryview((99).to_bytes(8, "little") + b"{}"), "claims 99 bytes, but the file has 10"),
        (tensor_file(b"{"), "it is not the JSON"),
        (tensor_file(b'{"a":' * 50_000), "it is not the JSON"),
        (tensor_file([]), "it is not the JSON"),
        (tensor_file({"__metadata__": {"a": 1}}), "it is not the JSON"),
        (tensor_file({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "missing required field"),
        (tensor_file({"w": {**one()["w"], "code": "x"}}, bytes(8)), "unknown field"),  # type: ignore[dict-item]
        (tensor_file(one(dtype="F8_E4M3", offsets=(0, 2)), bytes(2)), "w is F8_E4M3; paceline reads F64"),
        (tensor_file(one(shape=(-2,)), bytes(8)), "it is not the JSON"),
        (tensor_file(one(shape=(2.5,)), bytes(8)), "it is not the JSON"),
        (tensor_file(one(shape=[1] * 65), bytes(8)), "it is not the JSON"),
        (tensor_file(one(shape=(1 << 40, 1 << 40)), bytes(8)), "needs 4835703278458516698824704 bytes"),
        (tensor_file(one(shape=(3,)), bytes(8)), "needs 12 bytes, its offsets give 8"),
        (tensor_file(one(offsets=(8, 0)), bytes(8)), "needs 8 bytes, its offsets give -8"),
        (tensor_file(one(offsets=(4, 12)), bytes(12)), "starts at byte 4 of the data, not at 0"),
        (tensor_file(one(), bytes(4)), "have 8 bytes, but 4 bytes of data are there"),
        (tensor_file(one(), bytes(9)), "have 8 bytes, but 9 bytes of data are there"),
        (tensor_file({**one(), "v": one()["w"]}, bytes(8)), "starts at byte 0 of the data, not at 8"),
    ],
)
def test_malformed_tensor_files(content: memoryview, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence) as refused:
        entries(content, "model.safetensors")
    assert str(refused.value).startswith("model.safetensors: ")


def test_a_well_formed_tensor_file_is_not_refused() -> None:
    said = entries(tensor_file(one(), bytes(8)), "model.safetensors")
    assert said == {"w": Entry("float32", (2,), bytes(8))}
    assert entries(memoryview(header({})), "model.safetensors") == {}


def test_a_linked_checkpoint_or_file_is_left_out_and_said(tmp_path: Path) -> None:
    whole = write_step(tmp_path / "elsewhere", 9)
    here = tmp_path / "here"
    good = write_step(here, 1)
    (here / "step-00000009").symlink_to(whole)
    (here / "step-00000010").symlink_to(tmp_path / "none")
    said: list[str] = []
    assert newest(here, said.append) == good
    assert len(said) == 1 and "step-00000009" in said[0] and "symbolic link" in said[0]
    loaded = load_newest(here)
    assert loaded is not None and loaded.path == good
    (whole / "model.safetensors").rename(tmp_path / "model")
    (whole / "model.safetensors").symlink_to(tmp_path / "model")
    assert "model.safetensors: it is a symbolic link" in verify(whole)[0]
    assert newest(tmp_path / "elsewhere") is None


def test_a_checkpoint_that_becomes_a_link_in_between_is_not_followed(tmp_path: Path) -> None:
    good = write_step(tmp_path / "here", 1)
    [found] = find(tmp_path / "here")
    good.rename(tmp_path / "step-00000001")
    good.symlink_to(tmp_path / "step-00000001")
    assert "symbolic link" in examine(found.path).problem


def test_the_user_may_name_a_link_to_a_checkpoint(tmp_path: Path) -> None:
    good = write_step(tmp_path, 1)
    (tmp_path / "best").symlink_to(good)
    assert named(tmp_path / "best") == good and load(tmp_path / "best").path == good
    assert verify(tmp_path / "best") == []
