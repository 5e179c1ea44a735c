"""WHAT is said? Fixed frames for the hot path, msgspec structs for the rest; nothing here can execute code."""
