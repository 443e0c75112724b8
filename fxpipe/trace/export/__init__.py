"""``export``: torch.export, for what branches on shapes."""
