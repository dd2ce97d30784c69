"""The results of experiments: run folders, status, checkpoints, comparison and plots."""
