"""Search over the fields of any spec: proposals, rungs, trials side by side, and what came of them."""
