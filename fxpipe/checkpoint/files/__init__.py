"""Checkpoint folders: their content, the check that a checkpoint is whole, and reading and writing without pickle."""
