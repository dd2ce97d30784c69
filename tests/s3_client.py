"""s3fs, and one copy of what botocore knows of the service for all clients: each would parse it anew."""

from typing import Any

import botocore.session
import s3fs  # noqa: F401 - for whoever is forked from a process that has imported this
from botocore.loaders import Loader

_known: dict[Any, Any] = {}
_init = Loader.__init__


def _shared(self: Loader, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self._cache = _known  # type: ignore[attr-defined]


Loader.__init__ = _shared  # type: ignore[method-assign]
botocore.session.get_session().create_client(
    "s3", region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
)
