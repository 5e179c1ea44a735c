"""Cases of scripts that fork and start processes: rows of one script (processes_script.py), which runs twice."""

from table import NotCompared, Script, case

TOPIC = "Processes"
FILE = "processes_script.py"
ONE_SCRIPT = "Compared on one worker; a cluster of several does the same in each worker."

ROWS = {
    "a forked child that writes into its copy of the model": "fork_writes",
    "a forked child that evaluates the model": "fork_evaluates",
    "a forked child that evaluates its snapshot while the parent trains on": "snapshot",
    "a spawned process that evaluates the model that it was sent": "spawn",
    "a pool of forked processes": "pool",
    "a forked child that loads other weights into its copy and trains it with an optimizer of its own": "own_training",
    "a child of os.fork() that ends by sys.exit()": "os_fork",
    "a child of os.fork() that fails": "failing_fork",
    "a child of os.fork() that runs to the end of the script": "whole_script",
    "a child of a forked child that evaluates the model": "grandchild",
    "the model that was trained meanwhile": "model",
}
NOTES = {"own_training": "Its `optimizer.step()`, of the optimizer that its parent prepared, is refused in the child."}
for _name, _key in ROWS.items():
    case(TOPIC, _name, two=NotCompared(), note=NOTES.get(_key, ONE_SCRIPT))(Script(FILE, _key))
