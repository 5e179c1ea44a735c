"""The worker task: push, pull and wait (client, no framework), and what users of a framework see (torch)."""
