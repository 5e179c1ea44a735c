"""HOW are tasks started? The local launcher, its supervisor, and what runs inside a task's process."""
