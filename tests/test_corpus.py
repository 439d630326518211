import hashlib
import io
import json
import subprocess
import sys
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from depthprobe.controls import random_tokens
from depthprobe.corpus import Corpus, manual_topics, read
from depthprobe.depth.base import shortened
from depthprobe.errors import CorpusError, UsageError

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def byte_level(bos: bool = False) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT], trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", model_max_length=16)


def bert() -> PreTrainedTokenizerFast:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted(set(TEXT.lower().replace(".", " .").split()))]
    piece = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    piece.normalizer = normalizers.BertNormalizer()
    piece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    piece.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=piece, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return byte_level()


# Packing


def test_sequences_are_the_documents_one_after_the_other(plain):
    texts = [TEXT, "A second text about nothing much.", TEXT[::-1]]
    corpus = read(texts, plain, tokens=320, seq_len=32)
    expected = [i for text in texts for i in plain(text, add_special_tokens=False, verbose=False)["input_ids"]]
    assert corpus.inputs.dtype == torch.int64
    assert corpus.inputs.flatten().tolist() == expected[:320]
    assert (corpus.sequences, corpus.tokens, corpus.is_states) == (10, 32, False)
    assert corpus.bos == "Nothing was put in front of the sequences: the tokenizer adds nothing to a plain text."
    assert corpus.notes == ()


def test_documents_are_those_that_hold_most_of_a_sequence(plain):
    corpus = read(["a" * 10, "", "b" * 6, "c" * 8], plain, tokens=24, seq_len=8)
    owner = np.repeat([0, 2, 3], [len(plain(t * n)["input_ids"]) for t, n in (("a", 10), ("b", 6), ("c", 8))])
    assert corpus.documents.dtype == np.int64
    assert corpus.documents.tolist() == [np.bincount(owner[i * 8 : i * 8 + 8]).argmax() for i in range(3)]
    assert len(set(corpus.documents.tolist())) > 1
    assert read([TEXT], plain, tokens=64, seq_len=32).documents is None
    assert read([TEXT, TEXT], plain, tokens=64, seq_len=32).documents is None


@pytest.mark.parametrize("blank", ["", " \n\t "])
def test_special_tokens_are_those_of_a_text_whatever_the_first_document_is(blank):
    """Datasets begin with empty rows, and what is put around nothing cannot be told apart from it."""
    for tokenizer in (byte_level(bos=True), bert()):
        given = {"tokens": 64, "seq_len": 16}
        with_blank, without = (read(texts, tokenizer, **given) for texts in ([blank, TEXT, TEXT], [TEXT, TEXT]))
        assert with_blank.inputs.tolist() == without.inputs.tolist()
        assert with_blank.bos == without.bos
        assert "starts with" in with_blank.bos


@pytest.mark.parametrize("vocabulary", [50_000, 128_000])
def test_a_stream_of_32_bit_ids_is_refused(tmp_path, vocabulary):
    """Read as 16 bits, it would be half ids that all fit into the vocabulary."""
    drawn = np.random.default_rng(0).integers(0, vocabulary, 400)
    drawn.astype("<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(CorpusError, match=r"wide.bin looks like ids of 32 bits.*\.npy"):
        read(tmp_path / "wide.bin", None, tokens=64, seq_len=16, vocab_size=vocabulary)
    np.minimum(drawn, 65_535).astype("<u2").tofile(tmp_path / "right.bin")
    assert read(tmp_path / "right.bin", None, tokens=64, seq_len=16, vocab_size=vocabulary).sequences == 4


@pytest.mark.parametrize("name", ["text.json", "text.ndjson", "text.JSONL"])
def test_json_by_other_names_is_no_prose(tmp_path, plain, name):
    rows = [{"content": text} for text in (TEXT, TEXT[::-1])]
    (tmp_path / name).write_text("\n".join(json.dumps(row) for row in rows))
    given = {"tokens": 64, "seq_len": 16}
    assert read(tmp_path / name, plain, text_field="content", **given).inputs.equal(
        read([TEXT, TEXT[::-1]], plain, **given).inputs
    )
    (tmp_path / name).write_text(json.dumps(rows, indent=1))
    with pytest.raises(CorpusError, match="an object a line"):
        read(tmp_path / name, plain, text_field="content", **given)


def test_an_encoders_short_sequences_end_as_its_long_ones(tmp_path):
    corpus = read([TEXT, TEXT], bert(), tokens=64, seq_len=16)
    short = shortened(corpus, 24, 6)
    assert short.inputs.shape == (4, 6)
    assert (short.inputs[:, -1] == 3).all()
    assert (short.inputs[:, 0] == 2).all()
    assert short.inputs[:, 1:5].equal(corpus.inputs[:, 1:5])
    drawn = random_tokens(SimpleNamespace(vocab_size=30), corpus, 0).inputs
    assert (drawn[:, -1] == 3).all()
    assert not drawn[:, 1:-1].equal(corpus.inputs[:, 1:-1])
    causal = read([TEXT, TEXT], byte_level(bos=True), tokens=64, seq_len=16)
    assert shortened(causal, 24, 6).inputs.equal(causal.inputs[:, :6])


@pytest.mark.parametrize(
    ("tokenizer", "words", "length"), [(byte_level(), ("a", "b"), 6), (bert(), ("fox ", "dog "), 8)]
)
def test_a_piece_of_a_sequence_is_of_the_document_that_it_is_taken_from(tokenizer, words, length):
    """The first document ends within the first sequence, which is mostly of the second, but begins with the first."""
    corpus = read([words[0] * 6, words[1] * 60], tokenizer, tokens=48, seq_len=24)
    assert corpus.documents.tolist() == [1, 1]
    assert corpus.cut(24).documents.tolist() == [1, 1]
    short = corpus.cut(length)
    assert short.documents.tolist() == [0, 1]
    assert short.documents.dtype == np.int64
    assert shortened(corpus, 48, length).documents.tolist() == [0, 1]
    assert short.take(np.array([1])).cut(4).documents.tolist() == [1]
    assert read([words[0] * 60], tokenizer, tokens=48, seq_len=24).cut(length).documents is None


def test_ids_with_padding_are_refused():
    tokenizer = bert()
    tokenizer.pad_token = "[PAD]"
    pad, ids = tokenizer.pad_token_id, np.arange(5, 45).reshape(5, 8)
    assert read(ids, tokenizer).sequences == 5
    for place in (-1, 0):
        padded = ids.copy()
        padded[1:3, place] = pad
        with pytest.raises(CorpusError, match=rf"2 of 5 sequences begin or end with padding \(id {pad}\)"):
            read(padded, tokenizer)
        assert read(padded, None).sequences == 5  # nothing says that it is padding
    tokenizer.eos_token = tokenizer.pad_token  # as GPT-2 users do
    assert read(padded, tokenizer).sequences == 5


def test_one_bos_where_the_tokenizer_wants_one_and_no_trailing_eos():
    tokenizer = byte_level(bos=True)
    corpus = read([TEXT, TEXT], tokenizer, tokens=64, seq_len=16)
    assert corpus.inputs.shape == (4, 16)
    assert (corpus.inputs[:, 0] == 0).all()
    assert not (corpus.inputs[:, 1:] == 0).any()
    assert not (corpus.inputs == 1).any()
    assert corpus.bos == "Every sequence starts with <s> (0), as the tokenizer itself does."
    body = corpus.inputs[:, 1:].flatten().tolist()
    assert body == tokenizer(TEXT, add_special_tokens=False, verbose=False)["input_ids"][:60]
    never = read([TEXT], tokenizer, tokens=64, seq_len=16, bos="never")
    assert not (never.inputs == 0).any()
    assert "asked for" in never.bos


def test_bos_always(plain):
    corpus = read([TEXT], plain, tokens=64, seq_len=16, bos="always")
    assert (corpus.inputs == 0).sum(1).tolist() == [1] * 4
    assert (corpus.inputs[:, 0] == 0).all()
    assert "asked for" in corpus.bos
    bare = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer)
    with pytest.raises(UsageError, match="no BOS or CLS"):
        read([TEXT], bare, bos="always")


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_an_encoder_gets_cls_and_sep(bos):
    corpus = read([TEXT], bert(), tokens=64, seq_len=16, bos=bos)
    assert corpus.inputs.shape == (4, 16)
    assert (corpus.inputs[:, 0] == 2).all()
    assert (corpus.inputs[:, -1] == 3).all()
    assert ((corpus.inputs == 2) | (corpus.inputs == 3)).sum() == 8
    assert corpus.bos == "Every sequence starts with [CLS] (2) and ends with [SEP] (3), as the tokenizer itself does."
    with pytest.raises(UsageError, match="special tokens"):
        read([TEXT], bert(), tokens=64, seq_len=2)


def test_lengths(plain):
    assert read([TEXT * 30], plain).inputs.shape == (32, 256)
    assert read([TEXT * 30], plain, max_positions=64).inputs.shape == (128, 64)
    assert read([TEXT], plain, tokens=40).inputs.shape == (1, 40)
    assert "40 tokens in all" in read([TEXT], plain, tokens=40, seq_len=64).notes[0]
    with pytest.raises(UsageError, match=r"512.*128 positions"):
        read([TEXT], plain, seq_len=512, max_positions=128)
    for bad in ({"tokens": 0}, {"tokens": -1}, {"tokens": 1}, {"seq_len": 1}, {"bos": "maybe"}):
        with pytest.raises(UsageError):
            read([TEXT], plain, **bad)


def test_short_texts_say_so(plain):
    one = read(["The lazy dog jumps over the fox."], plain)
    assert one.sequences == 1
    assert one.tokens == len(plain("The lazy dog jumps over the fox.")["input_ids"])
    assert one.notes == (f"The text is shorter than a sequence of 256: one sequence of {one.tokens} tokens.",)
    some = read([TEXT], plain, seq_len=64)
    assert some.notes == (f"Asked for 8,192 tokens, the text gives {some.sequences * 64} in whole sequences.",)


def test_the_tokenizer_does_not_warn_of_its_maximal_length(plain, caplog):
    logging.enable_propagation()
    try:
        read([TEXT], byte_level(), tokens=64, seq_len=32)
        assert not caplog.records
        byte_level()(TEXT)
        assert "maximum" in caplog.text  # this tokenizer does warn where it is let
    finally:
        logging.disable_propagation()


def test_a_corpus_is_returned_as_it_is(plain):
    corpus = read([TEXT], plain)
    assert read(corpus, None) is corpus


# The manual


def test_shares_of_the_manual_are_apart():
    analysis, training, everything = (manual_topics(share) for share in ("analysis", "training", "all"))
    assert len(analysis) + len(training) <= len(everything)
    assert 0.15 < len(analysis) / len(everything) < 0.5
    assert set(analysis) < set(everything)
    held_out = {" ".join(part.split()) for text in analysis for part in text.split("\n\n")}
    assert not any(" ".join(part.split()) in held_out for text in training for part in text.split("\n\n"))
    assert len("".join(training)) > 100_000
    assert manual_topics("analysis") == analysis


def test_default_is_the_analysis_share(plain):
    corpus = read(None, plain, tokens=2048)
    assert corpus.name == f"pydoc_data.topics (Python 3.{sys.version_info.minor}), analysis share"
    shown = plain.decode(corpus.inputs.flatten())
    assert "\0".join(manual_topics("analysis")).replace("\0", "").startswith(shown)
    assert read(None, plain, tokens=2048).sha256 == corpus.sha256
    assert read(None, plain, tokens=200_000).documents[-1] > 3


# Files


def test_a_text_file_is_one_document_and_its_hash_is_the_files(plain, tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(TEXT)
    corpus = read(path, plain, seq_len=32)
    assert corpus.documents is None
    assert corpus.name == str(path)
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(corpus.inputs, read(str(path), plain, seq_len=32).inputs)
    assert torch.equal(corpus.inputs, read([TEXT], plain, seq_len=32).inputs)


def test_a_large_file_is_read_as_far_as_needed(plain, tmp_path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.write("Ä fox — über dogs. ".encode() * 4000)
        file.seek(1 << 34)  # sparse: 16 GiB of zeros that must not be looked at
        file.write(b"\xff")
    corpus = read(path, plain, tokens=512, seq_len=64)
    assert corpus.inputs.flatten().tolist() == plain("Ä fox — über dogs. " * 100)["input_ids"][:512]


def test_standard_input(plain, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    corpus = read("-", plain, seq_len=32)
    assert corpus.name == "standard input"
    assert torch.equal(corpus.inputs, read([TEXT], plain, seq_len=32).inputs)


def test_json_lines(plain, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "id": 1}) for text in (TEXT, "ü" * 900)) + "\n\n")
    corpus = read(path, plain, seq_len=32, text_field="body")
    assert torch.equal(corpus.inputs, read([TEXT, "ü" * 900], plain, seq_len=32).inputs)
    assert set(corpus.documents.tolist()) == {0, 1}
    with pytest.raises(CorpusError, match=r"line 1, field 'text' is missing; expected one of body, id"):
        read(path, plain)
    with pytest.raises(CorpusError, match=r"line 1, field 'id' is a int"):
        read(path, plain, text_field="id")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 'a'}", "line 2 is not JSON"),
        (b"[1, 2]", "line 2 is a list"),
        (b'{"text": "\xff"}', "line 2: byte 10 is 0xff"),
        (b'{"text": "a\\ud800"}', "line 2, field 'text' holds half a surrogate pair at character 1"),
    ],
)
def test_bad_json_lines(plain, tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorpusError, match=message):
        read(path, plain)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\n ", "holds no text"),
        (b"a", "holds one token"),
        (b"fox \xff dog", "byte 4 is 0xff; expected UTF-8"),
        (b"fox" * 5 + "ä".encode()[:1], "byte 15 is 0xc3"),
        ("fox".encode("utf-16-le"), "byte 1 is 0x00"),
    ],
)
def test_files_that_hold_no_text(plain, tmp_path, content, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read(path, plain)
    assert "\n" not in str(caught.value)


def test_no_such_file_and_no_tokenizer(plain, tmp_path):
    for name in ("none.txt", "none.npy", "none.jsonl"):
        with pytest.raises(CorpusError, match="no such file"):
            read(tmp_path / name, plain)
    for data in (None, [TEXT]):
        with pytest.raises(CorpusError, match=r"without a tokenizer.*\.npy.*--tokenizer"):
            read(data, None)
    with pytest.raises(CorpusError, match="the data is a dict"):
        read({}, plain)
    with pytest.raises(CorpusError, match="document 1 is a int"):
        read([TEXT, 1], plain)
    with pytest.raises(CorpusError, match="no text"):
        read([], plain)


# Datasets


def test_datasets(plain, tmp_path):
    data = datasets.Dataset.from_dict({"text": [TEXT, "ü" * 900]})
    expected = read([TEXT, "ü" * 900], plain, seq_len=32)
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "split")
    for source in (data, tmp_path / "one", f"hf:{tmp_path / 'one'}", f"hf:{tmp_path / 'split'}:train"):
        corpus = read(source, plain, seq_len=32)
        assert torch.equal(corpus.inputs, expected.inputs)
        assert corpus.documents.tolist() == expected.documents.tolist()
    with pytest.raises(CorpusError, match="splits train, test"):
        read(f"hf:{tmp_path / 'split'}", plain)
    with pytest.raises(CorpusError, match="field 'body' is missing; expected one of text"):
        read(data, plain, text_field="body")
    with pytest.raises(CorpusError, match="cannot be opened"):
        read(tmp_path, plain)


def test_datasets_on_the_hub(plain, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    asked = []

    def hub(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "several" and config is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nmore")
        return ({"text": TEXT} for _ in range(2)) if name != "lost" else failing()

    def failing():
        yield {"text": TEXT}
        raise ConnectionError("the hub does not answer")

    monkeypatch.setattr(datasets, "load_dataset", hub)
    expected = read([TEXT, TEXT], plain, seq_len=32)
    for spec in ("one", "one:train", "several:a:validation"):
        assert torch.equal(read(f"hf:{spec}", plain, seq_len=32).inputs, expected.inputs)
    assert asked == [("one", None, "train", True)] * 2 + [("several", "a", "validation", True)]
    with pytest.raises(CorpusError, match=r"available configs: \['a', 'b'\].*name one: hf:several:CONFIG:test"):
        read("hf:several:test", plain)
    with pytest.raises(CorpusError, match=r"cannot be read \(the hub does not answer\)"):
        read("hf:lost", plain)
    with pytest.raises(CorpusError, match="has 4 parts; expected hf:NAME"):
        read("hf:a:b:c:d", plain)
    datasets.Dataset.from_dict({"text": [TEXT]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(CorpusError, match="no configuration"):
        read(f"hf:{tmp_path / 'saved'}:a:train", plain)


def test_datasets_is_not_installed(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"not installed; pip install 'depthprobe\[datasets\]'"):
        read("hf:some/name", plain)


# Ids and states


def test_ids_are_taken_as_they_are(tmp_path):
    ids = np.arange(60, dtype=np.uint16).reshape(6, 10)
    path = tmp_path / "ids.npy"
    np.save(path, ids)
    expected = torch.arange(60).reshape(6, 10)
    for data in (path, str(path), ids, torch.from_numpy(ids.astype(np.int32))):
        corpus = read(data, None, vocab_size=60)
        assert corpus.inputs.dtype == torch.int64
        assert torch.equal(corpus.inputs, expected)
        assert corpus.documents is None
        assert corpus.sha256 == hashlib.sha256(expected.numpy().astype("<i8").tobytes()).hexdigest()
    assert read(path, None, tokens=20).inputs.tolist() == expected[:2].tolist()
    assert read(path, None, tokens=20).notes == ("The first 2 of 6 sequences.",)
    assert read(path, None, seq_len=4).inputs.tolist() == expected[:, :4].tolist()
    assert read(path, None, tokens=3).sequences == 1
    with pytest.raises(UsageError, match="at most the 10"):
        read(path, None, seq_len=11)
    with pytest.raises(CorpusError, match="--seq-len 8"):
        read(path, None, max_positions=8)
    with pytest.raises(UsageError, match="always"):
        read(path, None, bos="always")


def test_ids_outside_of_the_vocabulary(plain):
    ids = torch.zeros(3, 8, dtype=torch.int64)
    ids[2, 5] = 1000
    with pytest.raises(CorpusError, match=r"id 1,000 at sequence 2, position 5; expected ids from 0 to 999"):
        read(ids, None, vocab_size=1000)
    assert read(ids, None).inputs.max() == 1000
    ids[1, 0] = -1
    with pytest.raises(CorpusError, match="id -1 at sequence 1, position 0"):
        read(ids, None)
    with pytest.raises(CorpusError, match=r"vocabulary 20.*tokenizer does not belong"):
        read([TEXT], plain, vocab_size=20)


def test_states(tmp_path):
    states = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
    np.save(tmp_path / "states.npy", states)
    corpus = read(tmp_path / "states.npy", None, tokens=18)
    assert corpus.is_states
    assert torch.equal(corpus.inputs, torch.from_numpy(states[:3]))
    assert corpus.sha256 == hashlib.sha256(states[:3].tobytes()).hexdigest()
    half = read(torch.from_numpy(states).to(torch.bfloat16), None)
    assert half.inputs.dtype == torch.bfloat16
    states[1, 2, 0] = np.nan
    with pytest.raises(CorpusError, match=r"state at \[1, 2, 0\] is nan"):
        read(states, None)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(8, np.int64),
        np.zeros((2, 3, 4), np.int64),
        np.zeros((2, 3)),
        np.zeros((2, 3), bool),
        np.zeros((2, 3, 4), complex),
        np.zeros((0, 4), np.int64),
        np.zeros((4, 1), np.int64),
        torch.zeros(2, 3, dtype=torch.bool),
    ],
)
def test_arrays_that_are_neither(array, tmp_path):
    with pytest.raises(CorpusError, match="shape"):
        read(array, None)
    if isinstance(array, np.ndarray):
        np.save(tmp_path / "bad.npy", array)
        with pytest.raises(CorpusError, match="shape"):
            read(tmp_path / "bad.npy", None)


def test_arrays_that_cannot_be_read(tmp_path):
    np.save(tmp_path / "pickle.npy", np.array([[{}]]), allow_pickle=True)
    np.savez(tmp_path / "many.npz", a=np.zeros((2, 2), np.int64))
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "cut.npy", np.zeros((8, 8), np.int64))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:200])
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(CorpusError, match=r"an archive|no array"):
            read(path, None)


def test_a_stream_of_ids(tmp_path):
    path = tmp_path / "train.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    whole = read(path, None, tokens=1000, seq_len=100)
    assert whole.inputs.flatten().tolist() == list(range(1000))
    assert shortened(whole, 100, 10).inputs.tolist() == [list(range(k, k + 10)) for k in range(0, 1000, 100)]
    assert whole.notes == ()
    some = read(path, None, tokens=300, seq_len=100, seed=1)
    assert (some.inputs.diff() == 1).all()
    assert (some.inputs[:, 0] % 100 == 0).all()
    assert (some.inputs[:, 0].diff() > 0).all()
    assert "seed 1" in some.notes[0]
    assert torch.equal(some.inputs, read(path, None, tokens=300, seq_len=100, seed=1).inputs)
    assert any(
        not torch.equal(some.inputs, read(path, None, tokens=300, seq_len=100, seed=seed).inputs) for seed in range(5)
    )
    assert read(path, None, seq_len=300).notes == ("Asked for 8,100 tokens, the stream gives 900 in whole sequences.",)
    with pytest.raises(CorpusError, match="vocabulary 500"):
        read(path, None, tokens=1000, seq_len=100, vocab_size=500)
    for content, message in ((b"", "0 bytes"), (b"abc", "3 bytes"), (b"ab", "one token")):
        path.write_bytes(content)
        with pytest.raises(CorpusError, match=message):
            read(path, None)


def test_importing_does_not_import_datasets():
    code = "import sys, depthprobe.corpus; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_corpus_compares_by_identity(plain):
    corpus = read([TEXT], plain)
    assert isinstance(corpus, Corpus)
    assert corpus == corpus
    assert corpus != read([TEXT], plain)
