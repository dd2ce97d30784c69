"""Deep RL: environments, networks, algorithms, the collector and the trainer of kind `control`."""
