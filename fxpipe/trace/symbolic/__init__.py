"""``symbolic``: torch.fx's tracer, which needs no example batch and takes torch.nn modules as leaves."""
