"""Training loops and loggers of other libraries."""
