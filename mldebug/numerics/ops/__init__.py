"""A look at every operation: which one made the first bad value, out of what, and why."""
