"""The worker task: push, pull and wait (client, no framework), and what a script sees (context)."""
