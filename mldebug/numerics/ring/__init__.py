"""Where the statistics of tensors are kept, on the host and on devices."""
