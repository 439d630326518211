"""What the lab trains on: the standard library without what `analyze` reads, or any text, split and drawn by seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from depthprobe.corpus import read
from depthprobe.documents import manual_topics
from depthprobe.errors import CorpusError
from depthprobe.lab.byte_tokens import END, MASK, byte_ids, byte_tokenizer, is_byte_tokenizer
from depthprobe.lab.text import HELD_OUT_BYTES, IGNORED, Text, library_texts, read_text

BYTES = byte_tokenizer()
TEXT = "".join(f"line {i} says {i * i % 97}\n" for i in range(400))


@pytest.fixture(scope="module")
def library() -> dict[str, str]:
    return library_texts()


@pytest.fixture(scope="module")
def default() -> Text:
    return read_text(None, BYTES)


def words(text: str) -> str:
    return " ".join(text.split())


# --- the tokenizer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["plain text, two  spaces\tand\n\nbreaks  ", "é∆\U0001f600 \xa0", "".join(map(chr, range(256))), "don't I'll"],
)
def test_every_byte_is_a_token(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    assert ids == list(text.encode()) == byte_ids(text).tolist()
    assert BYTES.decode(ids) == text
    if text.isascii():
        assert len(ids) == len(text)


def test_the_special_tokens() -> None:
    assert (len(BYTES), BYTES.eos_token_id, BYTES.bos_token_id, BYTES.mask_token_id) == (257, 256, 256, None)
    assert BYTES(f"a{END}b")["input_ids"] == [97, 256, 98]
    masked = byte_tokenizer(masked=True)
    assert (len(masked), masked.eos_token_id, masked.mask_token_id) == (258, 256, 257)
    assert masked(f"a{MASK}")["input_ids"] == [97, 257]
    assert is_byte_tokenizer(BYTES)
    assert is_byte_tokenizer(masked)


def test_it_is_saved_and_opened(tmp_path: Path) -> None:
    byte_tokenizer(positions=64).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened("Ein Wort, é")["input_ids"] == list("Ein Wort, é".encode())
    assert opened.model_max_length == 64
    assert is_byte_tokenizer(opened)
    corpus = read([TEXT], opened, tokens=256, seq_len=64)
    assert corpus.inputs.flatten().tolist() == list(TEXT[:256].encode()), "no token in front that training never saw"


# --- the standard library ------------------------------------------------------------------------------------------


def test_the_library_is_text_and_source(library: dict[str, str], default: Text) -> None:
    assert {"argparse.py", "json.py"} & library.keys() == {"argparse.py"}, "modules, not packages"
    assert not any("topics" in name or "_sysconfigdata" in name for name in library)
    assert list(library) == list(library_texts()), "always in the same order"
    size = sum(len(text.encode()) for text in library.values())
    assert 3e6 < size < 8e6
    assert sum(len(text) for text in library.values()) > 0.999 * size, "next to all of it is ASCII"
    assert len(default.stream) + default.held_out.numel() == pytest.approx(size, rel=1e-3)
    assert default.entropy == pytest.approx(3.15, abs=0.1)


def test_nothing_that_analyze_reads_is_trained_on(library: dict[str, str]) -> None:
    """No paragraph of the analysis share; a sentence that a docstring has in common with it is all that is left."""
    training = words("\n".join(library.values()))
    parts = training.split(" ")
    starts = set(zip(*(parts[k:] for k in range(10)), strict=False))

    def trained_on(paragraph: str) -> bool:  # the search is slow, and few paragraphs pass what comes before it
        return tuple(paragraph.split(" ")[:10]) in starts and paragraph in training

    paragraphs = {words(part) for topic in manual_topics("analysis") for part in topic.split("\n\n")}
    long = [part for part in paragraphs if len(part) >= 120 and part.count(" ") >= 9]
    assert len(long) > 500
    assert [part for part in long if trained_on(part)] == []
    known = {words(part) for topic in manual_topics("training")[:9] for part in topic.split("\n\n") if len(part) > 120}
    assert sum(map(trained_on, known)) > 0.8 * len(known) > 10, "the search would find them"


def test_training_and_validation_are_other_documents(default: Text, library: dict[str, str]) -> None:
    import hashlib

    held = [text for text in library.values() if hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_BYTES]
    assert f"{len(held)} of {len(library)} documents" in default.split
    stream = bytes(np.minimum(default.stream, 255).astype(np.uint8))  # end-of-text becomes a byte that UTF-8 never has
    for text in held:
        assert text.encode()[:2000] not in stream
    for text in library.values():
        assert text in held or text.encode() in stream
    assert default.held_out.numel() == pytest.approx(sum(len(text.encode()) + 1 for text in held), abs=64)


def test_the_hash_is_that_of_the_text(default: Text, library: dict[str, str]) -> None:
    import hashlib

    assert default.sha256 == hashlib.sha256("\0".join(library.values()).encode()).hexdigest()
    assert read_text(None, BYTES).sha256 == default.sha256


# --- drawing -------------------------------------------------------------------------------------------------------


def test_a_batch_depends_on_seed_and_step_alone(default: Text) -> None:
    ids, labels = default.batch(3, 17, 8)
    again = read_text(None, BYTES).batch(3, 17, 8)[0]
    assert ids.shape == (8, 64)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, labels)
    assert torch.equal(ids, again)
    assert not torch.equal(ids, default.batch(3, 18, 8)[0])
    assert not torch.equal(ids, default.batch(4, 17, 8)[0])
    stream = default.stream.tobytes()
    assert all(row.numpy().astype(np.int32).tobytes() in stream for row in ids)


def test_fifteen_percent_are_masked() -> None:
    text = read_text([TEXT] * 3, byte_tokenizer(masked=True), seq_len=40, objective="masked")
    plain = read_text([TEXT] * 3, byte_tokenizer(masked=True), seq_len=40)
    for (ids, labels), (whole, _) in (
        (text.batch(0, 0, 16), plain.batch(0, 0, 16)),
        (text.validation, plain.validation),
    ):
        asked = labels != IGNORED
        assert (asked.sum(dim=1) == 6).all(), "as many in every sequence"
        assert torch.equal(asked, ids == 257)
        assert torch.equal(torch.where(asked, labels, ids), whole)
    places = torch.cat([text.batch(0, step, 16)[1] != IGNORED for step in range(40)]).float().mean(dim=0)
    assert places.min() > 0.08, "every position has its turn"


def test_frequencies_are_those_of_the_training_text() -> None:
    text = read_text(["aab" * 200], BYTES, seq_len=30)
    assert text.entropy == pytest.approx(-(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3)), abs=0.02)
    assert text.frequencies.sum() == pytest.approx(1)
    assert text.frequencies[97] == pytest.approx(2 * text.frequencies[98], rel=0.02)
    assert text.frequencies.min() > 0


# --- any text ------------------------------------------------------------------------------------------------------


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    text = read_text(str(path), BYTES, seq_len=16)
    ids = [256, *TEXT.encode()]
    assert text.stream.tolist() == ids[: len(text.stream)]
    assert text.held_out.flatten().tolist() == ids[len(text.stream) :][: text.held_out.numel()]
    assert f"last {len(ids) - len(text.stream):,} tokens" in text.split
    assert text.held_out.numel() == pytest.approx(len(ids) * HELD_OUT_BYTES / 256, abs=16)
    assert text.name == str(path)


def test_documents_are_split_by_hash_where_there_are_enough(tmp_path: Path) -> None:
    documents = [f"document {number}: " + "x" * number for number in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents))
    text = read_text(path, BYTES, seq_len=16, text_field="body")
    assert "of 100 documents" in text.split
    assert text.sha256 == read_text(documents, BYTES, seq_len=16).sha256
    kept = bytes(np.minimum(text.stream, 255).astype(np.uint8)).split(b"\xff")[1:]
    assert set(kept) < {document.encode() for document in documents}


@pytest.mark.parametrize("name", ["ids.npy", "ids.bin", "tensor"])
def test_token_ids(name: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (40, 32)).astype(np.uint16)
    data: Any = torch.from_numpy(ids.astype(np.int64)) if name == "tensor" else tmp_path / name
    if name == "ids.npy":
        np.save(data, ids)
    elif name == "ids.bin":
        ids.tofile(data)
    text = read_text(data, None, seq_len=32)
    assert text.vocab_size <= 50
    assert text.tokenizer is None
    rows = {tuple(row) for row in ids.tolist()}
    drawn = {tuple(row) for row in text.batch(0, 0, 200)[0].tolist()}
    held = {tuple(row) for row in text.held_out.tolist()}
    assert drawn <= rows, "no sequence goes over the end of a row"
    assert held <= rows
    assert not drawn & held
    assert len(drawn) > 25


def test_long_rows_are_cut_into_sequences() -> None:
    ids = np.arange(4 * 10).reshape(4, 10)
    text = read_text(ids, None, seq_len=4)
    assert {tuple(row) for row in text.batch(0, 0, 99)[0].tolist()} == {
        tuple(range(start, start + 4)) for start in (0, 4, 10, 14, 20, 24)
    }
    assert text.held_out.tolist() == [[30, 31, 32, 33], [34, 35, 36, 37]]


# --- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "tokenizer", "options", "words"),
    [
        (["short"], BYTES, {}, ["6 tokens", "at least one sequence of 64"]),
        ([], BYTES, {}, ["0 tokens"]),
        (["", "  \n"], BYTES, {}, ["0 tokens"]),
        ([TEXT], None, {}, ["tokenizer"]),
        ([TEXT], BYTES, {"objective": "masked"}, ["mask token"]),
        (np.zeros((4, 8, 2)), None, {}, ["float states"]),
        (np.zeros((4, 32), dtype=int), None, {}, ["sequences of 32", "--seq-len 32"]),
        (np.zeros((1, 64), dtype=int), None, {}, ["one sequence"]),
        ("no/such/file.txt", BYTES, {}, ["no such file"]),
        ("a text and no path. " * 200, BYTES, {}, ["4,000 characters", "are no path", "[text]"]),
    ],
)
def test_refused_in_one_line(data: Any, tokenizer: Any, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CorpusError) as caught:
        read_text(data, tokenizer, **options)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value
