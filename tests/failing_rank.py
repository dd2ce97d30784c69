"""A hook that makes the second of several ranks fail in its fourth step."""

import os

from palestra.lm.objectives import NextToken


def hook(moment) -> None:
    pass


def _fail(self: NextToken, step: int):
    if step == 3:
        raise ArithmeticError("the second rank has had enough")
    return BATCH(self, step)


BATCH = NextToken.batch
if os.environ.get("RANK") == "1":
    NextToken.batch = _fail
