"""A hub of models that huggingface_hub can ask, with the same paths as Hugging Face's."""

from __future__ import annotations

import hashlib
import json
import re

from tests.trainer.fetch.web_server import Asked, Reply, WebServer

REPO = "team/model"


class Hub:
    """Repositories on a `WebServer`: the files of every commit, the first of which is `main`'s.

    Attributes:
        server: Where it is.
        commits: By the kind and name of a repository, then by commit, the files.
        branches: By branch or tag, the commit.
        large: Names of files that are stored apart, as large ones are.
    """

    def __init__(self, server: WebServer, *, kind: str = "models", repo: str = REPO) -> None:
        self.server = server
        self.kind, self.repo = kind, repo
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.large = re.compile(r".*\.safetensors")
        server.routes = self.answer

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a branch name a new commit with these files; returns its id."""
        text = json.dumps({name: data.hex() for name, data in files.items()})
        commit = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - git's
        self.commits[commit], self.branches[branch] = files, commit
        return commit

    def answer(self, asked: Asked) -> Reply | None:
        """Reply to what a hub is asked for."""
        prefix = "" if self.kind == "models" else f"{self.kind}/"
        api = re.fullmatch(rf"/api/{self.kind}/{self.repo}(?:/revision/(.+))?", asked.path)
        if api is not None:
            commit = self.branches.get(api[1] or "main", api[1] or "")
            if commit not in self.commits:
                return _error(404, "RevisionNotFound")
            return self._describe(commit)
        file = re.fullmatch(rf"/{prefix}{self.repo}/resolve/([0-9a-f]{{40}})/(.+)", asked.path)
        if file is not None:
            data = self.commits.get(file[1], {}).get(file[2])
            if data is None:
                return _error(404, "EntryNotFound")
            if self.large.fullmatch(file[2]):
                path = f"/cdn/{hashlib.sha256(data).hexdigest()}"
                self.server.files[path] = data
                return Reply(302, headers={"Location": f"{self.server.url}{path}"})
            self.server.files[asked.path] = data
            return None
        if asked.path.startswith(("/api/", f"/{prefix}{self.repo}/")):
            return _error(404, "RepoNotFound")
        return None

    def _describe(self, commit: str) -> Reply:
        siblings = []
        for name, data in self.commits[commit].items():
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's
            one = {"rfilename": name, "size": len(data), "blobId": blob}
            if self.large.fullmatch(name):
                digest = hashlib.sha256(data).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(one)
        info = {
            "id": self.repo,
            "modelId": self.repo,
            "sha": commit,
            "private": False,
            "siblings": siblings,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return Reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})


def _error(status: int, code: str) -> Reply:
    return Reply(status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})
