"""Checkpoint: a run saved and loaded."""
