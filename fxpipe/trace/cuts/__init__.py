"""Cuts: where a model is cut, by markers or by names."""
