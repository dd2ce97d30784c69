"""The fan-out and the process pool under it, for everything that runs in parallel to the main process."""
