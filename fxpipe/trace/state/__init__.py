"""State: copies, compares and restores the parts of a model and of Python on which a capture depends.

1. ``contents``: the parts of a value that may change in place. The other files use it.
2. ``snapshot``: everything that a run of a model may change, to compare and to restore. ``generators``: the model's own
   random generators.
3. ``attributes``: what forward sets while it is traced. ``reads``: what it reads, compared before each call.
4. ``replay``: runs a computation again from the same state, and compares numbers.
"""
