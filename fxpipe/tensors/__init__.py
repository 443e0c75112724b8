"""Tensors: DTensors, the pieces of tensors that checkpoints store, and equality up to rounding."""
