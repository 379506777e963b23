"""Where a run's checkpoints are, as the command line and the environment say it: a folder, or a URL
of an object store. Free of torch.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from kdist_trainer.checkpoint.storage import StoragePath
from kdist_trainer.config import CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION
from kdist_trainer.object_store.location import ObjectLocation
from kdist_trainer.object_store.store import ObjectPath, open_store


def open_location(text: str) -> StoragePath:
    """The folder, or the name in an object store, that `text` names. Where the store is, variables
    say, and credentials are in the store's own ones.

    Raises:
        ValueError: it is a URL that names no object store.
        OSError: the store cannot be opened.
    """
    if "://" not in text:
        return Path(text)
    endpoint, region = (
        os.environ.get(name, "") for name in (CHECKPOINTS_ENDPOINT, CHECKPOINTS_REGION)
    )
    location = ObjectLocation(text, endpoint, region)
    bucket = dataclasses.replace(location, url=f"{location.scheme}://{location.bucket}")
    return ObjectPath(open_store(bucket), location.prefix)
