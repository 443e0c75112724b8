"""Snapshots: reads the parts of Python objects, and copies, compares and restores the parts of a model.

1. ``contents``: the parts of a value that may change in place. ``snapshot`` uses it.
2. ``snapshot``: everything that a run of a model may change, to compare and to restore.
"""
