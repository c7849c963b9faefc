"""The recorder under torch.compile."""
