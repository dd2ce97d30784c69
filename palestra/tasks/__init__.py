"""Prompts whose answers can be checked: rows, mixing and curricula, verifiers, the sandbox. No torch."""
