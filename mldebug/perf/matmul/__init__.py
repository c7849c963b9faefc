"""The maximum achievable matmul FLOPS of a device, and how near to it a model comes."""
