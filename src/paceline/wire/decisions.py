"""Types of ps:0's decisions about who contributed to a round; shared by ps and worker."""

Key = tuple[int, int]  # (worker, incarnation)
Contributor = tuple[int, int, int]  # (worker, incarnation, how many of its gradients)
Decision = tuple[int, tuple[Contributor, ...]]  # (round, contributors in worker order)

COPY: Contributor = (-1, 0, 0)  # stands last in a decision: with this round's update every shard copies itself
