"""Capture: the stages of each kind of batch, made by a tracer from a description of its inputs."""
