"""IS a checkpoint what the safetensors library reads? Its files, their hashes, and that it is there whole or not."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint import store
from paceline.checkpoint.store import Entry, State, in_c_order, write
from paceline.params.layout import TensorSpec
from paceline.views import NAMES, as_bytes

STATE = State("run-1", 1200, "sync", "Adam", [{"lr": 0.1, "betas": [0.9, 0.999]}], "0.1.0")


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


def test_every_file_is_in_the_manifest_with_its_hash(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": entry(torch.ones(3))}, {"w.exp_avg": entry(torch.zeros(3))}, STATE)
    assert folder == tmp_path / "step-00001200"
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    assert sorted(manifest) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted([*manifest, "MANIFEST.json"]) == sorted(f.name for f in folder.iterdir())
    for name, said in manifest.items():
        content = (folder / name).read_bytes()
        assert said == {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_state_is_json_that_says_where_training_was(tmp_path: Path) -> None:
    state = json.loads((write(tmp_path, {}, {}, STATE) / "state.json").read_text())
    assert (state["global_step"], state["mode"], state["optimizer"]) == (1200, "sync", "Adam")
    assert state["groups"] == [{"lr": 0.1, "betas": [0.9, 0.999]}]


def test_a_step_is_written_again_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, {"old": entry(torch.ones(2))}, {}, STATE)
    folder = write(tmp_path, {"new": entry(torch.ones(2))}, {}, STATE)
    assert list(load_file(folder / "model.safetensors")) == ["new"]
    assert [f.name for f in tmp_path.iterdir()] == [folder.name]


def test_one_that_fails_half_way_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"w": entry(torch.ones(2))}, {}, STATE)

    def no_space(path: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "_sync", no_space)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path, {"w": entry(torch.zeros(2))}, {}, STATE)
    read = load_file(tmp_path / "step-00001200" / "model.safetensors")
    assert torch.equal(read["w"], torch.ones(2))
    assert [f.name for f in tmp_path.glob("step-*")] == ["step-00001200"]


def test_the_data_starts_at_a_multiple_of_8_bytes(tmp_path: Path) -> None:
    for length in range(1, 9):
        folder = write(tmp_path, {"n" * length: entry(torch.ones(1))}, {}, STATE)
        header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
        assert header % 8 == 0
