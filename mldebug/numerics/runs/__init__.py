"""record_run and compare: two runs, and the first place where they part."""
