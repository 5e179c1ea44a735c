"""WHO owns a part's parameters? With place(module, device, optimizer) the part itself: they leave this process.

Used by ingraph/place; ingraph/adopted is the other side. Here only shapes stay, filled with NaN, so that whoever
reads them by mistake sees it: state_dict() fetches the values, load_state_dict() sends them. `p.grad` stands for the
gradient that lies there: zero_grad() in any of its forms is understood, and clipping by norm happens there.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.frameworks.torch.constraints import refuse_unkept
from paceline.frameworks.torch.layout import SUPPORTED, group_options
from paceline.frameworks.torch.optimizer import convert
from paceline.frameworks.torch.optimizer_state import OptimizerState
from paceline.frameworks.torch.training_step import step_of
from paceline.ingraph import adopted
from paceline.ingraph.elsewhere import Elsewhere
from paceline.ingraph.mirror import Mirror
from paceline.ingraph.replicas import trained_of


class Resident:
    """A module whose parameters are on another task, and the optimizer that runs there."""

    def __init__(self, module: nn.Module, mirror: Mirror, optimizer: torch.optim.Optimizer) -> None:
        groups = _groups(module, optimizer)
        refuse_unkept(optimizer, "place() with an optimizer of the part's own")
        self._module = module
        self._mirror = mirror
        self._optimizer = optimizer
        self._marked: set[int] = set()
        with mirror.lock:
            options = group_options(optimizer)
            told = [(numbers, dict(its)) for numbers, its in zip(groups, options, strict=True)]
            mirror.call(adopted.adopt, mirror.news(module), type(optimizer).__name__, told)
            mirror.give_away(module)
        if optimizer.state:
            self._put_state(optimizer.state)
        self.state = OptimizerState(self._fetched_state)
        self._shrink()
        convert(optimizer, self, step_of(self))
        module.register_state_dict_post_hook(lambda *told: self._fill_state_dict(*told))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(lambda *_: self._before_load())  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(lambda *_: self._after_load())  # type: ignore[no-untyped-call]

    # --- what autograd needs ----------------------------------------------------------------------------------

    def backward(
        self, number: int, gradients: Sequence[torch.Tensor | None], is_kept: bool
    ) -> tuple[list[Any], Iterable[Any]]:
        """The gradients of the inputs; those of the parameters stay there, and are marked here."""
        zeroed, trained = self._zeroed(), trained_of(self._module)
        inputs, has = self._mirror.ask(adopted.accumulate, number, list(gradients), is_kept, zeroed, trained)
        parameters = list(self._module.parameters())
        for at in has:
            parameters[at].grad = Elsewhere(parameters[at], self._mirror, at)
            self._marked.add(at)
        return inputs, repeat(None)

    def _zeroed(self) -> list[int]:
        """Which gradients somebody has thrown away here since they were marked."""
        parameters = list(self._module.parameters())
        gone = [at for at in sorted(self._marked) if parameters[at].grad is None]
        self._marked.difference_update(gone)
        return gone

    # --- what the optimizer needs (frameworks/torch/optimizer) ----------------------------------------------------

    def step(self) -> None:
        if self.state.is_changed:
            self._put_state(self.state)
        self.state.forget()
        with self._mirror.lock:
            options = [dict(its) for its in group_options(self._optimizer)]
            self._mirror.ask(adopted.update, self._zeroed(), options)

    def _fetched_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        with self._mirror.lock:
            states = self._mirror.ask(adopted.fetch_states)
        return {each: state for each, state in zip(self._module.parameters(), states, strict=True) if state}

    def load_state(self) -> None:
        """Send what the script has loaded into the optimizer."""
        self._put_state(self.state)
        self.state.forget()

    def _put_state(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        with self._mirror.lock:
            self._mirror.ask(adopted.put_states, [dict(state.get(each, {})) for each in self._module.parameters()])

    def before_zeroing(self) -> None:
        raise UsageError(
            f"The gradients of this part are on {self._mirror.task}; zero_grad() throws them away, "
            "zero_grad(set_to_none=False) cannot fill them with zeros."
        )

    # --- values come and go -----------------------------------------------------------------------------------

    def _values(self) -> list[torch.Tensor]:
        with self._mirror.lock:
            values: list[torch.Tensor] = self._mirror.ask(adopted.fetch_values)
        return values

    def _shrink(self) -> None:
        for parameter in self._module.parameters():
            parameter.data = _nothing(parameter)

    def _fill_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        values = dict(zip(module.parameters(), self._values(), strict=True))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            state[prefix + name] = values[parameter]

    def _before_load(self) -> None:
        """Room for what is loaded; what is not in the file stays as it is."""
        for parameter, value in zip(self._module.parameters(), self._values(), strict=True):
            parameter.data = value

    def _after_load(self) -> None:
        with self._mirror.lock:
            self._mirror.ask(adopted.put_values, [each.detach() for each in self._module.parameters()])
        self._shrink()


def _groups(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The numbers of the module's parameters in each of the optimizer's groups."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(kind.__name__ for kind in SUPPORTED)
        raise UsageError(
            f"{type(optimizer).__name__} cannot run on another task, where it is found by its name: use one of "
            f"{names}, or leave the optimizer out of place(), and the parameters stay here."
        )
    numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
    given = [list(group["params"]) for group in optimizer.param_groups]
    strangers = sum(each not in numbers for group in given for each in group)
    lacking = sum(each.requires_grad for each in numbers) - sum(len(group) for group in given) + strangers
    if strangers or lacking > 0:
        raise UsageError(
            "An optimizer that goes with a part has that part's parameters, all of them and no others: make one for "
            "each part, such as SGD(part.parameters())."
        )
    return [[numbers[each] for each in group] for group in given]


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape that takes no room and is visibly no value."""
    return torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(like.shape)
