"""The ranks of a job tell each other of an event, and stop or replay together."""
