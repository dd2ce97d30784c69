"""What kind `control` is made of: environments, networks and the algorithms."""
