"""Step: one call of ``forward_backward``, from the batch to the loss."""
