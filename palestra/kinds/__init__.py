"""One small file for each kind of experiment: what a kind is made of, and how its sessions are run as one trial."""
