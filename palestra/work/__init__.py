"""The one process pool, for everything that runs beside the main process."""
