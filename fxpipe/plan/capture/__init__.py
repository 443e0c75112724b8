"""Capture: makes stages from a description of inputs, and checks the stages against the model."""
