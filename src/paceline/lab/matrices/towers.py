"""DOES a second tower pay? A small and a heavy model, one tower beside two, in one process and in one each.

A matrix of the lab: `paceline lab run towers`. Pure. Document 001's towers (a copy of the model on each device, their
gradients averaged) with the same samples a step: what two towers save is below 1, what towers cost is above it. Without
cards the devices are CPUs: towers of one process take turns there, towers of two processes do not. Answers C8 (a
heavier model gains more from a second device), C21 (sync is a larger batch), C29 (k devices: k times, minus transfer).
"""

from paceline.cluster.settings import Settings
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario

MODELS = {"small": "", "heavy": "convolutions"}  # lab/scripts/worker_script's: document 000's, and convolutions
SAMPLES = 200  # a step, over all towers
AGAIN = "again"
SETTINGS = Settings(run_id="", save_every="none")


def matrix(is_quick: bool = False) -> Matrix:
    """Per model: without towers, one tower, two in one process, and one and two in processes of their own."""
    return Matrix(
        name="towers",
        title=f"Towers of document 001: {SAMPLES} samples a step, divided over the towers",
        scenarios=_scenarios(),
        rows=_rows(),
        amounts=Amounts(reps=3, steps=10, warmup_steps=3) if is_quick else Amounts(steps=60, warmup_steps=20),
        usual_step_us=17_000.0,
    )


def plain(model: str) -> str:
    return f"{model}, plain PyTorch"


def here(model: str, towers: int) -> str:
    return f"{model}, {towers} tower{'s' if towers > 1 else ''} in one process"


def there(model: str, towers: int) -> str:
    return f"{model}, {towers} tower{'s' if towers > 1 else ''}, a process each"


def _scenarios() -> tuple[Scenario, ...]:
    made = []
    for model, what in MODELS.items():
        names = (plain(model), f"{plain(model)} {AGAIN}") if model == "small" else (plain(model),)
        made += [Scenario(name=name, kind=Kind.SINGLE, what=what, batch=SAMPLES, settings=SETTINGS) for name in names]
        for count in (1, 2):
            batch = SAMPLES // count
            made.append(Scenario(name=here(model, count), kind=Kind.TOWERS, what=what, num_workers=count, batch=batch))
            made.append(
                Scenario(name=there(model, count), kind=Kind.IN_GRAPH, what=what, num_workers=count, batch=batch)
            )
    return tuple(made)


def _rows() -> tuple[Row, ...]:
    small = plain("small")
    rows = [Row(title=f"A/A: {small}, and again", scenario=f"{small} {AGAIN}", beside=small, is_noise=True)]
    for model in MODELS:
        rows += [
            Row(title=f"{here(model, 1)}, over plain", scenario=here(model, 1), beside=plain(model)),
            Row(title=f"{here(model, 2)}, over 1 tower", scenario=here(model, 2), beside=here(model, 1)),
            Row(title=f"{there(model, 2)}, over 1 tower", scenario=there(model, 2), beside=there(model, 1)),
            Row(title=f"{there(model, 2)}, over plain", scenario=there(model, 2), beside=plain(model)),
        ]
    return tuple(rows)
