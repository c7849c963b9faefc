"""An event explained by running the forward and the backward of its step again."""
