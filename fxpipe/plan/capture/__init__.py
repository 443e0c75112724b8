"""Capture: from a description of inputs to stages that were checked against the model."""
