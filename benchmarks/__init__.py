"""Measurements against bare scripts. `make bench` runs them all and prints ratios."""
