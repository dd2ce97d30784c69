"""What each rank does in test_lm_ranks.py to train or resume runs, one after the other in the same processes.

torchrun --nproc-per-node 2 tests/ranks_runs.py CALLS.json

Each call is the arguments of `palestra.run`.
"""

import json
import sys
from pathlib import Path

import palestra

for arguments in json.loads(Path(sys.argv[1]).read_text()):
    run = palestra.run(**arguments, quiet=True)
    assert run.state == "done", run.state
