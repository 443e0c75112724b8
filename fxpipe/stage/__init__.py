"""Stage: the code that runs a stage: its forward and backward, opaque calls, modes, and what a loss is."""
