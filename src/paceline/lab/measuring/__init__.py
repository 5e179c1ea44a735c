"""HOW is it measured? Scenarios side by side, whole runs, a soak; the processes, hosts and meters of them."""
