"""A rank that is killed or stopped in each phase of a run: what becomes of the others.

``python -m tests.faults`` runs all cases; the suite runs some of them, ``tests/faults/test_faults.py``.
"""
