"""HOW does a script use paceline? A plain PyTorch loop on MNIST with three changed lines, marked 1, 2, 3.

Started by `paceline demo`, `paceline run mnist.py` or plain `python mnist.py`. Must never count the tasks.
"""

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import paceline  # 1
from paceline.datasets import mnist
from paceline.models.mlp import mlp

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(Dataset[Batch]):
    """Hands out whole batches: to collate 100 single images would cost more than a training step."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        return self.images[indices], self.labels[indices]


def as_it_is(batch: Any) -> Any:
    """The collate function of a dataset that makes its own batches."""
    return batch


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on MNIST.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100, help="of each worker")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--data-dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ctx = paceline.init()  # 2
    data = mnist.load(args.data_dir)
    train = Digits(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, collate_fn=as_it_is)
    model = mlp(hidden=100, activation="relu").to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)  # 3

    for _ in ctx.epochs(args.epochs):
        for number, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number % 20 == 0:
                ctx.log({"loss": loss.item()})

    ctx.pull()  # the newest parameters: other workers may have gone on since this one's last step
    test_x, test_y = torch.from_numpy(data.test_x), torch.from_numpy(data.test_y)
    reached = accuracy(model, test_x.to(ctx.device), test_y.to(ctx.device))
    ctx.log({"test_accuracy": reached})
    ctx.print(f"test accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
