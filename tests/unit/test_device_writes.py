"""The digest that finds writes on a card, on the CPU: it is plain torch."""

import pytest
import torch

from paceline.frameworks.torch import writes as torch_writes
from paceline.frameworks.torch.writes import DeviceWrites

SIZE = 1024


def writes_over(block: torch.Tensor) -> DeviceWrites:
    return DeviceWrites(block, block.clone(), [slice(0, 100), slice(128, 900)])


def test_every_single_bit_is_seen_and_its_tensor_named() -> None:
    block = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    writes = writes_over(block)
    assert not writes.found()
    for byte in [*range(0, 100, 7), *range(128, 900, 31)]:
        for bit in range(8):
            block[byte] ^= 1 << bit
            assert writes.found() == [int(byte >= 128)], (byte, bit)
            block[byte] ^= 1 << bit
    assert not writes.found()


def test_swapped_words_are_seen() -> None:
    block = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    writes = writes_over(block)
    block[0:8], block[8:16] = block[8:16].clone(), block[0:8].clone()
    assert writes.found() == [0]


def test_blocks_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_writes, "CHUNK_WORDS", 16)
    block = torch.zeros(SIZE, dtype=torch.uint8)
    writes = writes_over(block)
    block[899] = 1
    assert writes.found() == [1]
    writes.remember()
    assert not writes.found()


def test_a_model_without_bytes_has_no_writes() -> None:
    writes = DeviceWrites(torch.zeros(0, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), [])
    assert not writes.found()
