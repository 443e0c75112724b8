"""State: what of a model and of Python a capture depends on: taken, compared and put back."""
