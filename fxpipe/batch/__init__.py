"""Batch: describes, counts, splits and joins inputs; finds the rows of outputs; joins the inputs of groups."""
