"""example_inputs: keyword arguments that the forward of any model takes."""
