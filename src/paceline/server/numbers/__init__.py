"""The parameters of one ps, and how an update changes them."""
