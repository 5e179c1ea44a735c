"""local: each worker makes H steps with its own optimizer, then pushes how far it went; outer Nesterov on the ps.

worker:  loop: pull w; v = w; H times: v = optimizer(v, gradient(v)); push w - v
ps:      as sync (k of n too) or as async, with the deltas as gradients of an outer SGD with Nesterov momentum

The questions are those of the outer mode; that gradients are deltas is known to the worker alone.
"""

from paceline.modes.each_push import EachPush
from paceline.modes.full_sync import FullSync
from paceline.modes.quorum import Quorum
from paceline.modes.spec import ModeSpec


def outer_mode(spec: ModeSpec, num_workers: int) -> EachPush | FullSync | Quorum:
    """The mode that decides when deltas become an update."""
    if spec.outer == "async":
        return EachPush(spec)
    return Quorum(spec, num_workers) if spec.replicas_to_aggregate is not None else FullSync(spec)
