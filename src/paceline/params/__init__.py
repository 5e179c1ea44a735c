"""WHAT is trained? Names, shapes and offsets; which slice lives on which ps; the flat memory under them."""
