"""What an experiment is: typed specs, and how they are loaded, composed, overridden and checked."""
