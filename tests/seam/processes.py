"""Cases of scripts that fork and start processes: rows of one script (processes_script.py), which runs twice."""

from table import NotCompared, case

TOPIC = "Processes"
ONE_SCRIPT = "Compared on one worker; a cluster of several does the same in each worker."

ROWS = {
    "a forked child that writes into its copy of the model": "fork_writes",
    "a forked child that evaluates the model": "fork_evaluates",
    "a forked child that evaluates its snapshot while the parent trains on": "snapshot",
    "a spawned process that evaluates the model that it was sent": "spawn",
    "a pool of forked processes": "pool",
    "a child of os.fork() that ends by sys.exit()": "os_fork",
    "the model that was trained meanwhile": "model",
}
for _name, _key in ROWS.items():
    case(TOPIC, _name, two=NotCompared(), note=ONE_SCRIPT)(_key)
