"""Connect to the ps, join, and ask: one request, one reply."""
