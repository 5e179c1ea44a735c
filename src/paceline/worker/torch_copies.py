"""WHAT does a prepared model show of itself? The newest parameters; and a copy of it has nothing of the cluster.

Called when a Trainee has joined. The answer to the last push may still be on its way when somebody reads the model, so
whoever copies, saves or walks through it takes the answer first. Given on the instance: its class stays what it was.
"""

from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

REDUCE = "__reduce_ex__"
WALK = "named_parameters"  # what parameters() goes through too


def copies_stand_alone(model: Any, hooks: Sequence[tuple[str, Any]], settle: Callable[[], None]) -> None:
    """Let deepcopy, copy and pickle leave out these hooks (name of the model's dictionary, handle)."""

    def reduce(protocol: int) -> tuple[Any, ...]:
        settle()
        reduced: tuple[Any, ...] = model.__class__.__reduce_ex__(model, protocol)
        how, what, state, *rest = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in (REDUCE, WALK)}
            for name, handle in hooks:
                if name in state:
                    state[name] = type(state[name])((k, v) for k, v in state[name].items() if k != handle.id)
        return how, what, state, *rest

    model.__dict__[REDUCE] = reduce


def readers_see_the_newest(model: Any, settle: Callable[[], None]) -> None:
    """Let model.parameters() take the last answer first: an average of the weights is made right after a step."""

    def named_parameters(self: Any, *args: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        settle()
        walk: Iterator[tuple[str, Any]] = self.__class__.named_parameters(self, *args, **options)
        return walk

    model.__dict__[WALK] = MethodType(named_parameters, model)  # a method: torch.compile looks what is behind it
