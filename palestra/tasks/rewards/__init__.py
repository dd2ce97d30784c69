"""Rewards in place of a task\'s own verifier: functions, language models as judges, reward models."""
