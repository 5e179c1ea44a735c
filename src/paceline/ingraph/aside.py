"""WHO hears that this task trains nothing? Every ps of its cluster, else they would wait for it before training starts.

Called by Server.join, once a second. A ps may not listen yet, or be started again without what it knew: the connection
stays open, and when it has ended the ps is told anew. Must never hold up join(), nor fail it.
"""

import time

from paceline.cluster.discovery import Assignment
from paceline.cluster.membership import incarnation_by_hand
from paceline.cluster.spec import Task
from paceline.errors import ClusterError, ConnectionLost, ProtocolError
from paceline.transport.channel import Channel, connect
from paceline.wire.messages import Serves

CONNECT_S = 1.0
ANSWER_S = 2.0


class Aside:
    """One worker that serves ops, as the ps are to see it."""

    def __init__(self, assignment: Assignment) -> None:
        cluster, self._is_launched = assignment.cluster, assignment.source == "launcher"
        self._assignment = assignment
        self._told: dict[Task, Channel] = {}
        self._ps = list(cluster.ps) if assignment.task in cluster.workers else []
        if self._ps:
            incarnation = assignment.incarnation if self._is_launched else incarnation_by_hand(time.time())
            self._notice = Serves(cluster.worker_index(assignment.task), incarnation)

    def tell(self) -> None:
        """Tell every ps that does not know it yet, or not any more."""
        for task in list(self._ps):
            channel = self._told.get(task)
            if channel is not None and not channel.stream.is_ended():
                continue
            if channel is not None:
                self._told.pop(task).close()
            self._tell(task)

    def _tell(self, task: Task) -> None:
        given = self._assignment
        try:
            channel = connect(given.cluster.address(task), given.settings.lane, given.secret, CONNECT_S)
        except ClusterError:
            return  # the next time
        try:
            channel.ask(self._notice, limit_s=ANSWER_S)
            self._told[task] = channel
        except (ConnectionLost, ProtocolError):
            channel.close()
            if not self._is_launched:  # a task of job ps that serves ops itself, and ends what it does not understand
                self._ps.remove(task)
        except ClusterError:
            channel.close()

    def close(self) -> None:
        while self._told:
            self._told.popitem()[1].close()
