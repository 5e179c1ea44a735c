"""Lanes, which carry bytes between tasks: one protocol, four lanes; a new lane is one file and one line here."""

from paceline.transport.base import Lane
from paceline.transport.grpc import GrpcLane
from paceline.transport.inproc import InprocLane
from paceline.transport.shm import ShmLane
from paceline.transport.tcp import TcpLane

LANES: dict[str, type[Lane]] = {"shm": ShmLane, "tcp": TcpLane, "grpc": GrpcLane, "inproc": InprocLane}
