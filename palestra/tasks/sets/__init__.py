"""The tasks, one file a family."""
