"""doctor: what can be seen of a node without running anything heavy."""
