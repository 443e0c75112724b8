"""``record``: one run on fake tensors, operation by operation; keeps submodules without boundaries whole."""
