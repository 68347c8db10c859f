"""A hub in memory, for `offbeat.export.push`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
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
    files: dict[str, dict[str, bytes]] = field(default_factory=dict[str, dict[str, bytes]])
    """What is in each repository, as a commit leaves it: deleted are files that match and are not uploaded again."""

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

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, delete_patterns: Sequence[str]
    ) -> Any:
        if self.broken:
            raise self.broken
        new = {path.name: path.read_bytes() for path in sorted(Path(folder_path).iterdir())}
        stays = {
            name: content
            for name, content in self.files.get(repo_id, {}).items()
            if not any(fnmatchcase(name, pattern) for pattern in delete_patterns)
        }
        self.files[repo_id] = stays | new
        self.uploads.append((repo_id, list(new), commit_message))
