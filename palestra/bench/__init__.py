"""Benchmarks: the shipped specs over seeds, and the table of their scores."""
