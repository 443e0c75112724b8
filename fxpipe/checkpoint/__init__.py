"""Checkpoint: writes a rank's part of a run, pieces of named tensors and plain data, to files and reads the files."""
