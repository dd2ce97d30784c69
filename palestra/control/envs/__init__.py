"""Environments: making them, stepping them fast, and saving their state."""
