"""Two workers that spend their steps differently: worker 0 is slow to load its data, worker 1 slow to compute.

The sleeps are the workload.
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline

LOAD_S, COMPUTE_S = 0.005, 0.02
STEPS, BATCH = 30, 4


class Rows(Dataset[torch.Tensor]):
    """Rows that are slow to come, or not; a sleep for each batch."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s

    def __len__(self) -> int:
        return 2 * STEPS * BATCH  # both workers take their share

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            time.sleep(self._load_s)
        return torch.ones(8)


def main() -> None:
    ctx = paceline.init()
    is_feeder = ctx.worker_index == 0
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = DataLoader(Rows(LOAD_S if is_feeder else 0.0), batch_size=BATCH)
    model, optimizer, batches = ctx.prepare(model, optimizer, rows)
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if not is_feeder:
            time.sleep(COMPUTE_S)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
