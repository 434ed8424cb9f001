"""Putting layers into a model while it is loaded."""
