"""A hub in memory, for `offbeat.export.push`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class FakeInfo:
    private: bool


@dataclass
class FakeHub:
    """Remembers what it was asked; `there` are its repositories, and whether they are private."""

    there: dict[str, bool] = field(default_factory=dict[str, bool])
    endpoint: str = "https://hub.test"
    broken: Exception | None = None
    unknown: Exception | None = None
    uploads: list[tuple[str, list[str], str]] = field(default_factory=list[tuple[str, list[str], str]])

    def whoami(self) -> Any:
        if self.unknown:
            raise self.unknown
        return {"name": "me"}

    def repo_exists(self, repo_id: str) -> bool:
        return repo_id in self.there

    def repo_info(self, repo_id: str) -> Any:
        return FakeInfo(self.there[repo_id])

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        self.there.setdefault(repo_id, private)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> Any:
        if self.broken:
            raise self.broken
        files = sorted(path.name for path in Path(folder_path).iterdir())
        self.uploads.append((repo_id, files, commit_message))
