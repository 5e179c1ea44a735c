"""The worker task: what a script sees (context), the session behind it, and what it exchanges with the ps.

`requests/` asks the ps and makes lost connections again, `step/` is what `optimizer.step()` does, `positions/` knows
where a worker is in its data, `checkpoints/` saves and restores. No framework here: see frameworks/.
"""
