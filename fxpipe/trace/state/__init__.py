"""State: copies, compares and restores the parts of a model and of Python on which a capture depends."""
