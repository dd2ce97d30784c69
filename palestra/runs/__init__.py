"""What came of an experiment: run folders, their status, checkpoints, comparison and plots."""
