"""tiny_model: what shrinks, builds and checks a model."""
