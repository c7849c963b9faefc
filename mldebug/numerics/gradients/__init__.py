"""Gradients, the loss scale, and what optimizers remember."""
