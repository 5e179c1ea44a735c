"""Everything that a ps decides, as pure code: events and the time come in, actions go out."""
