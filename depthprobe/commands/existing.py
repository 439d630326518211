"""The folder of a report, and what is in it already: a report to add to, or one that need not be made again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthprobe.commands.options import command_line
from depthprobe.errors import OutputError

if TYPE_CHECKING:
    from depthprobe.checkpoint import Checkpoint
    from depthprobe.corpus import Corpus
    from depthprobe.report import Report
    from depthprobe.verify import Anatomy

__all__ = ["existing_report", "finished_report", "folder_of"]

_NO_MATTER = {"batch_size"}  # results do not depend on it


def folder_of(model: Checkpoint, out: Path | None) -> Path:
    """`out`, or reports/<model>, which must hold no report of another checkpoint: many are called checkpoint-500.

    Raises:
        OutputError: it holds one. What is named by `out` is taken as it is.
    """
    from depthprobe.processes import told

    if out is not None:
        return out
    target = Path("reports") / model.name

    def check() -> None:
        if not (target / "report.json").exists():
            return
        theirs = _readable(target).model
        there, here = _origin(theirs.get("source"), theirs.get("revision")), _origin(model.source, model.revision)
        if there != here:
            raise OutputError(f"{target} holds the report of {there}, and this is {here}", fix="choose another --out")

    told(check)
    return target


def _readable(target: Path) -> Report:
    """The report that is there. A command that is to write one must not advise to run it again."""
    from depthprobe.report import Report

    try:
        return Report.load(target)
    except OutputError as error:
        raise OutputError(
            f"{target} holds a report that cannot be read: {error.found}", fix="remove it, or choose another --out"
        ) from error


def _origin(source: Any, revision: Any) -> str:
    """Where a checkpoint comes from, however its path was spelt."""
    text = str(source)
    path = Path(text).expanduser()
    if path.exists():
        return str(path.resolve())
    return text if revision is None else f"{text.partition('@')[0]}@{revision}"


def existing_report(
    model: Checkpoint, corpus: Corpus, anatomy: Anatomy, target: Path, seed: int, skip_first: int = 1
) -> Report:
    """The report of this model in `target`, made now where there is none.

    Raises:
        OutputError: the report there is of another model.
    """
    from depthprobe.analysis import build_report
    from depthprobe.fingerprint import fingerprint
    from depthprobe.measure import Settings, measure
    from depthprobe.processes import told
    from depthprobe.progress import Bar, say
    from depthprobe.report import Report

    def there() -> Report | None:
        if not (target / "report.json").exists():
            return None
        report = Report.load(target)
        mine = {"name": model.name, "architecture": model.architecture}
        mine["fingerprint"] = fingerprint(model.model, model.offload)
        mine["dtype"] = str(model.dtype).removeprefix("torch.")
        odd = [name for name, value in mine.items() if report.model.get(name) != value]
        if odd:
            raise OutputError(
                f"{target} holds a report of a model with another {', '.join(odd)}", fix="choose another --out"
            )
        return report

    if (report := told(there)) is not None:
        return report
    settings = Settings(skip_first=skip_first, seed=seed)
    say(f"No report in {target} yet: measuring first. {settings.cost(anatomy, corpus)}")
    with Bar("Measuring", corpus.sequences) as progress:
        measured = measure(anatomy, corpus, settings, progress)
    options = {"tokens": corpus.inputs.shape[0] * corpus.tokens} | vars(settings)
    return build_report(model, corpus, anatomy, measured, settings, options, command_line())


def finished_report(
    target: Path, options: dict[str, Any], opened: tuple[Checkpoint, Corpus] | None = None
) -> Report | None:
    """The report that `analyze` left in `target`, None where there is none.

    Args:
        target: the folder.
        options: of this analysis, as they stand in a report.
        opened: the checkpoint and the text, once they are open; before that, only the options are looked at.

    Raises:
        OutputError: the report there cannot be read, or is of other weights, another text or other options.
    """
    if not (target / "report.json").exists():
        return None
    report = _readable(target)
    theirs: dict[str, Any] = report.run.get("options") or {}
    idle = _NO_MATTER if options["ablations"] else _NO_MATTER | {"ablation_tokens"}
    pairs = {name: (theirs.get(name, "not said"), value) for name, value in options.items() if name not in idle}
    if opened is not None:
        pairs |= _identity(report, *opened)
    odd = [f"{name}: {_short(there)}, here {_short(here)}" for name, (there, here) in pairs.items() if there != here]
    if odd:
        raise OutputError(f"{target} holds another report ({'; '.join(odd)})", fix="choose another --out")
    return report


def _identity(report: Report, model: Checkpoint, corpus: Corpus) -> dict[str, tuple[Any, Any]]:
    """What a report says of its model and its text, beside what these are."""
    from depthprobe.fingerprint import fingerprint

    of_model = {
        "architecture": model.architecture,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "fingerprint": fingerprint(model.model, model.offload),
    }
    of_text = {
        "sha256": corpus.sha256,
        "sequences": corpus.sequences,
        "tokens": corpus.tokens,
        "bos": corpus.bos,
        "first_ids": corpus.first_ids,  # another tokenizer
    }
    words = {"fingerprint": "fingerprint of the model", "sha256": "sha256 of the text", "tokens": "tokens a sequence"}
    return {
        words.get(name, name): (part.get(name), value)
        for part, mine in ((report.model, of_model), (report.corpus, of_text))
        for name, value in mine.items()
    }


def _short(value: Any) -> Any:
    """Enough of a hash to tell it from another."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) in (40, 64) and " " not in value else value
