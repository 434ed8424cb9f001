"""How tensors get into a model, and out of it."""
