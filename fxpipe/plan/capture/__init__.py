"""Capture: makes stages from a description of inputs."""
