"""Batch: how inputs are described, counted, split and joined; rows of outputs, and inputs of groups."""
