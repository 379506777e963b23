"""`python -m kdist_trainer.fetch.upload`: sends files of this machine to a folder of an object
store, as `python -m kdist_trainer.fetch` fetches them: with SHA256SUMS, which is written last.

Standard input is a JSON document with the paths of the `files` by their names, and the text of
SHA256SUMS, `sums`. A folder that has this SHA256SUMS is complete, and is left as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from kdist_trainer.errors import DataError
from kdist_trainer.fetch.bucket import PARALLEL
from kdist_trainer.fetch.fetcher import LARGEST_SUMS, SUMS, parse_sums
from kdist_trainer.formats.json_text import encode_json
from kdist_trainer.formats.untrusted_text import parse_json
from kdist_trainer.object_store.store import ObjectLocation, ObjectStore

_SECONDS: Final = 600.0  # for one file, on a slow connection


def upload(location: ObjectLocation, files: Mapping[str, str], sums: str) -> int:
    """Send the files, unless they are there; returns how many were sent.

    Raises:
        DataError: a file is not the one of which `sums` has the digest.
        OSError: a file cannot be read, or the store failed.
    """
    digests, whole = parse_sums(sums.encode(), SUMS), sums.encode()
    with suppress(FileNotFoundError):
        # asked with the usual time limit, which a wrong address exceeds soon
        if ObjectStore(location, any_names=True).get(SUMS, LARGEST_SUMS).data == whole:
            return 0
    store = ObjectStore(location, retry_seconds=_SECONDS, any_names=True)

    def send(name: str) -> None:
        data = Path(files[name]).read_bytes()
        if sha256(data).hexdigest() != digests[name]:
            raise DataError(f"{files[name]} has changed while it was sent: run the command again")
        store.put(name, data)

    with ThreadPoolExecutor(PARALLEL, "upload") as pool:
        for sent in [pool.submit(send, name) for name in files]:
            try:
                sent.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    store.put(SUMS, whole)
    return len(files)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one upload; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kdist_trainer.fetch.upload")
    parser.add_argument("--url", required=True, help="folder of an object store")
    parser.add_argument("--endpoint", default="", help="address of the server, if not the cloud's")
    parser.add_argument("--region", default="", help="of a bucket of s3://")
    given = parser.parse_args(arguments)
    request = parse_json(sys.stdin.buffer.read())
    try:
        location = ObjectLocation(given.url, given.endpoint, given.region)
        count = upload(location, request["files"], request["sums"])
    except (DataError, OSError, ImportError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(encode_json({"sent": count}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
