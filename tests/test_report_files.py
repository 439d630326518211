import errno
import json
import math
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_samples import VARIANTS, bare, hostile, one_block, sample

from depthprobe.errors import NonFiniteError, OutputError, UsageError
from depthprobe.report import Report, files
from depthprobe.report.schema import LAYER_COLUMNS


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "new" / "report"
    page = sample().save(folder)
    assert page == folder / "report.html"
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_json_round_trip_loses_nothing(name):
    report = VARIANTS[name]()
    again = Report.from_json(report.to_json())
    for field in fields(Report):
        before, after = getattr(report, field.name), getattr(again, field.name)
        if isinstance(before, pd.DataFrame):
            pd.testing.assert_frame_equal(before.reset_index(drop=True), after)
        elif "nan" not in repr(before):
            assert before == after
    assert again.to_json() == report.to_json()


def test_save_writes_what_it_promises(saved):
    figures = [f"figures/{name}.png" for name in sorted(
        ("growth", "decomposition", "update_ratio", "alignment", "similarity", "angular_distance", "interaction",
         "linearity", "lens"))]  # fmt: skip
    assert listing(saved) == sorted(["figures", *figures, "layers.csv", "pairs.csv", "report.html", "report.json"])
    assert listing(saved.parent) == sorted(["report", *(f"report/{name}" for name in listing(saved))])
    table = pd.read_csv(saved / "layers.csv")
    assert list(table.columns) == list(LAYER_COLUMNS)
    np.testing.assert_array_equal(table["value"], sample().layers["value"])
    assert Report.load(saved).to_json() == sample().to_json() == Report.load(saved / "report.json").to_json()


def test_saving_again_replaces_its_own_files_and_no_others(tmp_path):
    bare().save(tmp_path)
    (tmp_path / "figures" / "mine.txt").write_text("keep")
    (tmp_path / "thesis.tex").write_text("keep")
    before = (tmp_path / "report.html").read_bytes()
    report = bare()
    replace(report, model={**report.model, "name": "other"}).save(tmp_path, figures="svg")
    assert (tmp_path / "report.html").read_bytes() != before
    assert listing(tmp_path) == [
        "figures", "figures/growth.svg", "figures/mine.txt", "layers.csv", "pairs.csv", "report.html", "report.json",
        "thesis.tex"]  # fmt: skip
    assert (tmp_path / "thesis.tex").read_text() == "keep"


def test_the_same_report_gives_the_same_bytes(tmp_path):
    first, second = bare().save(tmp_path / "a"), bare().save(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_no_interval_is_null_in_json_and_empty_in_csv(tmp_path):
    bare().save(tmp_path)
    text = (tmp_path / "report.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["layers"]["rows"][0][4:6] == [None, None]
    assert (tmp_path / "layers.csv").read_text().splitlines()[1].endswith(",,,32")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path, value):
    report = bare()
    report.layers.loc[3, "value"] = value
    with pytest.raises(NonFiniteError, match=r"residual_norm is -?(nan|inf) at layer 3, unit block \(float32\)"):
        report.save(tmp_path / "out")
    assert listing(tmp_path) == []
    infinite = replace(bare(), cost={"forward_passes": value, "block_evaluations": 1, "seconds": 1.0})
    assert json.loads(infinite.to_json())["cost"]["forward_passes"] is None


def test_types_of_numpy_become_json(tmp_path):
    report = replace(
        bare(), run={**bare().run, "seed": np.int64(3), "options": {"a": Path("x"), "b": (1, np.float32(2))}}
    )
    assert Report.from_json(report.to_json()).run["options"] == {"a": "x", "b": [1, 2.0]}


def test_load_says_what_is_wrong(tmp_path):
    def fails(match):
        with pytest.raises(OutputError, match=match) as caught:
            Report.load(tmp_path)
        assert "\n" not in str(caught.value)

    fails("no report at")
    path = tmp_path / "report.json"
    path.write_text("{")
    fails("is not JSON")
    path.write_bytes(b"\xff\xfe")
    fails("cannot read")
    path.write_text("[1]")
    fails("not a depthprobe report")
    document = json.loads(bare().to_json())
    path.write_text(json.dumps({**document, "schema_version": 99}))
    fails("schema version 99; expected 1")
    path.write_text(json.dumps({key: value for key, value in document.items() if key != "growth"}))
    fails("no field 'growth'")
    path.write_text(json.dumps({**document, "sinks": {}}))
    fails("'sinks' of .* is a dict")
    for broken in ({"columns": ["a"], "rows": []}, {"columns": document["layers"]["columns"], "rows": [["x"] * 7]}, 3):
        path.write_text(json.dumps({**document, "layers": broken}))
        fails("table 'layers' of .* is broken")
    path.write_text(json.dumps(document))
    assert Report.load(tmp_path).model == bare().model


def test_check_writable_leaves_nothing(tmp_path):
    files.check_writable(tmp_path / "a" / "b")
    files.check_writable(tmp_path)
    assert listing(tmp_path) == []


def test_a_path_that_is_or_passes_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        for attempt in (files.check_writable, bare().save):
            with pytest.raises(OutputError, match=r"file is a file; expected a folder|Not a directory"):
                attempt(target)
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "out" / "layers.csv").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"layers\.csv is a folder"):
        bare().save(tmp_path / "out")
    assert listing(tmp_path / "out") == ["layers.csv"]


def test_read_only_and_full(tmp_path, monkeypatch):
    def refuse(code):
        def write(self, *_):
            raise OSError(code, os.strerror(code))

        return write

    monkeypatch.setattr(Path, "write_bytes", refuse(errno.EROFS))
    with pytest.raises(OutputError, match="Read-only file system"):
        files.check_writable(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OutputError, match=r"no space for a report in .*: 0\.0 MiB free; expected 16 MiB"):
        files.check_writable(tmp_path)


@pytest.mark.parametrize("existing", [False, True])
def test_a_disk_that_fills_up_leaves_things_as_they_were(tmp_path, monkeypatch, existing):
    target = tmp_path / "deep" / "out"
    if existing:
        target.mkdir(parents=True)
        (target / "report.json").write_text("old")
    before = listing(tmp_path)
    synced = []

    def fsync(file):
        synced.append(file)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OutputError, match=r"cannot write a report to .*: No space left on device") as caught:
        bare().save(target)
    assert len(synced) == 3
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == before
    if existing:
        assert (target / "report.json").read_text() == "old"


def test_an_interrupt_while_moving_leaves_no_debris(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bare().save(tmp_path / "a" / "b")
    assert listing(tmp_path) == []


def test_unknown_figure_format(tmp_path):
    with pytest.raises(UsageError, match="'pdf'; expected png or svg"):
        bare().save(tmp_path, figures="pdf")


def test_names_that_no_encoding_takes(tmp_path):
    page = replace(hostile(), layers=bare().layers, pairs=bare().pairs, growth=bare().growth).save(tmp_path)
    assert "\\udc80" in page.read_text(encoding="utf-8")
    assert Report.load(tmp_path).model["name"] == hostile().model["name"]


def test_frames_are_copies():
    report = one_block()
    frame = report.to_frame()
    frame["value"] = 0.0
    assert report.layers["value"].max() > 0
    assert repr(report).startswith("Report('sample-12', blocks=1")
