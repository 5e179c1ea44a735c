"""Follow a worker through its data, so that a run can go on where it was."""
