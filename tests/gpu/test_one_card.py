"""One NVIDIA card, a ps and two workers: what tests/gpu/one_card.py checks, for pytest. Skipped where there is none."""

from pathlib import Path

import pytest
import torch
from one_card import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NOT CHECKED: no CUDA device here; run tests/gpu/one_card.sh where there is",
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHECKS)
def test_on_one_card(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path / "run")
