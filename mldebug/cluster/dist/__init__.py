"""dist-test: the ranks of a job, their phases and who is to blame."""
