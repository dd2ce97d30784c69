"""Verifiers: final answers, mathematics, code and instructions. No torch."""
