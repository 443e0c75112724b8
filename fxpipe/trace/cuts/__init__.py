"""Cuts: the boundaries at which a model is cut, by ``stage_boundary`` in forward or by submodules' names."""
