"""From prompts to verified trajectories: workflows, and the executor that keeps a bounded number of them in flight."""
