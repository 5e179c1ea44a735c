"""One NVIDIA card: what the files of this folder check, for pytest. Skipped where there is none."""

from pathlib import Path

import one_card
import ops_on_card
import pytest
import seam_on_card
import torch
import towers_on_card

CHECKS = {
    f"{module.__name__}: {name}": check
    for module in (one_card, ops_on_card, seam_on_card, towers_on_card)
    for name, check in module.CHECKS.items()
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NOT CHECKED: no CUDA device here; run tests/gpu/on_card.sh where there is",
    ),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHECKS)
def test_on_one_card(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path / "run")
