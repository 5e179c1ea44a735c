"""Save the state of a run, restore it, and bring it to a ps that lost its memory."""
