"""HOW do people call it? `main` and one file per verb; imported by nobody, imports no torch."""
