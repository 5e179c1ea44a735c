"""Requests that each role may make; a client proves its role in the handshake.

Checked by server/requests before every cold request. Gradients need no row here: they come on connections that have
joined, and only a worker may join. What a certain worker may do (only the chief writes) is checked by each event.
"""

from paceline.errors import Refused
from paceline.transport.security import Role
from paceline.wire import messages as m

READS = (m.AskStatus, m.Describe, m.Fetch)
ALLOWED: dict[Role, tuple[type, ...]] = {
    Role.READER: READS,
    Role.OPERATOR: (*READS, m.SwitchMode),
    Role.LAUNCHER: (m.AskStatus, m.Describe, m.Lost, m.SaveSoon),
    Role.CLIENT: (),
}
NOT_A_WORKERS = (m.Lost, m.SaveSoon)  # only a launcher knows that another worker is gone, or that all are to save


def check(role: Role, kind: type) -> None:
    """Refuse a kind of request that this role may not make.

    >>> check(Role.READER, m.Describe)
    """
    is_allowed = kind not in NOT_A_WORKERS if role is Role.WORKER else kind in ALLOWED[role]
    if not is_allowed:
        raise Refused(f"a {role} may not ask for {kind.__name__}")
