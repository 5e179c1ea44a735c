"""WHAT came out? The file of a result, read again, told in words, compared, and drawn."""
