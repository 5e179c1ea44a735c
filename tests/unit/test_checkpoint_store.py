"""IS a checkpoint what the safetensors library reads? Its files, their hashes, and that it is there whole or not."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoint import STATE, filled

from paceline.checkpoint import store
from paceline.checkpoint.read import verify
from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import Entry, in_c_order
from paceline.errors import CheckpointError
from paceline.params.layout import TensorSpec
from paceline.views import NAMES, as_bytes


def entry(tensor: torch.Tensor) -> Entry:
    """As a worker does it: the tensor's memory, and how it lies there."""
    spec = TensorSpec("t", tuple(tensor.shape), tensor.stride(), NAMES[tensor.dtype])
    size = tensor.numel()
    return in_c_order(spec, as_bytes(torch.as_strided(tensor, (size,), (1,))) if size else memoryview(b""))


def some_tensors() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 4, 5, generator=dice)
    return {
        "float32": torch.randn(7, 3, generator=dice),
        "float64": torch.randn(5, generator=dice, dtype=torch.float64),
        "float16": torch.randn(9, generator=dice).half(),
        "bfloat16": torch.randn(3, 5, generator=dice).bfloat16(),
        "transposed": torch.randn(4, 6, generator=dice).t(),
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last bfloat16": image.bfloat16().to(memory_format=torch.channels_last),
        "int64": torch.tensor(123456789012),
        "int32": torch.arange(4, dtype=torch.int32),
        "int16": torch.arange(3, dtype=torch.int16),
        "int8": torch.arange(5, dtype=torch.int8) - 2,
        "uint8": torch.arange(6, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
    }


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = some_tensors()
    assert tensors["channels_last"].stride() != torch.empty(2, 3, 4, 5).stride()
    folder = write(tmp_path, {n: entry(t) for n, t in tensors.items()}, {}, STATE)
    read = load_file(folder / "model.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        assert torch.equal(read[name], tensor), name
    assert load_file(folder / "optimizer.safetensors") == {}


def test_names_with_odd_characters(tmp_path: Path) -> None:
    names = ['a"b\\c', "schicht.größe", "x/y", "layer.0.weight"]
    folder = write(tmp_path, {n: entry(torch.tensor([float(i)])) for i, n in enumerate(names)}, {}, STATE)
    assert {n: t.item() for n, t in load_file(folder / "model.safetensors").items()} == dict(
        zip(names, range(4), strict=True)
    )


def test_what_lies_in_c_order_is_not_copied() -> None:
    memory = bytearray(24)
    whole = in_c_order(TensorSpec("w", (2, 3), (3, 1), "float32", 0), memoryview(memory))
    turned = in_c_order(TensorSpec("w", (3, 2), (1, 3), "float32", 0), memoryview(memory))
    memory[:] = b"x" * 24
    assert whole.data == b"x" * 24
    assert turned.data == bytes(24)


def test_every_file_is_in_the_manifest_with_its_hash(tmp_path: Path) -> None:
    folder = write(tmp_path, filled(1), filled(2), STATE, averages=filled(3), workers=filled(4))
    assert folder == tmp_path / "step-00001200"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert (manifest["format"], manifest["global_step"], manifest["lineage"]) == (1, 1200, 2)
    tensors = ["ema.safetensors", "model.safetensors", "optimizer.safetensors", "workers.safetensors"]
    assert sorted(manifest["files"]) == [*tensors[:3], "state.json", tensors[3]]
    assert sorted([*manifest["files"], "MANIFEST.json"]) == sorted(f.name for f in folder.iterdir())
    for name, said in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert said == {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_state_is_json_that_says_where_training_was(tmp_path: Path) -> None:
    state = json.loads((write(tmp_path, {}, {}, STATE) / "state.json").read_text())
    assert (state["global_step"], state["mode"]["name"], state["optimizer"]) == (1200, "sync", "Adam")
    assert state["groups"] == [{"lr": 0.1, "betas": [0.9, 0.999]}]
    assert state["shards"][0]["applied"] == {"0": [1, 600], "1": [65537, 599]}


def test_a_step_is_written_again_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, {"old": entry(torch.ones(2))}, {}, STATE)
    folder = write(tmp_path, {"new": entry(torch.ones(2))}, {}, STATE)
    assert list(load_file(folder / "model.safetensors")) == ["new"]
    assert [f.name for f in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
def test_one_that_fails_at_any_call_leaves_the_previous_one(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, filled(1), {}, STATE)
    real, number = getattr(os, call), 0

    def fails_at(wanted: int) -> Callable[..., object]:
        def failing(*args: object, **options: object) -> object:
            nonlocal number
            number += 1
            if number == wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **options)

        return failing

    for wanted in range(1, 100):
        number = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails_at(wanted))
            try:
                write(tmp_path, filled(1 + wanted), {}, STATE)
            except CheckpointError as error:
                assert "step 1200 could not be written" in str(error)
                assert "No space left on device" in str(error)
        hidden = "*" if call != "open" else "[!.]*"  # removing a folder opens it, too; the next write sweeps it
        assert [f.name for f in tmp_path.glob(hidden)] == ["step-00001200"], (call, wanted)
        assert verify(tmp_path / "step-00001200") == []
        if number < wanted:
            break
    else:
        pytest.fail("no write came to its end")
    assert wanted > 1, "nothing failed"


def test_files_are_on_disk_before_their_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and the folder are synced before the rename, the parent after it, and only then the older one goes."""
    write(tmp_path, filled(1), filled(2), STATE)
    done: list[str] = []
    sync, rename, remove = os.fsync, os.rename, store.shutil.rmtree

    def noted_sync(fd: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        sync(fd)

    def noted_rename(old: Path, new: Path) -> None:
        done.append(f"rename to {new.name}")
        rename(old, new)

    def noted_remove(path: Path, ignore_errors: bool) -> None:
        done.extend(["remove"] * path.exists())
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr(store.shutil, "rmtree", noted_remove)
    write(tmp_path, filled(3), filled(4), STATE)
    hidden = f"sync .step-00001200.{os.getpid()}-"
    assert [hidden if line.startswith(hidden) else line for line in done] == [
        "sync model.safetensors",
        "sync optimizer.safetensors",
        "sync state.json",
        "sync MANIFEST.json",
        hidden,
        "rename to .step-00001200.older",
        "rename to step-00001200",
        f"sync {tmp_path.name}",
        "remove",
    ]


def test_a_folder_that_someone_writes_is_not_swept(tmp_path: Path) -> None:
    dead = tmp_path / ".step-00000007.1-1"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    with store._hidden(tmp_path, "step-00000008") as living:
        store.sweep(tmp_path)
        assert list(tmp_path.iterdir()) == [living]
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_cannot_have_the_name_of_the_metadata(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be called __metadata__"):
        write(tmp_path, {"__metadata__": entry(torch.ones(1))}, {}, STATE)
    assert list(tmp_path.iterdir()) == []


def test_the_data_starts_at_a_multiple_of_8_bytes(tmp_path: Path) -> None:
    for length in range(1, 9):
        folder = write(tmp_path, {"n" * length: entry(torch.ones(1))}, {}, STATE)
        header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
        assert header % 8 == 0
