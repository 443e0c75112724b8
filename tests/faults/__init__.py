"""A rank that is killed or stopped in each phase of a run: what becomes of the others.

The suite runs some of the cases, ``FXPIPE_ALL=1`` all: ``tests/faults/test_faults.py``.
"""
