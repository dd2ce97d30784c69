"""Sweeps: all runs of a spec's `sweep:` block, shared by any number of processes, each run once, and compared."""
