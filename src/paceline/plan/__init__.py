"""WHAT would another topology cost? `paceline plan`: a calibration of the user's script, and a simulation of the rest."""
