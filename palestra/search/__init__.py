"""Search: trials of any spec with sampled values, paused and promoted at rungs, and their ranking."""
