"""WHAT is measured? Scenarios side by side, and whole runs; a new matrix is one file and one line here."""

from collections.abc import Callable

from paceline.lab.matrices import (
    accuracy,
    apply,
    budget,
    cards,
    carrier_matrix,
    documents,
    in_graph,
    links,
    modes,
    overhead,
    peers,
    safety,
    scale,
    seeds,
    slow_link,
    tensorflow,
    towers,
    watch,
)
from paceline.lab.scenario import Matrix

MATRICES: dict[str, Callable[[bool], Matrix]] = {  # by name; True: fewer and shorter
    "overhead": overhead.matrix,
    "modes": modes.matrix,
    "apply": apply.matrix,
    "safety": safety.matrix,
    "accuracy": accuracy.matrix,
    "budget": budget.matrix,
    "in-graph": in_graph.matrix,
    "documents": documents.matrix,
    "tensorflow": tensorflow.matrix,
    "carriers": carrier_matrix.matrix,
    "peers": peers.matrix,
    "seeds": seeds.matrix,
    "towers": towers.matrix,
    "scale": scale.matrix,
    "watch": watch.matrix,
    "cards": cards.matrix,
    "slow-link": slow_link.matrix,
    "links": links.matrix,
}
REPEATED = ("watch", "slow-link", "cards")  # whole runs that --reps repeats
SEEDED: dict[str, Callable[[bool, int | None], Matrix]] = {  # those that are repeated over seeds; so many of them
    "accuracy": accuracy.matrix,
    "budget": budget.matrix,
    "seeds": seeds.matrix,
    "cards": cards.matrix,
}
