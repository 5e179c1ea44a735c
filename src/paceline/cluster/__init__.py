"""WHO takes part? Cluster, job, task; where a task learned which one it is; who is alive."""
