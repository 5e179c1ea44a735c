"""When does a ps end? Not while a worker that went away may still come, also if it went before this ps was started."""

import time

import pytest

from paceline.cluster.membership import Phase
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.server.core import PsConfig
from paceline.server.service import Service

REJOIN_S = 50.0


@pytest.fixture
def service() -> Service:
    """A ps that was started again; nobody is connected."""
    config = PsConfig(0, 1, 2, "r", make_mode(ModeSpec(), 2), "bytes", lease_s=5.0, rejoin_s=REJOIN_S)
    return Service(config, b"1" * 32, lambda of, report: None)


@pytest.mark.parametrize(
    ("phases", "is_over"),
    [
        ((Phase.GONE, Phase.GONE), False),
        ((Phase.GONE, Phase.LOST), False),
        ((Phase.GONE, Phase.CLOSED), False),
        ((Phase.TRAINING, Phase.CLOSED), False),
        ((Phase.CLOSED, Phase.LOST), True),
        ((Phase.CLOSED, Phase.CLOSED), True),
    ],
)
def test_it_waits_for_those_who_were_away_before(service: Service, phases: tuple[Phase, ...], is_over: bool) -> None:
    for worker, phase in enumerate(phases):
        service.core.members.recall(worker, phase, 1, time.monotonic())
    assert service._is_over() is is_over


def test_but_not_for_ever(service: Service) -> None:
    for worker in (0, 1):
        service.core.members.recall(worker, Phase.GONE, 1, time.monotonic())
    service._began_s -= REJOIN_S
    assert service._is_over()
