"""Arrows point one way, hazards have one door, deciding code is pure: read off the source, nothing is run."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "paceline"

# Who may import whom, in the order data flows; a folder may always import itself.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "files": set(),
    "forks": {"errors"},
    "hangup": set(),
    "exits": {"errors", "telemetry"},
    "cluster": {"errors", "files", "modes", "params", "transport"},  # for the names that flags may take
    "params": {"errors", "forks"},
    "views": {"params"},
    "modes": {"errors"},
    "wire": {"errors", "modes", "params"},
    "transport": {"errors", "forks", "params", "wire"},
    "telemetry": {"errors", "forks", "files", "cluster", "modes", "wire"},
    "checkpoint": {"errors", "files", "params", "modes"},
    "server": {"errors", "cluster", "params", "views", "modes", "wire", "transport", "telemetry", "checkpoint"},
    "worker": {
        "errors", "forks", "version", "cluster", "params", "views", "modes", "wire", "transport", "telemetry",
        "checkpoint",
    },
    "frameworks": {
        "errors", "exits", "forks", "version", "cluster", "params", "views", "modes", "wire", "transport", "telemetry",
        "checkpoint", "worker",
    },  # worker/framework imports them by name
    "ingraph": {
        "errors", "exits", "forks", "hangup", "version", "cluster", "params", "views", "modes", "wire", "transport",
        "telemetry", "worker", "frameworks",
    },
    "tf1": {"ingraph"},  # TensorFlow's names under a short one
    "datasets": {"errors"},
    "models": {"errors"},
    "launchers": {
        "errors", "exits", "forks", "hangup", "files", "version", "cluster", "params", "modes", "wire", "transport",
        "telemetry", "checkpoint", "server", "worker", "frameworks", "ingraph", "datasets", "models", "",
    },
    "lab": {
        "errors", "hangup", "version", "cluster", "params", "modes", "wire", "transport", "telemetry", "checkpoint",
        "worker", "frameworks", "ingraph", "datasets", "models", "launchers", "",
    },
    "plan": {
        "errors", "cluster", "modes", "wire", "server", "worker", "telemetry", "launchers", "lab",
    },
    "cli": {
        "errors", "hangup", "version", "cluster", "params", "modes", "telemetry", "checkpoint", "worker",
        "launchers", "lab", "datasets", "models", "plan", "",
    },
    "": {"version", "cluster", "errors", "ingraph", "launchers", "worker", "cli"},  # the package's public names
}  # fmt: skip

PURE = [
    "modes",
    "cluster/membership.py",
    "cluster/chaos.py",
    "cluster/devices.py",
    "cluster/hosts.py",
    "cluster/toml_text.py",
    "cluster/hostlist.py",
    "cluster/schedulers.py",
    "cluster/pinning.py",
    "cluster/plain.py",
    "checkpoint/policy.py",
    "launchers/restart.py",
    "launchers/ray/bundles.py",
    "launchers/emitting/docker.py",
    "launchers/hosts/diagnosis.py",
    "launchers/hosts/table.py",
    "launchers/emitting/kubernetes.py",
    "launchers/emitting/scripts.py",
    "checkpoint/state.py",
    "checkpoint/manifest.py",
    "checkpoint/tensors.py",
    "checkpoint/compare.py",
    "server/control",
    "ingraph/schedule.py",
    "ingraph/partition.py",
    "telemetry/staleness.py",
    "telemetry/usage.py",
    "telemetry/verify.py",
    "telemetry/verify_ps.py",
    "telemetry/verify_records.py",
    "telemetry/verify_worker.py",
    "lab/tables.py",
    "lab/cells.py",
    "lab/scripts/curves.py",
    "lab/scripts/sizes.py",
    "lab/matrices/overhead.py",
    "lab/matrices/modes.py",
    "lab/matrices/apply.py",
    "lab/matrices/safety.py",
    "lab/matrices/in_graph.py",
    "lab/matrices/looks.py",
    "lab/matrices/wording.py",
    "lab/matrices/document_runs.py",
    "lab/matrices/document_rows.py",
    "lab/matrices/document_times.py",
    "lab/matrices/documents.py",
    "lab/matrices/tensorflow.py",
    "lab/axes.py",
    "lab/results/figures.py",
    "lab/matrices/carrier_matrix.py",
    "lab/matrices/peers.py",
    "lab/results/lines.py",
    "lab/results/older.py",
    "lab/results/half_rows.py",
    "lab/results/cables.py",
    "lab/results/facts.py",
    "lab/results/limits.py",
    "lab/results/telling.py",
    "lab/results/comparing.py",
    "lab/results/drawables.py",
    "lab/results/series.py",
    "lab/results/epoch_series.py",
    "lab/results/pushing.py",
    "lab/results/scaling_series.py",
    "lab/results/task_series.py",
    "plan/costs.py",
    "plan/fitting.py",
    "plan/planning.py",
    "plan/sharing.py",
    "plan/simulate.py",
    "plan/tasks.py",
    "plan/timings.py",
    "plan/topology.py",
    "lab/matrices/seeds.py",
    "lab/matrices/slow_link.py",
    "lab/matrices/watch.py",
    "lab/scripts/watched.py",
    "lab/matrices/cards.py",
    "lab/matrices/towers.py",
    "lab/matrices/scale.py",
    "lab/scripts/pushes.py",
    "lab/matrices/links.py",
    "lab/scripts/crossed.py",
]
IMPURE_MODULES = {"time", "socket", "threading", "torch", "os", "subprocess", "random", "secrets", "select", "asyncio"}

# One door a hazard: the only places that may import or name it.
DOORS: dict[str, tuple[str, ...]] = {
    "socket": ("transport/", "launchers/ports.py", "launchers/task.py", "launchers/hosts/links.py",
               "launchers/hosts/probe.py", "launchers/keeper.py", "launchers/nursery.py", "launchers/forking.py",
               "launchers/ray/actors.py", "launchers/ray/ray_cluster.py", "server/memory.py",
               "telemetry/", "lab/", "datasets/download.py"),
    "subprocess": ("launchers/", "lab/"),
    "torch": ("server/numbers/", "frameworks/torch/",
              "views.py", "ingraph/", "models/", "lab/", "launchers/demos/"),
    "keras": ("frameworks/keras/", "lab/scripts/keras_script.py"),
    "tensorflow": ("frameworks/keras/", "lab/scripts/keras_script.py"),
    "grpc": ("transport/grpc.py",),
    "ray": ("launchers/ray/actors.py", "launchers/ray/growing.py", "launchers/ray/ray_cluster.py",
            "launchers/ray/on_ray.py"),
    "ctypes": ("launchers/kernel.py", "params/arena.py"),
}  # fmt: skip
ENVIRONMENT = ("cluster/discovery.py", "launchers/", "cli/", "lab/", "plan/calibrate.py", "plan/timed_script.py")
FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "_pickle"}
FORBIDDEN_CALLS = re.compile(r"\btorch\.(load|save)\(|(?<![\w.])(eval|exec)\(|shell=True|recv_pyobj")


@cache
def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def folder_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if len(parts) > 1:
        return parts[0]
    return "" if parts[0] in ("__init__.py", "__main__.py") else parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    return list(imported(tree_of(path)))


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "paceline":
                yield from ((node.lineno, f"paceline.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def test_arrows_point_one_way() -> None:
    unknown = {folder_of(path) for path in sources()} - ARROWS.keys()
    assert not unknown, f"new folders: say in ARROWS whom they may import: {unknown}"
    assert not [wrong for path in sources() for wrong in wrong_arrows(path)]


def wrong_arrows(path: Path) -> Iterator[str]:
    here = folder_of(path)
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != "paceline":
            continue
        there = parts[1] if len(parts) > 1 else ""
        if there not in ARROWS:
            there = ""  # a public name of the package
        if there != here and there not in ARROWS[here]:
            yield f"{path.name}:{line}: {here or 'paceline'} must not import {there}"


def test_the_arrows_have_no_cycle() -> None:
    left = {name: set(targets) - {""} for name, targets in ARROWS.items() if name}
    while left:
        free = [name for name, targets in left.items() if not targets & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for name in free:
            del left[name]


def is_deciding(path: Path) -> bool:
    relative = path.relative_to(ROOT).as_posix()
    return any(relative == pure or relative.startswith(pure + "/") for pure in PURE)


def test_deciding_code_is_pure() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: pure code imports {name}"
        for path in sources()
        if is_deciding(path)
        for line, name in imports(path)
        if name.split(".")[0] in IMPURE_MODULES
    ]


def test_one_door_per_hazard() -> None:
    assert not [wrong for path in sources() for wrong in hazards(path)]


def hazards(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT).as_posix()
    for line, name in imports(path):
        top = name.split(".")[0]
        if top in FORBIDDEN_IMPORTS:
            yield f"{relative}:{line}: {name} can execute what it reads"
        if top in DOORS and not relative.startswith(DOORS[top]):
            yield f"{relative}:{line}: {top} belongs to {DOORS[top]}"
    if not relative.startswith(ENVIRONMENT):
        named = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        if read := named & {"os.environ", "os.getenv", "sys.argv"}:
            yield f"{relative}: {read} belongs to {ENVIRONMENT}"
    if found := FORBIDDEN_CALLS.search(path.read_text()):
        yield f"{relative}: {found.group()}"


def test_framework_free_files_stay_so() -> None:
    for name in (
        "worker/requests/client.py",
        "worker/requests/joining.py",
        "worker/requests/heartbeat.py",
        "worker/requests/link.py",
        "worker/step/optimizer_state.py",
        "worker/kv.py",
        "worker/checkpoints/saving.py",
        "worker/control.py",
        "worker/context.py",
        "worker/ending.py",
        "worker/evaluator.py",
        "worker/preparation.py",
        "worker/session.py",
        "worker/step/outgoing.py",
        "worker/step/local_steps.py",
        "worker/step/training_step.py",
    ):
        assert all(m.split(".")[0] != "torch" for _, m in imports(ROOT / name)), name


def loaded_by(start: str) -> set[str]:
    """What importing a module of ours imports: only what stands at the top, not what functions import when called."""
    seen: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        path = ROOT.parent / Path(*name.split("."))
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        for node in ast.parse(file.read_text()).body if file.exists() else ():
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return seen


@pytest.mark.parametrize("start", ["launchers.entry", "launchers.task", "frameworks.keras.preparation"])
def test_a_tensorflow_worker_needs_no_torch(start: str) -> None:
    loaded = loaded_by(f"paceline.{start}")
    assert f"paceline.{start}" in loaded and "paceline.errors" in loaded
    assert not [name for name in loaded if name.split(".")[0] == "torch" or name == "paceline.views"]
    assert "torch" in loaded_by("paceline.frameworks.torch.preparation"), "the look itself finds torch where it is"


def test_every_module_has_a_docstring() -> None:
    assert not [path for path in sources() if not ast.get_docstring(tree_of(path))]


def test_text_is_written_and_read_in_an_encoding_that_is_said() -> None:
    """Else it is the locale's: what one host writes, another cannot read."""
    found = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and is_text(node) and "encoding" not in {each.arg for each in node.keywords}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def is_text(node: ast.Call) -> bool:
    """Whether this call opens a file as text."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("read_text", "write_text"):
        return True
    if name == "fdopen" or (name == "open" and isinstance(node.func, ast.Name)):
        position = 1
    elif name == "open" and node.args and isinstance(node.args[0], ast.Constant):  # of a path
        position = 0
    else:
        return False
    modes = [each.value for each in node.keywords if each.arg == "mode"] + node.args[position : position + 1]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "r"
    return isinstance(mode, str) and set(mode) <= set("rwax+t") and "b" not in mode
