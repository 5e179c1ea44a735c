"""The ps task: what counts (state, rounds, budget: pure), the numbers (shard), the threads around them (service)."""
