"""The key of a job's exchanges: who has it is an agent of the job.

In a cluster the key is in a Secret, which the kubelet mounts and no role of kdist's can read; with
`kdist run` it is in the run's private folder. The rendezvous state, which more people can read, has
a nonce for each round: the token that admits to the round's exchange follows from both. Free of
torch.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

KEY_FILE = "exchange.key"
"""The name of the mounted file."""
_LEAST_BYTES = 32
TOKEN_DIGITS = 32
_FINGERPRINT_DIGITS = 16


class ExchangeKey:
    """The key, once there is one: a Secret may be mounted after the agent has started. It does not
    change any more then.

    Args:
        read: Returns the key; empty, or an error of the file or the store, while there is none.
    """

    def __init__(self, read: Callable[[], bytes]) -> None:
        self._read = read
        self._value = b""

    def token(self, *fields: object) -> str | None:
        """The token that follows from these fields; None without a key."""
        return self._digest(("token", *fields), TOKEN_DIGITS)

    def fingerprint(self) -> str | None:
        """Tells whether two agents have the same key; None without a key."""
        return self._digest(("fingerprint",), _FINGERPRINT_DIGITS)

    def is_there(self) -> bool | None:
        """Whether there is a key."""
        return self.fingerprint() is not None

    def _digest(self, fields: tuple[object, ...], digits: int) -> str | None:
        if not self._value:
            try:
                found = self._read().strip()
            except (OSError, RuntimeError):  # a DistError is one
                return None
            if len(found) < _LEAST_BYTES:  # anybody could guess it
                return None
            self._value = found
        return hmac.digest(self._value, repr(fields).encode(), "sha256").hex()[:digits]


NO_KEY = ExchangeKey(bytes)
"""Admits to no exchange."""
