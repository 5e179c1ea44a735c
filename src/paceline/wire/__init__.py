"""Messages between tasks: fixed frames for the hot path, msgspec structs for the rest; none can execute code."""
