"""Keep the finished parts of a long run, each written whole, with what they belong to."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from depthprobe.errors import OutputError

__all__ = ["Store", "step_of"]

_MARK = "of"


def step_of(folder: Path) -> int | None:
    """The batch size of the run that a folder keeps; None where it keeps none that can be read."""
    try:
        return int(json.loads((folder / "run.json").read_text())["batch_size"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Store:
    """A folder with one file a finished chunk, each written whole, and what they belong to."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder = folder
        text = json.dumps(identity, indent=1)
        # In every file: what another run left behind, killed while it tidied up, is not taken for this one's.
        self.mark = hashlib.sha256(text.encode()).hexdigest()
        home = folder / "run.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if home.exists():
                before = dict(json.loads(home.read_text()))
                odd = [name for name in identity if before.get(name) != identity[name]]
                if odd:
                    raise OutputError(
                        f"{folder} holds a run with another {', '.join(odd)}",
                        "the run that is resumed",
                        "remove the folder, or choose another --out",
                    )
            else:
                _write(home, text.encode())
        except (ValueError, TypeError):
            raise OutputError(f"{home} is not readable", fix="remove the folder to start anew") from None
        except OSError as error:
            raise OutputError(f"cannot keep chunks in {folder}: {error.strerror or error}") from None

    def load(self, start: int) -> dict[str, NDArray[np.float64]] | None:
        """The chunk that begins at a sequence, None where it was not finished, is damaged, or is of another run."""
        path = self.folder / f"{start:08d}.npz"
        if not path.exists():
            return None
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as data:
                part = {name: data[name] for name in data.files}
            return part if str(part.pop(_MARK)) == self.mark else None
        except (BadZipFile, ValueError, EOFError, KeyError):
            return None
        except OSError as error:
            raise OutputError(f"cannot read {path}: {error.strerror or error}") from None

    def save(self, start: int, part: dict[str, NDArray[np.float64]]) -> None:
        """Keep a finished chunk."""
        buffer = io.BytesIO()
        np.savez(buffer, **part, **{_MARK: np.array(self.mark)})  # type: ignore[arg-type]
        _write(self.folder / f"{start:08d}.npz", buffer.getvalue())

    def text(self, name: str) -> str | None:
        """The text that was kept under a name, None if there is none."""
        path = self.folder / f"{name}.json"
        try:
            mark, _, text = path.read_text(errors="replace").partition("\n") if path.exists() else ("", "", "")
        except OSError as error:
            raise OutputError(f"cannot read {path}: {error.strerror or error}") from None
        return text if mark == self.mark else None

    def keep(self, name: str, text: str) -> None:
        """Keep a text under a name."""
        _write(self.folder / f"{name}.json", f"{self.mark}\n{text}".encode())


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
