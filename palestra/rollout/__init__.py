"""From prompts to judged trajectories: workflows, and the executor that keeps a bounded number of them at work."""
