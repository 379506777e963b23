"""Lines of an answer that is still being written: of a watch or of a log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def read_lines(response: Any) -> Iterator[bytes]:
    """Whole lines without their ends, as they come; the last one too if nothing ends it.

    Raises `ConnectionError` where the connection is cut or stays silent longer than its time-out.
    """
    import urllib3

    rest = b""
    try:
        for piece in response.stream(2**16, decode_content=True):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
    except urllib3.exceptions.HTTPError as error:
        raise ConnectionError(str(error)) from error
    finally:
        # A connection whose answer was not read to its end is of no further use.
        response.close()
        response.release_conn()
    if rest:
        yield rest
