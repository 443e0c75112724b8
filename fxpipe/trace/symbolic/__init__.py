"""``symbolic``: torch.fx's tracer, which needs no example batch, and keeps modules whole."""
