"""What `make` runs: the notebooks at two scales, and the tables of results."""
