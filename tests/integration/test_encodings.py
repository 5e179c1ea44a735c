"""Names in any writing, on terminals that cannot print them: that ends no run and no verb."""

import json
from pathlib import Path

import pytest
from processes import Processes

pytestmark = pytest.mark.timeout(900)

FOLDER, SCRIPT, RUN = "größe", "träin文.py", "läuf-文"
PROGRAM = """
import sys, torch, paceline

class Größe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.größe, self.文字 = torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
    def forward(self, x):
        return self.文字(self.größe(x))

ctx = paceline.init()
print("schön 文字", sys.argv[1:])
model = Größe()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ctx.prepare(model, optimizer)
for _ in ctx.steps(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
if "fails" in sys.argv:
    raise ValueError("Größe 文")
"""
TERMINALS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1", "LC_ALL": "C.UTF-8"},
    "no UTF-8 at all": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},  # nor in names of files
    "LANG=C": {"LANG": "C"},
}


FULL = ("latin-1", "LANG=C", "no UTF-8 at all")  # in the long tests only


NIGHTLY = pytest.mark.nightly("a terminal whose encoding one verb cannot print in")


@pytest.mark.parametrize(
    "terminal", [pytest.param(name, marks=NIGHTLY if name in FULL else pytest.mark.slow) for name in TERMINALS]
)
def test_no_verb_ends_because_a_name_cannot_be_printed(terminal: str, processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / SCRIPT).write_text(PROGRAM, encoding="utf-8")
    extra = TERMINALS[terminal]

    def paceline(*words: object, code: int = 0) -> str:
        process = processes.start("paceline", *words, cwd=folder, within_s=200, **extra).ends_with(code)
        assert "UnicodeEncodeError" not in process.text and "UnicodeDecodeError" not in process.text
        return process.text

    run = ["run", "--ps=1", "--workers=2", "--lane=shm", f"--run-dir={RUN}", "--log-device-placement", "--show-logs"]
    paceline(*run, SCRIPT, 20, "bär")
    assert "Traceback" in paceline(*run, "--max-restarts=0", "--resume=auto", SCRIPT, 30, "fails", code=1)
    told = json.loads((folder / RUN / "summary.json").read_text(encoding="utf-8"))
    assert told["global_step"] == 30
    assert len(list((folder / RUN / "telemetry").glob("*.jsonl"))) > 0
    checkpoint = max((folder / RUN / "checkpoints").glob("step-*"))
    for words in (
        ["verify", RUN], ["ckpt", "ls", RUN], ["ckpt", "inspect", checkpoint],
        ["ckpt", "verify", checkpoint], ["ckpt", "diff", checkpoint, checkpoint],
        ["ckpt", "export", checkpoint, "modell-ä.npz"],
        ["emit", "compose", SCRIPT, "bär"], ["run", "--dry-run", SCRIPT, "bär"],
    ):  # fmt: skip
        paceline(*words)
    state = json.loads(paceline("ckpt", "inspect", "--json", checkpoint))
    assert "größe.weight" in json.dumps(state, ensure_ascii=False)
    assert json.loads(paceline("verify", "--json", RUN))
    for words in (["ctl", "show", RUN], ["run", "nicht-da-ö.py"], ["ckpt", "inspect", "nicht-da-ö"]):
        assert "Traceback" not in paceline(*words, code=2)
    assert "Traceback" not in paceline("kv", "ls", RUN, code=1), "it has ended"
