"""The object stores that checkpoints may be in, the sources that data and weights may be fetched
from, and the environment variables by which a process is told where they are and with which
credentials they are used.
"""

from __future__ import annotations

from typing import Final

AUTHORIZATION: Final = "HTTP_AUTHORIZATION"
"""Variable with the value of the header `Authorization`, for files of http:// and https://."""
HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - its name
"""Variable with the token of hf://."""
CREDENTIAL_VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
    "http": (AUTHORIZATION,),
    "https": (AUTHORIZATION,),
    "hf": (HUB_TOKEN,),
}
"""By the scheme of a URL, the variables that a Secret with credentials may have as its keys."""
_PUBLIC: Final = "AZURE_STORAGE_ACCOUNT_NAME"  # it is part of every address
SECRET_VARIABLES: Final[dict[str, tuple[str, ...]]] = {
    scheme: tuple(name for name in names if name != _PUBLIC)
    for scheme, names in CREDENTIAL_VARIABLES.items()
}
"""Those of them whose values are in no log that is kept."""
CHECKPOINTS_ENDPOINT: Final = "KDIST_CHECKPOINTS_ENDPOINT"
"""Variable with the address of the server, if it is not that of the store's owner."""
CHECKPOINTS_REGION: Final = "KDIST_CHECKPOINTS_REGION"
"""Variable with the region of an s3:// bucket."""
