"""Which file declares each built-in scheme, kept between processes: a name is found without importing every test.

Beside it stand the pictures of each scheme on its declared meshes: `shardproof draw` prints them without torch and JAX.
The index is made from the imported schemes and is valid for the sources that it was made from: any change of a source,
of Python, torch or JAX, or of the optional packages makes a new one. It stands in the user's cache folder; where that
cannot be written, every process imports the schemes. Nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity_tests.harness.declare.declared import Declared

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("jax_ref", "parity_tests", "torch_impl")
VERSIONS = ("torch", "jax", "numpy", "transformers", "safetensors")  # what declarations depend on
MOST_FILES = 8  # indices of other checkouts and environments that the folder keeps


@dataclass(frozen=True)
class Entry:
    """A built-in scheme: its key in the table, the file that declares it, relative to the root, and what it takes."""

    key: str
    name: str
    file: str
    line: int
    mesh: dict[str, list[int]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    dtypes: list[str]
    engines: list[str]
    reference: str

    def to_dict(self) -> dict[str, Any]:
        """As `shardproof list --json` prints it."""
        record = {name: value for name, value in asdict(self).items() if name not in ("key", "line")}
        return {**record, "file": f"{self.file}:{self.line}"}


def entry_of(scheme: Declared) -> Entry:
    """The entry of an imported scheme, a user's as well."""
    reference = getattr(scheme.reference, "__name__", type(scheme.reference).__name__)
    path = Path(scheme.file)
    return Entry(
        key=scheme.key,
        name=scheme.name,
        file=str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else scheme.file,
        line=scheme.line,
        mesh={axis: list(sizes) for axis, sizes in scheme.mesh.items()},
        inputs={arg.name: str(arg.spec) for arg in scheme.inputs},
        outputs={arg.name: str(arg.spec) for arg in scheme.outputs},
        dtypes=list(scheme.dtypes),
        engines=list(scheme.engines),
        reference=f"{scheme.reference.__module__}.{reference}",
    )


def entries() -> list[Entry]:
    """Every built-in scheme, in order of file and line, from the index of these sources or else by importing them."""
    with suppress(OSError, ValueError, TypeError):
        return [Entry(**record) for record in json.loads(_file("schemes").read_text())]
    from parity_tests.harness.declare import discover
    from parity_tests.harness.report.declared_pictures import declared_pictures

    schemes = discover.built_in()
    imported = [entry_of(scheme) for scheme in schemes]
    if _is_complete(imported, discover.left_out()):
        with suppress(OSError):
            _store({scheme.name: declared_pictures(scheme) for scheme in schemes}, _file("pictures"))
            _store([asdict(entry) for entry in imported], _file("schemes"))
    return imported


def stored_picture(name: str, sizes: Mapping[str, int]) -> str | None:
    """The picture of a built-in scheme with these sizes of mesh axes; None if it is not stored."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(_file("pictures").read_text())[name][sizes_key(sizes)]
    return None


def sizes_key(sizes: Mapping[str, int]) -> str:
    """Sizes as the stored pictures are named."""
    return " ".join(f"{axis}={size}" for axis, size in sorted(sizes.items()))


def _is_complete(imported: list[Entry], left_out: dict[str, str]) -> bool:
    """Whether every file was imported, but those about a package that is not installed."""
    missing = [name for name in VERSIONS if not _is_installed(name)]
    return bool(imported) and all(any(f"needs {name};" in reason for name in missing) for reason in left_out.values())


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _store(content: Any, file: Path) -> None:
    """Write a file of the index. It is moved into place, so that no process reads half of one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
        json.dump(content, part)
    os.replace(part.name, file)
    kind = file.name.partition("-")[0]
    by_age = sorted(file.parent.glob(f"{kind}-*.json"), key=lambda file: file.stat().st_mtime)
    for old in by_age[:-MOST_FILES]:
        old.unlink(missing_ok=True)


def _file(kind: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "shardproof" / f"{kind}-{_fingerprint()}.json"


def _fingerprint() -> str:
    """A digest of the sources' paths, sizes and times of change, and of the versions that declarations depend on."""
    digest = hashlib.sha256(f"{ROOT} {sys.version}".encode())
    for name in VERSIONS:
        digest.update(f"{name} {version(name) if _is_installed(name) else None}".encode())
    for source in SOURCES:
        for folder, inner, files in os.walk(ROOT / source):
            inner[:] = sorted(name for name in inner if name != "__pycache__")
            for name in sorted(name for name in files if name.endswith(".py")):
                status = os.stat(os.path.join(folder, name))
                digest.update(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
