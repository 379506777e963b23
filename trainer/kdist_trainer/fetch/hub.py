"""Fetches from Hugging Face, or another hub with its interface: a data set, or the weights of a
model, which are its safetensors files, their index, and its configuration.

huggingface_hub finds the commit that a revision names, and its files with their sizes and digests.
The files themselves come by the same requests as those of https://, so that they are continued,
counted, limited and retried alike; since their URLs name the commit, they never change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath
from queue import Empty, SimpleQueue
from typing import Any, Final

from kdist_trainer.config.object_stores import HUB_TOKEN
from kdist_trainer.config.source_url import HUB
from kdist_trainer.errors import ConfigError, DataError, KdistTrainerError
from kdist_trainer.fetch.request import FetchRequest
from kdist_trainer.fetch.source import FileBody, RemoteFile, TransientError
from kdist_trainer.fetch.web import (
    TIMEOUT_SECONDS,
    StatusError,
    WebClient,
    read_authorization,
    read_web,
)
from kdist_trainer.threads import OnError, start_thread
from kdist_trainer.untrusted_text import parse_json

INDEX: Final = ".safetensors.index.json"
LARGEST_INDEX: Final = 256 << 20
_FURTHER: Final = frozenset({"config.json", "SHA256SUMS"})


def is_weights(name: str) -> bool:
    """Whether a file of a repository is needed to start from its weights. Those in folders are of
    other models or other formats, and are never read.
    """
    return "/" not in name and (name.endswith((".safetensors", INDEX)) or name in _FURTHER)


def shards_of(index: bytes, where: str) -> list[str]:
    """The names of the files in an index.

    Args:
        index: its content.
        where: its field and URL, for errors.

    Raises:
        DataError: it is no index, or names files that are not next to it.
    """
    try:
        names = set(parse_json(index, max_bytes=LARGEST_INDEX)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{where}: is no index of safetensors files") from None
    if not names or not all(
        isinstance(name, str)
        and PurePosixPath(name).name == name
        and name not in ("", "..")
        and name.isprintable()
        for name in names
    ):
        raise DataError(f"{where}: its weight_map must name files next to it")
    return sorted(names)


ENDPOINT: Final = "HF_ENDPOINT"
_DENIED: Final = frozenset({401, 403})
_AGAIN: Final = frozenset({408, 429})


class HubSource:
    """The files of a repository, those below one of its folders, or one of them."""

    parallel = 8

    def __init__(self, request: FetchRequest) -> None:
        """Prepare, without a request. Raises `ConfigError`, also without huggingface_hub."""
        try:
            from huggingface_hub import HfApi, constants, hf_hub_url
        except ImportError:
            raise ConfigError(
                f"{request.field}: {request.url} needs the package huggingface_hub: "
                "pip install 'huggingface-hub>=1.0'"
            ) from None
        found = HUB.fullmatch(request.url)
        if found is None:
            raise ConfigError(f"{request.field}.url is no URL of a repository")
        self._request = request
        self._url_of = hf_hub_url
        self._repo = f"{found['owner']}/{found['name']}"
        self._kind = "dataset" if found["kind"] == "datasets" else "model"
        self._revision: str | None = found["revision"]
        self._path = (found["path"] or "").rstrip("/")
        self._folder = self._path
        self._commit = ""
        self._token = read_authorization(HUB_TOKEN, request.field)
        given = request.endpoint or os.environ.get(ENDPOINT, "")
        self._endpoint = (given or constants.ENDPOINT).rstrip("/")
        self._api = HfApi(endpoint=self._endpoint, token=self._token or False)
        self._timeout = min(TIMEOUT_SECONDS, request.stall_seconds)
        authorization = f"Bearer {self._token}" if self._token else ""
        self._client = WebClient(authorization, timeout=self._timeout)

    def list_files(self) -> list[RemoteFile]:
        """The files of the commit, all or only weights as the request says."""
        found = self._list_commit()
        if self._path in found:
            self._folder = self._path.rpartition("/")[0]
            return [self._describe(found[self._path])]
        self._folder = self._path
        prefix = f"{self._path}/" if self._path else ""
        names = [name for name in found if name.startswith(prefix)]
        if self._request.weights:
            names = [name for name in names if is_weights(name[len(prefix) :])]
        if not names:
            what = "no safetensors file" if self._request.weights else "nothing"
            raise DataError(
                f"{self._request.field}: {self._request.url} has {what} at commit "
                f"{self._commit}: correct the URL"
            )
        return [self._describe(found[name]) for name in names]

    def find_files(self, names: Sequence[str]) -> list[RemoteFile]:
        """Files of the commit next to the one that the URL names."""
        found = self._list_commit()
        keys = [self._key_of(name) for name in names]
        return [self._describe(found[key]) for key in keys if key in found]

    def read(self, file: RemoteFile, start: int) -> FileBody:
        """The content from byte `start` on if the server sends ranges, or from 0."""
        url = self._url_of(
            self._repo,
            self._key_of(file.name),
            repo_type=self._kind,
            revision=self._commit,
            endpoint=self._endpoint,
        )
        try:
            return read_web(self._client, url, file, start)
        except StatusError as error:
            raise self._refused(error.status, str(error)) from None

    def _list_commit(self) -> dict[str, Any]:
        """The files of the commit by their names."""
        try:
            info = self._ask_within_the_time()
        except Exception as error:  # noqa: BLE001 - types of the HTTP library of that package
            raise self._translated(error) from None
        self._commit = str(info.sha)
        return {one.rfilename: one for one in info.siblings or []}

    def _ask_within_the_time(self) -> Any:
        """What the hub says of the commit. That package has a time-out for each read only, so it is
        left behind on a thread of its own once the time is over.
        """
        answers: SimpleQueue[Any] = SimpleQueue()

        def ask() -> None:
            try:
                answers.put(
                    self._api.repo_info(
                        self._repo,
                        revision=self._commit or self._revision,
                        repo_type=self._kind,
                        files_metadata=True,
                        timeout=self._timeout,
                    )
                )
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                answers.put(error)

        start_thread(ask, name="hub", on_error=OnError.REPORT)
        try:
            found = answers.get(timeout=2 * self._timeout)
        except Empty:
            raise TimeoutError(f"{self._endpoint} has not answered in time") from None
        if isinstance(found, Exception):
            raise found
        return found

    def _key_of(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def _describe(self, one: Any) -> RemoteFile:
        name = one.rfilename[len(self._folder) + 1 :] if self._folder else one.rfilename
        digest = str(one.lfs.sha256) if one.lfs is not None else ""
        return RemoteFile(name, one.size, etag=digest or str(one.blob_id or ""), sha256=digest)

    def _translated(self, error: Exception) -> Exception:
        status = getattr(getattr(error, "response", None), "status_code", None)
        name = type(error).__name__
        if name == "OfflineModeIsEnabled":
            return ConfigError(f"{self._request.field}: HF_HUB_OFFLINE is set: unset it")
        if isinstance(status, int):
            if status >= 500 or status in _AGAIN:
                return TransientError(f"status {status}")
            return self._refused(status, f"status {status}", name)
        if isinstance(error, ValueError) and not isinstance(error, OSError):
            return DataError(f"{self._request.field}: {self._request.url}: {name}")
        return TransientError(f"{name}: {str(error).splitlines()[0][:200] if str(error) else ''}")

    def _refused(self, status: int, reason: str, kind: str = "") -> KdistTrainerError:
        field, url = self._request.field, self._request.url
        key = f"the key {HUB_TOKEN} of the Secret that {field}.secret names"
        if kind == "RevisionNotFoundError":
            return DataError(
                f"{field}: {self._endpoint} has no revision {self._revision} of {url}: correct the "
                "part after @"
            )
        is_gated = kind == "GatedRepoError"
        if is_gated or status in _DENIED:
            if self._token:
                terms = ", and that its owner has accepted the terms" if is_gated else ""
                return DataError(
                    f"{field}: access to {url} is denied ({reason}), or it does not exist: check "
                    f"that the token in {key} may read it{terms}"
                )
            return ConfigError(
                f"{field}: access to {url} is denied ({reason}) without a token, or it does not "
                f"exist: put a token that may read it into {key}"
            )
        if status == 404:
            private = "" if self._token else f", or, if it is private, put a token into {key}"
            return DataError(
                f"{field}: {self._endpoint} has no {url} ({reason}): correct the URL{private}"
            )
        return DataError(f"{field}: {url} cannot be fetched: {reason}")
