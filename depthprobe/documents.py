"""Where text comes from: Python's own manual, files, standard input, JSON lines, datasets; read as far as asked for."""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from depthprobe.errors import CorpusError

__all__ = ["Document", "documents", "existing", "manual_topics"]

ANALYSIS_BYTES = 77  # of 256: a topic is analysed if the first byte of its name's hash is below, 30 % of all names

Document = Callable[[int], tuple[str, bool]]
"""Gives about the first n characters of a document, and whether that is all of it."""

_LINES = (".jsonl", ".ndjson", ".json")  # an object a line


def documents(data: Any, text_field: str) -> tuple[str, Iterable[Document]]:
    """The name of a source of text, and its documents, read as they are asked for."""
    if data is None:
        name = f"pydoc_data.topics (Python {sys.version_info.major}.{sys.version_info.minor}), analysis share"
        return name, map(_whole, manual_topics("analysis"))
    if isinstance(data, list | tuple):
        texts = [_text(text, f"document {index:,}", "pass a list of texts") for index, text in enumerate(data)]
        return f"{len(data):,} documents passed from Python", map(_whole, texts)
    if type(data).__module__.partition(".")[0] == "datasets":
        return "a dataset passed from Python", _rows(data, text_field)
    if not isinstance(data, str | Path):
        raise CorpusError(f"the data is a {type(data).__name__}", "a path, texts, ids, states or a dataset")
    if data == "-":
        return "standard input", [_growing(sys.stdin.buffer, "standard input")]
    if str(data).startswith("hf:"):
        return str(data), _rows(_dataset(str(data)), text_field)
    path = existing(data)
    if path.is_dir():
        return str(path), _rows(_dataset(f"hf:{path}"), text_field)
    return str(path), _lines(path, text_field) if path.suffix.lower() in _LINES else _file(path)


def existing(data: str | Path) -> Path:
    """The path of a file that is there.

    Raises:
        CorpusError: it is not.
    """
    path = Path(data)
    try:
        there = path.exists()
    except OSError as error:  # longer than a name may be
        what = f"{len(str(data)):,} characters that begin with {str(data)[:40]!r}"
        raise CorpusError(f"{what} are no path", "the path of a file", "pass texts as a list: [text]") from error
    if not there:
        raise CorpusError(
            f"no such file: {path}", fix="check the path; a dataset on the hub is hf:NAME[[:CONFIG]:SPLIT]"
        )
    return path


def _whole(text: str) -> Document:
    return lambda size: (text[:size], size >= len(text))


def _file(path: Path) -> Iterator[Document]:
    with _opened(path) as handle:
        yield _growing(handle, str(path))


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CorpusError(f"{path} cannot be read ({error.strerror})", fix="check its permissions") from error


def _growing(handle: IO[bytes], name: str) -> Document:
    """A file, of which no more is read than was asked for."""
    raw = bytearray()

    def prefix(size: int) -> tuple[str, bool]:
        raw.extend(handle.read(max(0, size - len(raw))))
        ended = len(raw) < size
        try:
            text, _ = codecs.utf_8_decode(raw, "strict", ended)
        except UnicodeDecodeError as error:
            raise _binary(name, error.start, raw[error.start]) from error
        if "\0" in text:
            raise _binary(name, raw.index(0), 0)
        return text.removeprefix("\ufeff"), ended

    return prefix


def _binary(name: str, place: int, byte: int) -> CorpusError:
    return CorpusError(
        f"{name}: byte {place:,} is 0x{byte:02x}", "UTF-8 text", "convert the file, or pass token ids as .npy or .bin"
    )


def _lines(path: Path, text_field: str) -> Iterator[Document]:
    name = str(path)
    with _opened(path) as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise _binary(f"{name}, line {number:,}", error.start, line[error.start]) from error
            except json.JSONDecodeError as error:
                raise CorpusError(f"{name}, line {number:,} is not JSON ({error.msg})", "an object a line") from error
            if not isinstance(row, dict):
                raise CorpusError(f"{name}, line {number:,} is a {type(row).__name__}", "a JSON object")
            yield _whole(_field(row, text_field, f"{name}, line {number:,}"))


def _rows(dataset: Any, text_field: str) -> Iterator[Document]:
    for number, row in enumerate(_fetched(dataset)):
        if not isinstance(row, dict):
            raise CorpusError("the dataset is a set of splits", "one split", "choose one: hf:NAME:SPLIT")
        yield _whole(_field(row, text_field, f"row {number:,} of the dataset"))


def _fetched(dataset: Any) -> Iterator[Any]:
    """The rows, which a dataset on the hub fetches as they are asked for."""
    try:
        yield from dataset
    except Exception as error:  # as in `_dataset`
        raise CorpusError(f"the dataset cannot be read ({_reason(error)})", "rows with a text") from error


def _field(row: dict[str, Any], text_field: str, place: str) -> str:
    place = f"{place}, field {text_field!r}"
    if text_field not in row:
        raise CorpusError(f"{place} is missing", f"one of {', '.join(row)}", "name the field with --text-field")
    return _text(row[text_field], place, "name the field that holds the text with --text-field")


def _text(value: Any, place: str, fix: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{place} is a {type(value).__name__}", "a text", fix)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        fault = f"{place} holds half a surrogate pair at character {error.start:,}"
        raise CorpusError(fault, "text that UTF-8 can hold", "escape it as a whole pair") from error
    return value


def _dataset(spec: str) -> Any:
    """The dataset of `hf:NAME[[:CONFIG]:SPLIT]`, where NAME may be a folder that `datasets` saved."""
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(
            f"{spec} needs the package datasets, which is not installed", fix="pip install 'depthprobe[datasets]'"
        ) from error
    name, *rest = spec.removeprefix("hf:").split(":")
    if len(rest) > 2:
        raise CorpusError(f"{spec} has {len(rest) + 1} parts", "hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    config, split = rest[0] if len(rest) == 2 else None, rest[-1] if rest else ""
    try:
        if not Path(name).is_dir():
            return datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        saved = datasets.load_from_disk(name)
    except Exception as error:  # datasets raises what its many back ends raise
        fix = f"name one: hf:{name}:CONFIG:{split or 'train'}" if "onfig name is missing" in str(error) else None
        raise CorpusError(
            f"{spec} cannot be opened ({_reason(error)})", "a dataset on the hub or saved to disk", fix
        ) from error
    if config:
        raise CorpusError(f"{name} is a dataset saved to disk, which has no configuration", f"hf:{name}:SPLIT")
    if not isinstance(saved, dict):
        return saved
    chosen = split or (next(iter(saved)) if len(saved) == 1 else "")
    if chosen not in saved:
        raise CorpusError(f"{spec} has the splits {', '.join(saved)}", "one of them", f"choose one: hf:{name}:SPLIT")
    return saved[chosen]


def _reason(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:2]) or type(error).__name__


def manual_topics(share: Literal["analysis", "training", "all"]) -> list[str]:
    """Topics of Python's own manual, `pydoc_data.topics`, in the order of a hash of their names.

    A topic belongs to the analysis share or to the training share by its name. Some topics quote others whole
    (`compound` holds `for`), so the training share goes without the paragraphs that the analysis share has too.
    """
    from pydoc_data.topics import topics

    keys = {name: hashlib.sha256(name.encode()).digest() for name in topics}
    names = sorted(topics, key=keys.__getitem__)
    if share == "all":
        return [topics[name] for name in names]
    analysis = [topics[name] for name in names if keys[name][0] < ANALYSIS_BYTES]
    if share == "analysis":
        return analysis
    held_out = {_words(part) for text in analysis for part in text.split("\n\n")}
    training = (topics[name].split("\n\n") for name in names if keys[name][0] >= ANALYSIS_BYTES)
    kept = ("\n\n".join(part for part in parts if _words(part) not in held_out) for parts in training)
    return [text for text in kept if text.strip()]


def _words(paragraph: str) -> str:
    return " ".join(paragraph.split())
