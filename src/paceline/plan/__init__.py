"""WHAT would another topology cost? `paceline plan`: calibrates the user's script, simulates the rest."""
