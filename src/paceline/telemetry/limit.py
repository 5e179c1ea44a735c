"""WHAT can hold a cluster back? One name for each limit, whoever finds it.

Said by lab/results/limits about a cell that ran, and by plan/simulate about one that did not. Names only: who finds a
limit decides when it holds.
"""

from enum import Enum


class Limit(Enum):
    SLOWEST = "slowest worker"
    PS = "ps CPU"
    LINK = "link"
    PS_LINK = "link of the ps"  # where both ends are known
    WORKER_LINK = "link of the workers"
    CORES = "cores of the machine"
    FEEDER = "feeder"
    CLIENT = "client"  # in-graph: it hands out everything
    COMPUTE = "worker compute"
    EXCHANGE = "push and pull"
    ROUNDS = "waiting for rounds"
    NOTHING = "nothing stands out"
    UNKNOWN = "not enough is known"
