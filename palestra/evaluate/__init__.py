"""How good a model is at a task: greedy accuracy, pass@k, likelihoods, reports."""
