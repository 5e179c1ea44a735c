"""Train on a worker's own for a while (mode local): H steps of its own optimizer, then one exchange.

frameworks/torch/local and frameworks/keras/local bring the tensors and the user's optimizer. What is pushed as a
gradient is the delta: where the last exchange left the parameters, less where they are now. The ps applies it with an
outer SGD (server/numbers/shard knows nothing of all this).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import UsageError
from paceline.modes.spec import outer_momentum
from paceline.wire.frames import Outcome
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.step.training_step import TrainingStep

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession

Outer = tuple[str, float, float | None]  # --outer, --outer-lr, --outer-momentum
Made = TypeVar("Made", bound=TrainingStep)


def bound_by(
    session: "WorkerSession", plain: Callable[..., Made], local: Callable[..., Made], *given: Any, **own: Any
) -> Made:
    """Make the training step of the session's mode: `local`, which trains by itself between exchanges, or `plain`."""
    settings = session.require_cluster().settings
    if settings.mode != "local":
        return plain(*given, **own, session=session)
    return local(
        *given, **own, session=session, outer=(settings.mode_spec.outer, settings.outer_lr, settings.outer_momentum)
    )


class LocalSteps(TrainingStep):
    """A training step of a worker that trains by itself between exchanges. Name it before the framework's own among
    the bases."""

    is_local = True

    def __init__(self, *args: Any, outer: Outer, **bound: Any) -> None:
        self._outer, self._outer_lr, self._momentum = outer
        self._since_exchange = 0
        self._step_samples: list[float] = []  # of each step since the last exchange
        super().__init__(*args, **bound)

    # --- what a framework brings ------------------------------------------------------------------------------

    @abstractmethod
    def num_groups(self) -> int:
        """Return how many parameter groups the layout has."""

    @abstractmethod
    def _delta(self) -> list[Any]:
        """Return how far each parameter came since the last exchange."""

    @abstractmethod
    def _note_origin(self) -> None:
        """Note where the parameters are: deltas count from there."""

    @abstractmethod
    def _go_back(self) -> None:
        """Set the parameters to where deltas count from."""

    def _was_skipped(self) -> bool:
        """Tell whether the optimizer has left the step out that it was just told to make."""
        return False

    def send_memory(self) -> None:
        """Do nothing: the user's optimizer stays here, with what it remembers."""

    # --- the optimizer of the ps ------------------------------------------------------------------------------

    def make_spec(self) -> OptimizerSpec:
        """Return the outer optimizer: SGD over deltas, with Nesterov momentum if there is any."""
        momentum = outer_momentum(self._momentum, self._outer)
        options: Options = {
            "lr": self._outer_lr, "momentum": momentum, "dampening": 0, "weight_decay": 0, "nesterov": momentum > 0,
            "maximize": False, "foreach": None, "differentiable": False, "fused": None,
        }  # fmt: skip
        return OptimizerSpec("SGD", [options for _ in range(self.num_groups())])

    def _changed_options(self) -> list[Options] | None:
        """Return the outer optimizer's options if the dial has others now. Those of the user's optimizer stay here."""
        outer = self.client.dial.spec.outer
        if outer == self._outer:
            return None
        self._outer = outer
        self.spec = self.make_spec()
        return self.spec.groups

    # --- steps and exchanges ----------------------------------------------------------------------------------

    def stepped(self) -> bool:
        """Count a step of the worker's own optimizer, and exchange after every H-th. Return whether it did."""
        samples = None if self._was_skipped() else super()._samples()
        self._step_samples += [] if samples is None else [samples]
        self._since_exchange += 1
        is_due = self._since_exchange >= self.client.dial.spec.local_steps
        if is_due:
            self._exchange()
        self.steps += 1
        self.after_step()
        return is_due

    def _exchange(self) -> None:
        delta = self._delta()
        self._since_exchange = 0
        self._push(delta)

    def _samples(self) -> float | None:
        """Return how many samples all steps of the delta were made of; 0: unknown, None: as many as before."""
        samples, self._step_samples = self._step_samples, []
        if not samples:
            return None
        return sum(samples) if all(samples) else 0.0

    def settle(self) -> None:
        if not self.client.is_pending:
            return
        super().settle()
        if self.last_outcome is Outcome.ADDED:
            self._go_back()  # another delta for the same round, from its start
        else:
            self._start_here()

    def _start_here(self) -> None:
        self._since_exchange, self._step_samples = 0, []
        self._note_origin()

    def finish(self) -> UsageError | None:
        """Push the steps since the last exchange, too."""
        refused = super().finish()
        if self._since_exchange:
            self.wants_ticket = self.is_budgeted
            self._exchange()
        return refused

    # --- parameters from outside ------------------------------------------------------------------------------

    def joined(self, on_load: Callable[[], None]) -> None:
        super().joined(on_load)
        self._start_here()

    def end_first(self) -> None:
        super().end_first()
        self.writes, self.watched, self._digests = None, (), []  # every step of this worker writes the parameters

    def _send_parameters(self, what: str) -> None:
        super()._send_parameters(what)
        self._start_here()

    def forget_steps(self) -> None:
        self._go_back()
        self._since_exchange, self._step_samples = 0, []

    def take_newest(self) -> None:
        """Take the newest parameters only at an exchange: between two of them the worker keeps its own steps."""
        if self._since_exchange == 0:
            super().take_newest()
            self._start_here()
