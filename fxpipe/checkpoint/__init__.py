"""Checkpoint: what a rank has of a run, as pieces of named tensors and plain data, in files and back."""
