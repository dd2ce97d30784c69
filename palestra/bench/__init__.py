"""Benchmarks: the shipped specs over seeds, and the table of what came of them, made from run folders alone."""
