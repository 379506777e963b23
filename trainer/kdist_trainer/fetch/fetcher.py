"""Runs one fetch from start to end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Final

from kdist_trainer import log
from kdist_trainer.errors import DataError
from kdist_trainer.fetch.bucket import BucketSource
from kdist_trainer.fetch.checksums import LARGEST_SUMS, SUMS, digests_below, is_sums, parse_sums
from kdist_trainer.fetch.folder import FetchFolder
from kdist_trainer.fetch.hub import HubSource
from kdist_trainer.fetch.progress import FetchProgress, Retries, RetryPolicy
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import ChangedError, FetchSource, RemoteFile, TransientError
from kdist_trainer.fetch.space import check_space
from kdist_trainer.fetch.transfer import Transfer
from kdist_trainer.fetch.web import WebSource
from kdist_trainer.fetch.weights import INDEX, LARGEST_INDEX, shards_of

_TICK_SECONDS: Final = 0.5
_SAVE_SECONDS: Final = 10.0


def open_source(request: FetchRequest) -> FetchSource:
    """The source that the URL names. Raises `ConfigError`, or `ImportError`."""
    request.check()
    if request.scheme == "hf":
        return HubSource(request)
    if request.scheme in ("http", "https"):
        return WebSource(request)
    return BucketSource(request)


class Fetcher:
    """One fetch."""

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`, or `ImportError`."""
        self._request = request
        self._source = open_source(request)
        self._folder = FetchFolder(request)
        self._progress = FetchProgress(request)
        self._policy = RetryPolicy(request, self._progress)
        self._transfer = Transfer(request, self._source, self._folder, self._progress, self._policy)

    def run(self) -> None:
        """Fetch what is missing, and log how it goes. After an error, threads may still wait for a
        server.

        Raises:
            ConfigError: the job must be corrected.
            DataError: what is there is not what the job asks for.
            StorageError: the server failed for too long.
            OSError: this machine's disk failed.
        """
        begun = time.monotonic()
        with self._folder.locked(self._say_waiting):
            retries = Retries(self._policy)
            while True:
                try:
                    files = self._fetch_listed()
                    break
                except ChangedError as error:
                    changed = TransientError(f"it has changed while it was fetched ({error})")
                    retries.wait(self._request.url, changed)
            self._folder.close()
        log.event(
            "data-ready",
            url=self._request.url,
            field=self._request.field,
            folder=str(self._folder.files),
            files=len(files),
            bytes=self._progress.done_bytes,
            seconds=round(time.monotonic() - begun, 3),
        )

    def _say_waiting(self) -> None:
        log.event(
            "data-waiting",
            url=self._request.url,
            field=self._request.field,
            message=f"another process fetches into {self._request.folder}: waiting for it",
        )

    def _fetch_listed(self) -> Sequence[RemoteFile]:
        """List the files, and fetch those that are not there. Raises `ChangedError` too."""
        files = self._policy.retry(self._list_files)
        folder, progress = self._folder, self._progress
        folder.adopt(files)
        check_space(self._request, folder, files)
        is_counted = all(file.size is not None for file in files)
        total = sum(file.size or 0 for file in files) if is_counted else None
        progress.begin(files=len(files), total=total)
        log.event(
            "data-fetch",
            url=self._request.url,
            field=self._request.field,
            files=len(files),
            bytes=total,
            cached_bytes=sum(file.size or 0 for file in files if folder.is_complete(file)),
        )
        digests = self._fetch_digests(files)
        self._fetch_all([file for file in files if not is_sums(file.name)], digests)
        return files

    def _list_files(self) -> list[RemoteFile]:
        files = self._source.list_files()
        if len(files) == 1 and files[0].name.endswith(INDEX):
            where = f"{self._request.field}: {files[0].name} of {self._request.url}"
            names = shards_of(self._read_small(files[0], LARGEST_INDEX), where)
            found = self._source.find_files([*names, *([SUMS] if self._request.sha256 else [])])
            if missing := sorted(set(names) - {file.name for file in found}):
                raise DataError(f"{where} names {missing[0]}, which is not next to it")
            files += found
        return files

    def _read_small(self, file: RemoteFile, most: int) -> bytes:
        content = b""
        for chunk in self._source.read(file, 0).chunks:
            content += chunk
            if len(content) > most:
                raise DataError(f"{self._request.field}: {file.name} has more than {most} bytes")
        return content

    def _fetch_digests(self, files: Sequence[RemoteFile]) -> Mapping[str, str]:
        """The digests of files by name; fetches what has them."""
        request, digests = self._request, dict[str, str]()
        if request.sha256:
            pinned = files[0].name if len(files) == 1 else SUMS
            if pinned not in {file.name for file in files}:
                raise DataError(
                    f"{request.field}.sha256 is that of {SUMS} where there are several files, but "
                    f"the {len(files)} files of {request.url} have no {SUMS} among them"
                )
            digests[pinned] = request.sha256
        sums = [file for file in files if is_sums(file.name)]
        self._fetch_all(sums, digests)
        for file in sums:
            where = f"{request.field}: {file.name} of {request.url}"
            path = self._folder.files / file.name
            if path.stat().st_size > LARGEST_SUMS:
                raise DataError(f"{where} has more than {LARGEST_SUMS} bytes")
            digests |= digests_below(
                parse_sums(path.read_bytes(), where),
                file.name.rpartition("/")[0],
                [file.name for file in files],
                where=where,
                all_wanted=not request.weights,
            )
        return digests

    def _fetch_all(self, files: Sequence[RemoteFile], digests: Mapping[str, str]) -> None:
        """Fetch files at the same time. Raises the first error."""
        if not files:
            return
        most = self._most_bytes(files)
        pool = ThreadPoolExecutor(min(self._source.parallel, len(files)), "fetch")
        try:
            waiting: set[Future[None]] = {
                pool.submit(self._transfer.fetch, file, digests.get(file.name, ""), most=most)
                for file in files
            }
            saved_at = time.monotonic()
            while waiting:
                done, waiting = wait(waiting, _TICK_SECONDS, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
                self._progress.report()
                if time.monotonic() - saved_at > _SAVE_SECONDS:
                    self._folder.save()
                    saved_at = time.monotonic()
        except ChangedError:
            # the others end first: they are not to write when the files are listed again
            self._policy.stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._policy.stopped.clear()
            raise
        except BaseException:
            self._policy.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _most_bytes(self, files: Sequence[RemoteFile]) -> int | None:
        """What a file of unknown size may have at most, in bytes."""
        if self._request.max_bytes is None or all(file.size is not None for file in files):
            return None
        return self._request.max_bytes - sum(file.size or 0 for file in files)
