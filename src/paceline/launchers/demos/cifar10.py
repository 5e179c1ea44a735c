"""HOW does a convolutional network train here? TensorFlow's CIFAR-10 tutorial on a cluster, with averaged parameters.

    paceline demo cifar10                                      1 ps + 2 workers, a made-up set, --ema 0.95
    paceline demo cifar10 -- --data-dir data --channels 64     the real one, downloaded into data (170 MB)

Look at the accuracies with and without averages, and at images.png in the run folder: a row a class, the first half as
the set has them, the second half as training sees them.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import cifar10
from paceline.datasets.distort import centred, distorted
from paceline.datasets.picture import save_rows
from paceline.models.cnn import Cnn

SHOWN = 6  # images a class, before and after


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a convolutional network on CIFAR-10.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, help="to train on; all when left out")
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker; the tutorial: 128")
    parser.add_argument("--channels", type=int, default=16, help="of a convolution; the tutorial: 64")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data-dir", help="a folder with CIFAR-10, or where it shall be kept; left out: a made-up set")
    return parser.parse_args()


def from_torch() -> np.random.Generator:
    """torch's own generator decides, so that a run that is resumed goes on with the same images."""
    return np.random.default_rng(int(torch.randint(1 << 31, ())))


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        found = [model(part).argmax(1) for part in torch.split(images, 500)]
    return float((torch.cat(found) == labels).float().mean())


def picture(data: cifar10.Cifar10, path: Path) -> Path:
    """A row a class: images of the set, and what distortion makes of them."""
    rows = []
    for label in range(cifar10.CLASSES):
        images = data.train_x[data.train_y == label][:SHOWN]
        seen = distorted(images, np.random.default_rng(label))
        low, high = seen.min(axis=(1, 2, 3), keepdims=True), seen.max(axis=(1, 2, 3), keepdims=True)
        framed = np.zeros((len(images), *images.shape[1:]), np.float32)
        framed[:, :, 4:28, 4:28] = (seen - low) / np.maximum(high - low, 1e-6)
        rows.append(np.concatenate([images.astype(np.float32) / 255, framed]))
    return save_rows(path, rows, zoom=2)


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    data = cifar10.load(args.data_dir)
    ctx.print(f"CIFAR-10: {data.source}")
    train = TensorDataset(torch.from_numpy(data.train_x[: args.images]), torch.from_numpy(data.train_y[: args.images]))
    test = torch.from_numpy(centred(data.test_x)).to(ctx.device), torch.from_numpy(data.test_y).to(ctx.device)

    model = Cnn(args.channels).to(ctx.device)
    optimizer = torch.optim.SGD(model.groups(), lr=args.lr)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)

    for epoch in ctx.epochs(args.epochs):
        for raw, labels in loader:
            images = torch.from_numpy(distorted(raw.numpy(), from_torch())).to(ctx.device)
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels.to(ctx.device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ctx.log({"loss": loss.item()})
        ctx.print(f"Epoch {epoch + 1}: loss {loss.item():.4f}")

    ctx.pull()  # the newest parameters: other workers may have gone on since this one's last step
    reached = {"accuracy": accuracy(model, *test)}
    if ctx.has_averages:
        with ctx.pause(), ctx.ema():
            reached["averaged_accuracy"] = accuracy(model, *test)
    ctx.log(reached)
    ctx.print("  ".join(f"{name} {value:.4f}" for name, value in reached.items()))
    if ctx.is_chief:
        print(f"Picture: {picture(data, (ctx.run_dir or Path.cwd()) / 'images.png')}", flush=True)


if __name__ == "__main__":
    main()
