"""Several hosts on one machine, for tests of what reaches other nodes: see bed.py."""
