"""``export``: torch.export, for models that branch on shapes."""
