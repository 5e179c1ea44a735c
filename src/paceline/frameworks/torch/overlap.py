"""Send a gradient while backward still runs, in buckets, as autograd finishes each tensor (`--overlap`).

Used by frameworks/torch/training_step on lane tcp, for shards that are sent straight from the gradients. A bucket only
lies in the slot on the ps: the push that `step()` sends makes the whole gradient count. What a script changes between
backward and step (clipping, accumulation) is noticed by autograd's own count of changes, and sent again. A GradScaler's
unscaling leaves no trace there, so the two together are refused.
"""

import queue
import sys
import threading
from collections.abc import Collection, Sequence

import torch

from paceline import forks
from paceline.errors import ConnectionLost, UsageError
from paceline.frameworks.torch.gradients import Gradients, Outgoing
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Plan
from paceline.views import as_bytes
from paceline.worker.requests.client import Client

BUCKET_BYTES = 4 << 20


class Overlap:
    """One thread that sends buckets; `shards` are those it serves."""

    def __init__(
        self, client: Client, layout: Layout, plan: Plan, outgoing: Outgoing, parameters: Sequence[torch.Tensor]
    ) -> None:
        links = client.links
        self._owner = forks.Owner()
        self._client = client
        self.shards: Collection[int] = [s for s in outgoing.direct if not links[s].shares_memory]
        self._links = links
        self._layout = layout
        self._outgoing = outgoing
        self._owners = [[(s, p) for s, p in plan.owners(t) if s in self.shards] for t in range(len(parameters))]
        self._sent: dict[int, tuple[torch.Tensor, int, int]] = {}  # the gradient, its version, on which connections
        self._queue: queue.SimpleQueue[tuple[int, torch.Tensor] | threading.Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        if self.shards:
            threading.Thread(target=self._send_all, name="overlap", daemon=True).start()
            for index, parameter in enumerate(parameters):
                if self._owners[index]:
                    parameter.register_post_accumulate_grad_hook(lambda p, i=index: self._is_ready(i, p))  # type: ignore[no-untyped-call]

    def _is_ready(self, index: int, parameter: torch.Tensor) -> None:
        """Hand over a gradient that autograd has finished. While the last push is not answered the slot on a ps may
        still be read: then it waits for step()."""
        if parameter.grad is not None and not self._client.is_pending and self._owner.is_here:
            self._hand_over(index, parameter.grad)

    def _hand_over(self, index: int, gradient: torch.Tensor) -> None:
        self._sent[index] = (gradient, gradient._version, self._connections())
        self._queue.put((index, gradient))

    def _connections(self) -> int:
        """Count the connections made: with every new one, what lay in the slot of that ps is to be sent again."""
        return sum(self._links[shard].connections for shard in self.shards)

    def flush(self, gradients: Gradients) -> None:
        """Send what was not sent before the push, or was changed since; then wait until all has left."""
        if not self.shards:
            return
        _refuse_scaler()
        for index, gradient in enumerate(gradients):
            if gradient is not None and self._owners[index]:
                sent, version, connections = self._sent.get(index, (None, 0, 0))
                if sent is not gradient or version != gradient._version or connections != self._connections():
                    self._hand_over(index, gradient)
        all_left = threading.Event()
        self._queue.put(all_left)
        all_left.wait()
        self._sent.clear()
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """Send everything again: parameters were read, perhaps through the slots."""
        self._sent.clear()

    def close(self) -> None:
        self._queue.put(None)

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._error is None:
                try:
                    self._send(*item)
                except ConnectionLost:
                    continue  # the push that follows meets the same end, and is sent again as a whole
                except Exception as error:  # the thread that trains hears of it at its next step
                    self._error = error

    def _send(self, index: int, gradient: torch.Tensor) -> None:
        vector = self._outgoing.as_laid_out(index, gradient.detach())
        item_bytes = ITEM_BYTES[self._layout.trained[index].dtype]
        for shard, piece in self._owners[index]:
            for start in range(piece.start, piece.stop, BUCKET_BYTES // item_bytes):
                stop = min(start + BUCKET_BYTES // item_bytes, piece.stop)
                # A copy: a script may change the gradient while it is on its way, and the checksum must still hold.
                part = as_bytes(vector[start:stop].clone())
                self._links[shard].send_bucket(piece.offset + (start - piece.start) * item_bytes, part)


def _refuse_scaler() -> None:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            raise UsageError("--overlap sends gradients before a GradScaler has unscaled them: use one or the other")
        frame = frame.f_back  # type: ignore[assignment]
