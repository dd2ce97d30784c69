"""One file per kind of experiment: what it is assembled from, and how its sessions are run as one trial."""
