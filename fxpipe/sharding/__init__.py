"""Sharding: gradients and their reduction over the data axis, and the optimizer that is cut along with them."""
