"""The one fan-out and the process pool under it, for everything that runs beside the main process."""
