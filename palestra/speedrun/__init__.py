"""Speedruns: train well for little, and compare: a submission is a spec with all that was measured of its run."""
