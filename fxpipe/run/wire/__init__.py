"""Wire: the messages of a step."""
