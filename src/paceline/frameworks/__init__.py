"""What each framework brings to a worker: its tensors, its optimizer, its data."""
