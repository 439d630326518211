"""Checkpoints that are compared before they have a report: each is analyzed, and its report kept."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthprobe.analysis import analyze
from depthprobe.corpus import Corpus
from depthprobe.errors import OutputError, UsageError
from depthprobe.fingerprint import fingerprint
from depthprobe.measure import Progress
from depthprobe.prepare import prepare
from depthprobe.processes import announced
from depthprobe.report import Report

__all__ = ["Analyzer"]

Watch = Callable[[str], Progress]
_ANALYZING = ("skip_first", "interaction", "lens_positions", "ablations", "ablation_tokens", "gradient_tokens",
              "depth_tokens")  # fmt: skip
_DEFAULTS = inspect.signature(analyze).parameters
_TEXT = ("sha256", "sequences", "tokens", "bos", "first_ids")


class Analyzer:
    """Analyzes one checkpoint after another with the same options, and keeps the reports."""

    def __init__(
        self, data: Any, reports: Path, options: dict[str, Any], say: Callable[[str], None], watch: Watch | None
    ) -> None:
        self.data, self.reports, self.options, self.say, self.watch = data, reports, options, say, watch

    def __call__(self, source: str, folder: str | None) -> tuple[Report, str]:
        """The report of a checkpoint, from `folder` below the reports or its own name there, and how it was got."""
        if announced()[1] > 1:  # each process would measure all of it, and write over the others' files
            raise UsageError(
                f"several processes compare the checkpoint {source}", "folders with reports",
                "analyze it first, with as many processes, and then compare in one",
            )  # fmt: skip
        preparing = {name: value for name, value in self.options.items() if name not in _ANALYZING}
        checkpoint, corpus, _ = prepare(source, self.data, **preparing)
        home = self.reports / (folder or checkpoint.name)
        mine = {
            "fingerprint": fingerprint(checkpoint.model, checkpoint.offload),
            "dtype": str(checkpoint.dtype).removeprefix("torch."),
            "corpus": _of_text({name: getattr(corpus, name) for name in _TEXT}),
            "options": {name: self.options.get(name, _DEFAULTS[name].default) for name in ("seed", *_ANALYZING)},
        }
        key = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()[:8]
        # the report of another model or text is left alone, and a name of its own is found for this one
        other = (home / "report.json").exists() and _matching(home, mine) is None
        place = home.with_name(f"{home.name}-{key}") if other else home
        if (found := _matching(place, mine)) is not None:
            self.say(f"{source}: the report in {place} is of this model and text")
            return found, f"report of {str(found.run.get('created'))[:10]} in {place}"
        self.say(f"{source}: analyzing it on {corpus.sequences} × {corpus.tokens} tokens, into {place}")
        report = self._analyze(checkpoint, corpus)
        report.save(place)
        return report, f"analyzed now, into {place}"

    def _analyze(self, checkpoint: Any, corpus: Corpus) -> Report:
        names = ("seed", "bos", "text_field", *_ANALYZING)
        given = {name: value for name, value in self.options.items() if name in names}
        progress = self.watch(checkpoint.name) if self.watch else None
        return analyze(checkpoint, corpus, progress=progress, tokens=corpus.sequences * corpus.tokens, **given)


def _of_text(corpus: dict[str, Any]) -> list[Any]:
    """What tells two texts, and two ways of cutting them into ids, apart."""
    return [corpus.get(name) for name in _TEXT]


def _matching(place: Path, mine: dict[str, Any]) -> Report | None:
    """The report in that folder if it is of this model, text and options."""
    try:
        report = Report.load(place)
    except OutputError:
        return None
    corpus, options = report.corpus, report.run.get("options") or {}
    same = [
        report.model.get("fingerprint") == mine["fingerprint"],
        report.model.get("dtype") == mine["dtype"],
        _of_text(corpus) == mine["corpus"],
        all(options.get(name, value) == value for name, value in mine["options"].items()),
    ]
    return report if all(same) else None
