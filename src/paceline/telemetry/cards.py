"""HOW are the host's cards now? NVML's answers, as they are: the one door to it while a task runs.

Called by telemetry/meter in its own thread. Must never raise, nor start CUDA: a host without a driver has no cards.
"""

import os
from collections.abc import Callable
from typing import Any

from paceline.telemetry.usage import Card

MIB = 1 << 20


class Cards:
    """The cards that this process computes on. NVML is asked whether there are any when the first look comes."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[tuple[int, Any]] | None = None

    def look(self) -> list[Card]:
        """Those on which the driver sees this process; all, where it sees it on none: a container has other ids."""
        if self._handles is None:
            self._handles = self._open()
        mine = [(index, handle) for index, handle in self._handles if self._is_mine(handle)]
        return [self._card(index, handle) for index, handle in mine or self._handles]

    def _open(self) -> list[tuple[int, Any]]:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            return [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            return []

    def _is_mine(self, handle: Any) -> bool:
        told = self._asked(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        return any(process.pid == os.getpid() for process in told or ())

    def _card(self, index: int, handle: Any) -> Card:
        nvml = self._nvml
        memory = self._asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._asked(nvml.nvmlDeviceGetUtilizationRates, handle)
        name = self._asked(nvml.nvmlDeviceGetName, handle)
        return Card(
            index=index,
            name=name.decode() if isinstance(name, bytes) else str(name or ""),
            fan_percent=self._asked(nvml.nvmlDeviceGetFanSpeed, handle),
            temperature_c=self._asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=_thousandth(self._asked(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(self._asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            memory_mib=None if memory is None else memory.used // MIB,
            memory_total_mib=None if memory is None else memory.total // MIB,
            busy_percent=None if rates is None else rates.gpu,
        )

    def _asked(self, question: Callable[..., Any], *args: Any) -> Any:
        """None: this card, or this driver, does not answer that."""
        try:
            return question(*args)
        except self._nvml.NVMLError:
            return None


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
