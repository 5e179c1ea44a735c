"""WHAT does a parameter server cost a TensorFlow program, on paceline and on TensorFlow's own runtime?

A matrix of the lab: `paceline lab run tensorflow`. Pure. Document 000's recipe; each is held against one process of its
own kind: Keras in tf.function against the same, TensorFlow's graph and session against the same.
"""

from paceline.cluster.settings import Settings
from paceline.lab.scenario import KERAS, Amounts, Kind, Matrix, Row, Scenario

SINGLE = "Keras, single process"
AGAIN = "Keras, single process again"
OURS = "Keras on paceline, 1 ps + 1 worker"
TWO = "Keras on paceline, 1 ps + 2 workers, async"
THEIR_SINGLE = "TensorFlow's runtime, single process"
THEIRS = "TensorFlow's runtime, 1 ps + 1 worker"
THEIR_TWO = "TensorFlow's runtime, 1 ps + 2 workers, async"
PEER = "tensorflow_graph"
SHM = Settings(run_id="", lane="shm")


def matrix(is_quick: bool = False) -> Matrix:
    """Seven scenarios in five rows. The bar: half of what TensorFlow's own runtime costs (3.1 on two cores)."""
    scenarios = (
        Scenario(name=SINGLE, kind=Kind.SINGLE, what=KERAS),
        Scenario(name=AGAIN, kind=Kind.SINGLE, what=KERAS),
        Scenario(name=OURS, kind=Kind.CLUSTER, num_ps=1, what=KERAS, settings=SHM),
        Scenario(name=TWO, kind=Kind.CLUSTER, num_ps=1, num_workers=2, what=KERAS, settings=SHM),
        Scenario(name=THEIR_SINGLE, kind=Kind.PEER, what=PEER),
        Scenario(name=THEIRS, kind=Kind.PEER, num_ps=1, what=PEER),
        Scenario(name=THEIR_TWO, kind=Kind.PEER, num_ps=1, num_workers=2, what=PEER),
    )
    rows = (
        Row(title="A/A: single against single", scenario=AGAIN, beside=SINGLE, is_noise=True),
        Row(title=OURS, scenario=OURS, beside=SINGLE, bar=1.55),
        Row(title=THEIRS, scenario=THEIRS, beside=THEIR_SINGLE),
        Row(title=TWO, scenario=TWO, beside=SINGLE),
        Row(title=THEIR_TWO, scenario=THEIR_TWO, beside=THEIR_SINGLE),
    )
    amounts = Amounts(reps=3, steps=100) if is_quick else Amounts()
    return Matrix(name="tensorflow", scenarios=scenarios, rows=rows, amounts=amounts, usual_step_us=1_800.0)
