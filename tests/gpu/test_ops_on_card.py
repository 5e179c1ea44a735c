"""Ops, graphs and tf1 on one card: what tests/gpu/ops_on_card.py checks, for pytest. Skipped without one."""

import pytest
import torch
from ops_on_card import CHECKS, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NOT CHECKED: no CUDA device here; run tests/gpu/ops_on_card.py where there is",
    ),
]


@pytest.mark.parametrize("name", CHECKS)
def test_on_one_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--virtual-gpus=2"])
    monkeypatch.setenv("XDG_CONFIG_HOME", "")  # so that it is as before afterwards
    run(name)
