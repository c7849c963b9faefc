"""Which CPUs are near a GPU, and binding a rank to them."""
