"""The ps task: decisions (control, pure), numbers, the journal of both, and the threads around them (service)."""
