"""An exported folder on a hub. The hub is behind a seam (`Hub`): huggingface_hub's `HfApi`, imported only here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from offbeat.errors import ConfigError, RunError
from offbeat.install import pip_install
from offbeat.models import ask_hub

T = TypeVar("T")
_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_*")
"""Those of a repository go as the new ones come: a loader would prefer what an earlier push left, such as a single
model.safetensors beside a newer index with shards."""


class Hub(Protocol):
    """What is used of `huggingface_hub.HfApi`."""

    endpoint: str

    def whoami(self) -> Any: ...

    def repo_exists(self, repo_id: str) -> bool: ...

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any: ...

    def repo_info(self, repo_id: str) -> Any: ...

    def upload_folder(
        self, *, repo_id: str, folder_path: str, commit_message: str, delete_patterns: Sequence[str]
    ) -> Any: ...


def hub_api() -> Hub:
    """Raises `ConfigError` where huggingface_hub is not installed."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"--push needs huggingface_hub; {pip_install('train')}.") from error
    return cast(Hub, HfApi())


def check_push(hub: Hub, repo: str, *, public: bool) -> None:
    """Before anything is written: the name, the hub, who we are, whether an existing repository is what was meant.

    Raises `ConfigError`, within some seconds also where the hub does not answer.
    """
    if not _NAME.match(repo):
        raise ConfigError(f"--push {repo!r}: write OWNER/NAME, e.g. me/my-model.")
    _ask(hub, repo, hub.whoami)
    if _ask(hub, repo, lambda: hub.repo_exists(repo)):
        private = bool(_ask(hub, repo, lambda: hub.repo_info(repo)).private)
        if private == public:
            there, say = ("private", "leave --public out") if private else ("public", "add --public")
            raise ConfigError(f"--push {repo}: it is there already and is {there}; {say}, or choose another name.")


def _ask(hub: Hub, repo: str, question: Callable[[], T]) -> T:
    answer = ask_hub(question)
    if not isinstance(answer, Exception):
        return answer
    reason = (str(answer) or type(answer).__name__).strip().splitlines()[0]
    if type(answer).__name__ == "LocalTokenNotFoundError" or getattr(
        getattr(answer, "response", None), "status_code", 0
    ) in (401, 403):
        raise ConfigError(
            f"--push {repo}: {hub.endpoint} does not know who you are ({reason}); log in with 'hf auth login', or set "
            "HF_TOKEN to a token that may write."
        ) from answer
    raise ConfigError(
        f"--push {repo}: {hub.endpoint} cannot be asked ({reason}); check the network, or export without --push."
    ) from answer


def push(hub: Hub, folder: Path, repo: str, *, public: bool, message: str) -> str:
    """One commit, after which the repository's weights are those of the folder and no others; what else is in it stays.

    Returns the address. Raises `RunError`; the exported folder stays.
    """
    try:
        hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(
            repo_id=repo, folder_path=str(folder), commit_message=message, delete_patterns=list(WEIGHT_FILES)
        )
    except Exception as error:  # of the hub, of its HTTP library, of the network
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        again = shlex.join(["hf", "upload", repo, str(folder), ".", *(f"--delete={name}" for name in WEIGHT_FILES)])
        raise RunError(
            f"the push to {repo} failed ({reason}); the exported folder is complete: try again with:\n{again}"
        ) from error
    return f"{hub.endpoint}/{repo}"
