"""``record``: records one run on fake tensors, operation by operation; submodules without boundaries are opaque."""
