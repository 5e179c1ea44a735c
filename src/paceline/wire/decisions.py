"""WHO contributed to a round? The words that ps:0's decision is told in; shared by ps and worker."""

Key = tuple[int, int]  # (worker, incarnation)
Decision = tuple[int, tuple[Key, ...]]  # (round, contributors in worker order)
