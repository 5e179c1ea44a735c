"""Document 000's tfsingle.py: two layers on MNIST in one plain process, on the first GPU where there is one.

    python tfsingle.py

Of paceline only the digits and the model: what tfdist_between.py has more is what a cluster takes, and with one worker
it prints the same costs, digit for digit. Try `--lr=0.01 --batches=55` for the same curve at a tenth of the time.
"""

import argparse
import time
from itertools import islice

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from paceline.datasets import mnist
from paceline.models.mlp import document_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=550, help="of 100 images, in an epoch")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1, help="of the first weights and the order of images")
    parser.add_argument("--data_dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # the document's /gpu:0
    digits = mnist.load(args.data_dir).tensorflow_split()
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    test_x, test_y = torch.from_numpy(digits.test_x).to(device), torch.from_numpy(digits.test_y).to(device)

    torch.manual_seed(args.seed)
    model = document_000(args.seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = DataLoader(train, batch_size=100, shuffle=True)

    for epoch in range(args.epochs):
        began = time.monotonic()
        for images, labels in islice(loader, args.batches):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch + 1}: cost {loss.item():.4f}, {time.monotonic() - began:.2f} s", flush=True)

    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    print(f"Test-Accuracy: {accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
