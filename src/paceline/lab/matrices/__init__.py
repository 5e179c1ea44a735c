"""WHAT is measured beside what? A file a matrix, and what a user's own file asks for."""
