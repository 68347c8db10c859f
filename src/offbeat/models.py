"""What a model folder or hub id holds, found without loading it: configuration, tokenizer, weights, stop ids.

`inspect_model` reads a few small files and file sizes and imports neither torch nor transformers, so that a wrong
path is reported at once. `load_tokenizer` then loads the tokenizer (transformers is imported there). All problems
are `ModelError` with the value seen, the rule and the next step.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from offbeat.errors import ModelError
from offbeat.install import pip_install
from offbeat.nearest import existing_part, nearest_folder, newest_runs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

HUB_TIMEOUT_S = 4.0
"""How long a hub id may take to be looked up before the hub counts as unreachable."""

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_SAMPLING_KEYS = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "num_beams"),
    *("no_repeat_ngram_size", "length_penalty", "max_length", "max_new_tokens", "min_new_tokens", "suppress_tokens"),
}


class _Absent(ModelError):
    """A file is merely not there: of a model in the local cache the hub may have it."""

    def __init__(self, model: str, what: str, remedy: str) -> None:
        super().__init__(f"model = {model!r}: {what}; {remedy}")
        self.what = what


class _Damaged(ModelError):
    """A file is there and not what was saved: the hub does not send what lies in the local cache again."""


@dataclass(frozen=True)
class ModelFolder:
    """What was found of a model. `folder` holds at least its configuration and tokenizer."""

    model: str
    """As the user wrote it: what engines and the trainer load."""
    revision: str | None
    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    vocab_size: int
    """Rows of the output head."""
    max_length: int | None
    """Positions the model was made for; None where its configuration does not say."""
    weight_bytes: int
    """Size of the weight files; 0 for `init = "random"`."""

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def unused_generation_config(self) -> dict[str, Any]:
        """What generation_config.json says about sampling. offbeat does not follow it: `[sampling]` alone decides."""
        return {
            key: value for key, value in self.generation_config.items() if key in _SAMPLING_KEYS and value is not None
        }


def inspect_model(
    model: str, revision: str | None = None, init: Literal["pretrained", "random"] = "pretrained"
) -> ModelFolder:
    """Check that everything needed is there. Raises `ModelError`; a hub id is looked up for a few seconds at most."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _read_folder(model, None, path, need_weights=init == "pretrained")
    if path.exists():
        raise ModelError(f"model = {model!r} is a file; give the folder that holds config.json.")
    if model.startswith(("/", "./", "../", "~")) or not _HUB_ID.match(model):
        raise ModelError(f"model = {model!r}: no such folder{_nearest_folder(path)}.")
    return _from_hub(model, revision, need_weights=init == "pretrained")


def _nearest_folder(path: Path) -> str:
    """`; did you mean …?` for the existing folder closest to `path`, where the wrong part is one name of it."""
    near = nearest_folder(path)
    if near is not None:
        return f"; did you mean {near}?"
    existing = existing_part(path)
    wrong = (path.relative_to(existing).parts or ("",))[0]
    newest = newest_runs(existing)
    there = f"; the newest runs there: {', '.join(run.name for run in newest)}" if newest else ""
    seen = f" (nothing like {wrong!r} in {existing.resolve()}{there})"
    return f"{seen}; give a folder with config.json, or a hub id owner/name"


def _read_folder(
    model: str, revision: str | None, folder: Path, *, need_weights: bool, hub_files: Mapping[str, int] | None = None
) -> ModelFolder:
    """`hub_files` are names and sizes on the hub, where the weights are not here yet."""
    if not (folder / "config.json").is_file():
        inner = sorted(p.parent.name for p in folder.glob("*/config.json"))
        hint = f"did you mean {folder / inner[0]}?" if inner else "give a folder written by save_pretrained."
        raise _Absent(model, f"{folder} has no config.json", hint)
    config = _read_json(model, folder / "config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise _Absent(
            model,
            f"{folder} has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, …)",
            f"save it there with tokenizer.save_pretrained({str(folder)!r}).",
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"model = {model!r}: config.json has no model_type; it is not a transformers model.")
    vocab_size = _from_config(config, "vocab_size")
    if vocab_size is None:
        raise ModelError(f"model = {model!r}: config.json has no vocab_size; a causal language model is needed.")
    weight_bytes = _weight_bytes(model, folder, hub_files) if need_weights else 0
    generation = folder / "generation_config.json"
    return ModelFolder(
        model=model,
        revision=revision,
        folder=folder,
        config=config,
        generation_config=_read_json(model, generation) if generation.is_file() else {},
        vocab_size=vocab_size,
        max_length=positions(config),
        weight_bytes=weight_bytes,
    )


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions a model has, from its configuration; None where it has no limit of its own."""
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = _from_config(config, key)
        if value is not None and value > 0:
            return value
    return None


def _from_config(config: Mapping[str, Any], key: str) -> int | None:
    """A whole number from the configuration, or from its text part (models with more than text nest it there)."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(value := part.get(key), int):
            return value
    return None


def _read_json(model: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _Damaged(f"model = {model!r}: {path} cannot be read ({error}); save the model again.") from error
    if not isinstance(value, dict):
        raise _Damaged(f"model = {model!r}: {path} holds no JSON object; save the model again.")
    return value


def _weight_bytes(model: str, folder: Path, hub_files: Mapping[str, int] | None) -> int:
    sizes = hub_files if hub_files is not None else {p.name: p.stat().st_size for p in folder.iterdir() if p.is_file()}
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index not in sizes:
            continue
        weight_map = _read_json(model, folder / index).get("weight_map", {})
        shards = sorted({str(shard) for shard in weight_map.values()})
        _check_weight_files(model, folder, shards)
        missing = [shard for shard in shards if shard not in sizes]
        if missing or not shards:
            raise _Absent(
                model,
                f"{len(missing)} of the {len(shards)} weight files named in {index} are not in {folder}: "
                f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}",
                "download the model again.",
            )
        break
    else:
        shards = [name for name in sorted(sizes) if name in ("model.safetensors", "pytorch_model.bin")]
        _check_weight_files(model, folder, shards)
    if not shards:
        other = [name for name in sorted(sizes) if name.endswith((".gguf", ".safetensors", ".bin", ".pt", ".pth"))]
        seen = f" (found {', '.join(other[:3])})" if other else ""
        raise _Absent(
            model,
            f"{folder} has no weights: no model.safetensors, pytorch_model.bin or index of them{seen}",
            'save the model there, or set init = "random" to train from scratch.',
        )
    return sum(sizes[shard] for shard in shards)


def _check_weight_files(model: str, folder: Path, shards: Sequence[str]) -> None:
    """Of those that are here already: the hub gives what is not, and takes what is for whole."""
    for shard in shards:
        if (folder / shard).is_file():
            _check_weight_file(model, folder / shard)


def _check_weight_file(model: str, path: Path) -> None:
    """A cut-off download, or a Git LFS pointer in place of the file, is found from the size that the header states."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise _Damaged(f"model = {model!r}: {path} is a Git LFS pointer, not the weights; run 'git lfs pull'.")
        if size == 0:
            raise _Damaged(f"model = {model!r}: {path} is empty; download or save the model again.")
        if path.suffix != ".safetensors":
            return
        length = int.from_bytes(head, "little")
        try:
            header = json.loads(file.read(length)) if length < size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise _Damaged(f"model = {model!r}: {path} is not a safetensors file; download or save the model again.")
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if size < 8 + length + max(ends, default=0):
        raise _Damaged(
            f"model = {model!r}: {path} is cut off ({size:,} of {8 + length + max(ends):,} bytes); download it again."
        )


def _from_hub(model: str, revision: str | None, *, need_weights: bool) -> ModelFolder:
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        near = _nearest_folder(Path(model))
        raise ModelError(f"model = {model!r}: no such folder{near}; for hub ids: {pip_install('train')}.") from error
    cached, absent = _from_cache(model, revision, need_weights=need_weights)
    if cached is not None:
        return cached

    def question() -> dict[str, int]:
        info = HfApi().model_info(model, revision=revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    answer = ask_hub(question)
    if isinstance(answer, Exception):
        at = f" at revision {revision!r}" if revision else ""
        reason = (str(answer) or type(answer).__name__).strip().splitlines()[0]
        if absent is not None:
            raise ModelError(
                f"model = {model!r}: the local cache has it in part ({absent.what}), and the hub{at} did not give the "
                f"rest ({reason})."
            ) from answer
        raise ModelError(
            f"model = {model!r}: no such folder{_nearest_folder(Path(model))}; as a hub id{at} it is not in the local "
            f"cache and the hub did not give it ({reason})."
        ) from answer
    folder = Path(snapshot_download(model, revision=revision, allow_patterns=_SMALL_FILES))
    with _damage_in_cache(model):
        return _read_folder(model, revision, folder, need_weights=need_weights, hub_files=answer)


def _from_cache(model: str, revision: str | None, *, need_weights: bool) -> tuple[ModelFolder | None, _Absent | None]:
    """The model as the local cache has it whole, or the first file that it lacks; neither: it has nothing of it.

    Raises `ModelError` for what is there and damaged, which the hub would not send again.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):  # what is wrong with a name, the hub's answer says
        return None, None
    except OSError as error:
        raise ModelError(f"model = {model!r}: the local cache of hub models cannot be read ({error}).") from error
    try:
        with _damage_in_cache(model):
            return _read_folder(model, revision, folder, need_weights=need_weights), None
    except _Absent as absent:
        return None, absent


@contextmanager
def _damage_in_cache(model: str) -> Generator[None]:
    """What is wrong with a file of the cache is told with the command that gets it again."""
    try:
        yield
    except _Damaged as error:
        again = f"it lies in the local cache: 'hf download {model} --force-download' gets it again."
        raise ModelError(*error.problems, again) from error


def ask_hub(question: Callable[[], T]) -> T | Exception:
    """The hub's answer or its refusal, within a few seconds.

    In a thread, since name resolution has no time-out of its own.
    """
    outcome: list[T | Exception] = []

    def ask() -> None:
        try:
            outcome.append(question())
        except Exception as error:  # told by who asked
            outcome.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    return outcome[0] if outcome else TimeoutError(f"no answer within {HUB_TIMEOUT_S:g} s")


def check_architecture(model: ModelFolder) -> None:
    """Raise `ModelError` unless the installed transformers knows the model's type (imports transformers)."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model.model_type in CONFIG_MAPPING or "auto_map" in model.config:
        return
    near = difflib.get_close_matches(model.model_type, list(CONFIG_MAPPING), n=1)
    hint = f"; the nearest that it knows is {near[0]!r}" if near else ""
    raise ModelError(
        f"model = {model.model!r}: model_type {model.model_type!r} is unknown to transformers "
        f"{transformers.__version__}{hint}; upgrade transformers or correct config.json."
    )


def load_tokenizer(model: ModelFolder, chat_template: str | Path | None = None) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template of a Jinja file in place of its own where one is given.

    Raises `ModelError` when it cannot be loaded, or has more tokens than the model has output rows.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(f"tokenizers need transformers; {pip_install('train')}.") from error
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(model.folder), local_files_only=True)
    except Exception as error:  # each kind of tokenizer has its own
        raise ModelError(
            f"model = {model.model!r}: its tokenizer cannot be loaded ({type(error).__name__}: {error}); "
            "save it again with tokenizer.save_pretrained(folder)."
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ModelError(
                f"sampling.chat_template = {str(chat_template)!r} cannot be read ({reason}); give a UTF-8 Jinja file."
            ) from error
    if len(tokenizer) > model.vocab_size:
        raise ModelError(
            f"model = {model.model!r}: the tokenizer has {len(tokenizer)} tokens but the model only {model.vocab_size} "
            "rows (vocab_size in config.json); use the tokenizer that belongs to the model, or resize its embeddings."
        )
    return tokenizer


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model: ModelFolder) -> tuple[int, ...]:
    """Every id that ends a completion, sorted: the tokenizer's end token and all of the generation config's.

    config.json's own end token counts only where there is no generation config (transformers does the same).
    """
    found: set[int] = set()
    named = model.generation_config.get("eos_token_id")
    if named is None:
        named = model.config.get("eos_token_id")
    for value in (tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])):
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < model.vocab_size:
                raise ModelError(
                    f"model = {model.model!r}: stop id {value} is outside the vocabulary (0 to "
                    f"{model.vocab_size - 1}); correct eos_token_id in generation_config.json."
                )
            found.add(value)
    return tuple(sorted(found))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges, special tokens and chat template, equal under every version of the libraries."""
    digest = hashlib.sha256()

    def add(*parts: object) -> None:
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode("utf-8", "backslashreplace"))

    add("vocab", sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        merges = json.loads(backend.to_str())["model"].get("merges") or []
        # Older libraries write a merge as "a b", newer ones as ["a", "b"].
        add("merges", [" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    add("special", special, sorted(int(i) for i in tokenizer.all_special_ids))
    add("template", tokenizer.chat_template)
    return digest.hexdigest()[:32]
