"""Step: runs a call of ``forward_backward``, from the batch to the loss."""
