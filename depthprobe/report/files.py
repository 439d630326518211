"""The report's folder: checked before the measuring, then written whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from depthprobe.errors import OutputError, UsageError
from depthprobe.report import figures, html
from depthprobe.report.schema import Report

__all__ = ["check_writable", "save", "write_whole"]

_ROOM = 16 * 2**20  # a report of 100 blocks takes about 5 MB, and is there twice while it is written
_SOME = ("ablations", "depth")  # tables that not every report has
_ELSEWHERE = "choose another folder with --out"


def check_writable(directory: str | Path) -> None:
    """Find out, before a long measurement, whether a report can be written to `directory`; leaves nothing behind.

    Raises:
        OutputError: the path is a file or lies below one, the place is read-only, or its disk is full.
    """
    target = Path(directory)
    with _errors(target):
        if (target / "report.html").exists() and not (target / "report.json").exists():
            raise OutputError(
                f"{target / 'report.html'} is not a report of depthprobe", fix=f"move it away or {_ELSEWHERE}"
            )
        home = _nearest(target)
        probe = home / f".depthprobe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"\0")
        finally:
            probe.unlink(missing_ok=True)
        free = shutil.disk_usage(home).free
    if free < _ROOM:
        found = f"no space for a report in {target}: {free / 2**20:.1f} MiB free"
        raise OutputError(found, f"{_ROOM // 2**20} MiB", f"make room or {_ELSEWHERE}")


def save(report: Report, directory: Path, figure_format: str = "png") -> Path:
    """What `Report.save` does."""
    if figure_format not in ("png", "svg"):
        raise UsageError(f"figures cannot be written as {figure_format!r}", "png or svg", "pass one of the two")
    contents = {"report.json": report.to_json().encode()}
    tables = {"layers": report.layers, "pairs": report.pairs, "ablations": report.ablations, "depth": report.depth}
    for name, table in tables.items():
        if name not in _SOME or not table.empty:
            csv = table.to_csv(index=False, lineterminator="\n")
            contents[f"{name}.csv"] = csv.encode(errors="backslashreplace")
    for name in figures.available(report):
        contents[f"figures/{name}.{figure_format}"] = figures.render(report, name, figure_format)
    contents["report.html"] = html.page(report).encode(errors="backslashreplace")
    ours = {f"figures/{name}.{kind}" for name in figures.NAMES for kind in ("png", "svg")}
    write_whole(contents, directory, ours | {f"{name}.csv" for name in _SOME})
    return directory / "report.html"


def write_whole(contents: dict[str, bytes], directory: Path, stale: Set[str] = frozenset()) -> None:
    """Write files to a folder, all of them or none; files of other names in it stay as they are.

    Args:
        contents: path within the folder → what the file holds.
        directory: made if it is missing.
        stale: paths of an earlier writing, which are removed unless they are among `contents`.

    Raises:
        OutputError: the folder cannot be written; nothing is left behind.
    """
    with _errors(directory):
        _write(contents, directory, stale)


def _write(contents: dict[str, bytes], directory: Path, stale: Set[str]) -> None:
    """Write all of it to a folder on the same disk first: what can fail fails before anything is replaced."""
    exists = directory.is_dir()
    home = _nearest(directory)
    above = [path for path in directory.absolute().parents if not path.exists()]
    staging = home / f".depthprobe-{uuid.uuid4().hex}"
    for name in contents:
        if (directory / name).is_dir():
            raise OutputError(f"{directory / name} is a folder", "a file or nothing", f"move it away or {_ELSEWHERE}")
    try:
        for name, content in contents.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        if exists:
            for name in contents:
                (directory / name).parent.mkdir(exist_ok=True)
                os.replace(staging / name, directory / name)
            for name in stale - contents.keys():
                if not (directory / name).is_dir():
                    (directory / name).unlink(missing_ok=True)
        else:
            directory.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging, directory)
    except BaseException:
        with suppress(OSError):
            for path in above:
                path.rmdir()
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _nearest(directory: Path) -> Path:
    """The folder itself, or the closest one above it that exists.

    Raises:
        OutputError: what exists there is not a folder.
    """
    path = directory.absolute()
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise OutputError(f"{path} is a file", "a folder, or a path that does not exist yet", _ELSEWHERE)
    return path


@contextmanager
def _errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        found = f"cannot write a report to {directory}: {reason}"
        raise OutputError(found, fix=f"make it writable or {_ELSEWHERE}") from None
