"""Towers and placed modules on one card: what tests/gpu/towers_on_card.py checks, for pytest. Skipped without one."""

import pytest
import torch
from towers_on_card import CHECKS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NOT CHECKED: no CUDA device here; run tests/gpu/towers_on_card.py where there is",
    ),
]


@pytest.mark.parametrize("name", CHECKS)
def test_on_one_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("XDG_CONFIG_HOME", "")  # so that it is as before afterwards
    run(name)
