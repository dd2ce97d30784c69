"""Speedruns: submissions of a spec with the measurements of its run, a leaderboard and its Pareto frontier."""
