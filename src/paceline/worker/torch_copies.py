"""WHAT is a copy of a prepared model? The model as it is now, and nothing of the cluster: no hooks, no connection.

Called when a Trainee has joined. `copy.deepcopy(model)`, `copy.copy(model)` and `torch.save(model)` all ask the object
how to take it apart, so the answer is given on the instance; its class stays what it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

REDUCE = "__reduce_ex__"


def copies_stand_alone(model: Any, hooks: Sequence[tuple[str, Any]], settle: Callable[[], None]) -> None:
    """Let copies leave out these hooks (name of the model's dictionary, handle), and have the newest parameters."""

    def reduce(protocol: int) -> tuple[Any, ...]:
        settle()
        reduced: tuple[Any, ...] = model.__class__.__reduce_ex__(model, protocol)
        how, what, state, *rest = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != REDUCE}
            for name, handle in hooks:
                if name in state:
                    state[name] = type(state[name])((k, v) for k, v in state[name].items() if k != handle.id)
        return how, what, state, *rest

    model.__dict__[REDUCE] = reduce
