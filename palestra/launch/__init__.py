"""Starts runs on machines, here or elsewhere, and follows them; what runs there is `palestra` and Ray."""
