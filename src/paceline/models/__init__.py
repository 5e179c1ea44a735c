"""WHICH models come along? Small ones that demos, tests and the lab train; yours need not be here.

Called by scripts. Importing this package imports no torch; importing one of its modules does.
"""
