"""Checks: runs a capture beside the model, on real or made-up numbers, and compares results, rows and sizes."""
