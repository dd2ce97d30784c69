"""A hook that kills the second of several ranks while it saves step 6, once: where the file `kill` is."""

import os
import signal
from pathlib import Path

from palestra.lm.shards import saver


def hook(moment) -> None:
    pass


def _killed(function, folder: Path, *rest):
    """`function`, or the end: before the shards are written, or before they are summed up."""
    if WISH.exists() and "step_000000006" in str(folder) and WISH.read_text() == function.__name__:
        WISH.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return function(folder, *rest)


SAVE, CHECKSUMS, WISH = saver.save, saver.checksums, Path("kill").absolute()
if os.environ.get("RANK") == "1":
    saver.save = lambda *rest: _killed(SAVE, *rest)
    saver.checksums = lambda *rest: _killed(CHECKSUMS, *rest)
