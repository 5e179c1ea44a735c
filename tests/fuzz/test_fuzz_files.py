"""WHAT can lie in a file, or in the environment? Anything; it is read as what it is, or refused with a sentence."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import PROBES, anything

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import read, store
from paceline.checkpoint import state as states
from paceline.checkpoint.state import State
from paceline.checkpoint.tensors import Entry, entries
from paceline.cluster.discovery import discover
from paceline.cluster.secret import secret_by_hand
from paceline.errors import CheckpointError, UsageError

STATE = State(
    run_id="r", global_step=7, mode={"name": "async"}, optimizer="SGD", groups=[{"lr": 0.1}], paceline="0"
)  # fmt: skip
MODEL = {"w": Entry("float32", (2, 3), bytes(range(24))), "n": Entry("int64", (), bytes(8))}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store.write(tmp_path_factory.mktemp("checkpoints"), MODEL, {"w.m": MODEL["w"]}, STATE)


def seeds_of(good: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(good.iterdir())}


@given(st.data())
def test_a_checkpoint_with_a_changed_file_is_whole_or_refused(good: Path, data: st.DataObject) -> None:
    files = seeds_of(good)
    name = data.draw(st.sampled_from(sorted(files)))
    content = data.draw(anything([files[name], *PROBES]))
    path = good / name
    try:
        path.write_bytes(content)
        try:
            loaded = read.load(good)
        except CheckpointError as error:
            assert str(error) and read.verify(good)
            return
        assert loaded.state.global_step == 7 and bytes(loaded.model["w"].data) == bytes(range(24))
    finally:
        path.write_bytes(files[name])


@given(st.data())
def test_the_parsers_behind_the_hashes_refuse_with_a_sentence(good: Path, data: st.DataObject) -> None:
    """A hash says that a file is what was written, not that somebody meant well."""
    files = seeds_of(good)
    content = data.draw(anything([*files.values(), *PROBES]))
    for parse in (
        lambda: entries(memoryview(content), "model.safetensors"),
        lambda: manifests.decode(content),
        lambda: states.decode(content),
    ):
        try:
            parse()
        except CheckpointError as error:
            assert str(error)


@given(st.data())
def test_safetensors_headers_may_claim_anything(data: st.DataObject) -> None:
    number = st.integers(-(2**63), 2**63) | st.sampled_from([0, 8, 24, 32])
    tensor = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "BOOL", "Q4", ""]),
            "shape": st.lists(number, max_size=4),
            "data_offsets": st.lists(number, min_size=1, max_size=3),
        }
    )
    header = json.dumps(data.draw(st.dictionaries(st.text(max_size=4), tensor, max_size=3))).encode()
    size = data.draw(st.sampled_from([len(header), 0, 2**63, 2**64 - 1, len(header) + 8]))
    content = size.to_bytes(8, "little") + header + bytes(data.draw(st.sampled_from([0, 8, 24, 32])))
    try:
        found = entries(memoryview(content), "model.safetensors")
    except CheckpointError:
        return
    assert sum(len(entry.data) for entry in found.values()) <= len(content)


TF_SEEDS = [
    b'{"cluster": {"ps": ["a:1"], "worker": ["a:2"]}, "task": {"type": "ps", "index": 0}}',
    b'{"cluster": {"worker": {"1": "h:2"}, "ps": ["h:1"]}, "task": {"type": "worker", "index": "1"}, "rpc_layer": ""}',
]


@given(anything(TF_SEEDS).map(lambda data: data.decode("utf-8", "surrogateescape").replace("\0", "")))
def test_TF_CONFIG_is_understood_or_refused(text: str) -> None:
    environ = {"TF_CONFIG": text, "PACELINE_TASK": text}
    for name in environ:
        try:
            found = discover(argv=["--insecure"], environ={name: environ[name]}, script_dir="/nowhere")
        except UsageError as error:
            assert str(error)
        else:
            assert found is None or found.source == "TF_CONFIG"


@given(anything([b"ab" * 32 + b"\n", bytes(32)]))
def test_a_secret_file_is_a_secret_or_refused_and_never_shown(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    try:
        assert len(secret_by_hand(str(path), {})) == 32
    except UsageError as error:
        assert len(content) < 12 or content.decode("latin-1") not in str(error)
