"""Cases of loops of real libraries (libraries_script.py); test_libraries.py runs them where they are installed."""

from table import EQUAL, Refused, Script, Verdict, case

TOPIC = "Libraries"
FILE = "libraries_script.py"
FIRST = "Call `ctx.prepare()` first, and give the library what it returns."
ASSIGN = "With several workers: on all of them inside `with ctx.assign():`."
ROLLED_BACK = Refused("load_state_dict.. in the middle of a run.*libraries_script.py, line.*with ctx.assign")

WRITTEN = Refused("written by the script after prepare.*with ctx.assign")


def row(key: str, name: str, one: Verdict = EQUAL, two: Verdict = EQUAL, note: str = "") -> None:
    case(TOPIC, name, one, two, note)(Script(FILE, key))


row("accelerate", "accelerate: accumulate(), clip_grad_norm_(), a scheduler")
row("accelerate_bf16", 'accelerate: mixed_precision="bf16"')
row("accelerate_state", "accelerate: save_state() and load_state() in the middle", two=ROLLED_BACK, note=ASSIGN)
row(
    "accelerate_first", "accelerate: its prepare() before ours",
    Refused("AcceleratedOptimizer that wraps an AdamW.*libraries_script.py, line"),
    Refused("AcceleratedOptimizer that wraps an AdamW.*libraries_script.py, line"), FIRST,
)  # fmt: skip
row("trainer", "transformers.Trainer(optimizers=…), gradients accumulated and clipped")
row("trainer_own", "transformers.Trainer that prepares in its create_optimizer()")
row("trainer_checkpoints", "transformers.Trainer with checkpoints and evaluation")
row("trainer_best", "transformers.Trainer(load_best_model_at_end=True)")
row("lightning", "lightning.Trainer.fit(), gradients accumulated and clipped")
row("lightning_configure", "lightning.Trainer.fit(), prepared in configure_optimizers()")
row("lightning_manual", "lightning.Trainer.fit() with manual optimization")
row("lightning_bf16", 'lightning.Trainer(precision="bf16-mixed")')
row("lightning_checkpoints", "lightning.Trainer with ModelCheckpoint and EarlyStopping")
row("lightning_averages", "lightning.Trainer with StochasticWeightAveraging", two=WRITTEN, note=ASSIGN)
row("fabric", "lightning.Fabric: setup(), backward(), clip_gradients()")
row(
    "fabric_first", "lightning.Fabric: its setup() before ctx.prepare()",
    Refused("FabricAdamW that wraps an AdamW.*libraries_script.py, line"),
    Refused("FabricAdamW that wraps an AdamW.*libraries_script.py, line"), FIRST,
)  # fmt: skip
