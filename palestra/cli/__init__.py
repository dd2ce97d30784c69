"""The commands. They parse, call the Python API and print; nothing heavy is imported before it is needed."""

from palestra.cli.main import main

__all__ = ["main"]
