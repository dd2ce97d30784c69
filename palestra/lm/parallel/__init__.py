"""One model on many ranks: a layout of the ranks, and functions that split a model by it."""
