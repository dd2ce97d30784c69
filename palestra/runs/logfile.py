"""log.txt: a copy of what Palestra says, in the session's folder."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.runs.redact import redact


class _Redacting(logging.Formatter):
    """Lines, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


@contextmanager
def logging_to(path: Path) -> Iterator[logging.Handler]:
    """Copy what `palestra` loggers say, from INFO on, into the session's log.txt."""
    logger = logging.getLogger("palestra")
    handlers: list[logging.Handler] = []
    if not logger.hasHandlers() and logging.lastResort is not None:
        handlers.append(logging.lastResort)  # with a handler of its own the logger would stop warning on stderr
    file = logging.FileHandler(path, encoding="utf-8")
    file.setLevel(logging.INFO)
    file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers.append(file)
    level = logger.level
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield file
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
        logger.setLevel(level)
        file.close()
