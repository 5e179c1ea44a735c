"""Document 000's tfdist_between.py: two layers on MNIST, trained asynchronously by the cluster in settings.py.

    python tfdist_between.py --job_name=ps --task_index=0
    python tfdist_between.py --job_name=worker --task_index=0
    python tfdist_between.py --job_name=worker --task_index=1

Every worker passes over the whole set; try `--lr=0.01 --batches=55` for the same curve at a tenth of the time.
"""

import argparse
import time
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.models.mlp import document_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=550, help="of 100 images, in an epoch")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1, help="of the first weights and the order of images")
    parser.add_argument("--data_dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_known_args()[0]  # --job_name and --task_index are for paceline.init


def main(mode: str) -> None:
    args = arguments()
    ctx = paceline.init(mode=mode)  # a ps serves here, and ends when the workers are done
    digits = mnist.load(args.data_dir).tensorflow_split()
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    test_x, test_y = torch.from_numpy(digits.test_x).to(ctx.device), torch.from_numpy(digits.test_y).to(ctx.device)

    torch.manual_seed(args.seed + ctx.worker_index)  # every worker takes the images in its own order
    model = document_000(args.seed).to(ctx.device)  # which one: --worker-device, or this worker's share of the cards
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=100, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader, shard=False)

    for epoch in ctx.epochs(args.epochs):
        began = time.monotonic()
        for images, labels in islice(loader, args.batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
            loss.backward()
            optimizer.step()
        ctx.log({"loss": loss.item()})
        print(f"Epoch {epoch + 1}: cost {loss.item():.4f}, {time.monotonic() - began:.2f} s", flush=True)

    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    ctx.log({"accuracy": accuracy})
    print(f"Test-Accuracy: {accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main("async")
