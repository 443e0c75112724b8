"""Checkpoints as folders: what is in one, whether it is whole, and how it is written and read without any pickle."""
