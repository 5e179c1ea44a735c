"""The ps task: what counts (state, rounds, budget: pure), the numbers (shard), and the threads around them (service)."""
