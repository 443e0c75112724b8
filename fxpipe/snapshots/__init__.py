"""Snapshots: reads the parts of Python objects, and copies, compares and restores the parts of a model."""
