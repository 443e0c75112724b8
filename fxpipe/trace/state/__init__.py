"""State: the parts of a model and of Python that a capture depends on, taken, compared and put back."""
