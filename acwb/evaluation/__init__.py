"""Proves and measures: bitwise equality, peaks, times, batch sizes, other methods."""
