"""Write what the studies found: every figure, every part of the findings, and the table of all claims.

What `benchmark.py` measured goes into the README too.

    python analyses/findings.py

From data/results/ alone, in seconds; nothing is measured. Holm's correction is over the primary tests of all studies
whose tables are there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmark_report
import branch_norm
import gradient_norms
import growth
import merge_twins
import pre_vs_post
import real_checkpoints
import study
import transfer
import variants
import warmup

from depthprobe.criteria import CLAIMS
from depthprobe.errors import DepthprobeError
from depthprobe.progress import say

STUDIES = (  # in the order of the README
    gradient_norms, warmup, branch_norm, pre_vs_post, growth, merge_twins, transfer, variants,
    real_checkpoints,
)  # fmt: skip
TABLE, HEADLINE, BESIDE = "claims", "findings", "benchmark"
THESIS = ("R1", "R2", "M1", "M2", "M3", "D1")  # what "pre-LN adds width, not depth" rests on


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("data/results"), help="the tables (default: %(default)s)")
    parser.add_argument("--figures", type=Path, default=Path("analyses/figures"), help="where the figures go")
    parser.add_argument("--readme", type=Path, default=Path("analyses/README.md"), help="what is rewritten")
    parser.add_argument("--headline", type=Path, default=Path("README.md"), help="where the headline is rewritten")
    return study.guarded(parser, run, argv)


def run(options: argparse.Namespace) -> None:
    sections = read(options.results)
    for name, text in texts(sections).items():
        study.write_section(options.readme, name, text)
    study.write_section(options.headline, HEADLINE, headline(sections))
    for path, beside in zip((options.headline, options.readme), side_by_side(options.results), strict=False):
        study.write_section(path, BESIDE, beside)
    for each in sections:
        study.write_figures(each, options.figures)
    say(f"Wrote {options.readme} and {sum(len(each.figures) for each in sections)} figures to {options.figures}.")


def read(results: Path) -> list[study.Section]:
    """The sections of all studies whose tables are there; a line about each other one."""
    sections = []
    for each in STUDIES:
        try:
            sections.append(each.section(results))
        except DepthprobeError as error:
            say(f"{each.NAME}.py has nothing to say yet: {error}")
    return sections


def texts(sections: Sequence[study.Section]) -> dict[str, str]:
    """What stands in the README, by the name of its part."""
    found = study.adjusted([test for each in sections for test in each.tests])
    parts = {}
    start = 0
    for each in sections:
        parts[each.name] = each.text(found[start : start + len(each.tests)])
        start += len(each.tests)
    return {TABLE: claims(sections, found), **parts}


def claims(sections: Sequence[study.Section], found: Sequence[study.Verdict]) -> str:
    """A row a claim, in their order: verdict, effects, seeds, figure, what would change our mind."""
    home = {test.claim: each for each in sections for test in each.tests}
    rows = []
    for claim in CLAIMS:
        mine = [(test, p, word) for test, p, word in found if test.claim == claim.name]
        if not mine:
            rows.append([claim.name, claim.sentence, "not tested yet", "", "", "", ""])
            continue
        word = study.of_claim([word for *_, word in mine])
        seeds = "/".join(dict.fromkeys(study.seeds_of(test) for test, *_ in mine))
        part = home[claim.name]
        shown = [each.name for each in part.figures if claim.name in each.claims or not each.claims]
        figure = f"[{shown[0]}](figures/{shown[0]}.png)" if shown else ""
        rows.append(
            [claim.name, claim.sentence, f"**{word}**", measured(mine, part), seeds, figure, part.minds[claim.name]]
        )
    tests = sum(study.in_holm(test) for test, *_ in found)
    head = ["claim", "what it says", "verdict", "what was found [95 % interval over seeds]", "seeds", "figure",
            "what would change our mind"]  # fmt: skip
    made = sum(isinstance(test, study.Primary | study.Counted) for test, *_ in found)
    text = f"""`supported` is after Holm's correction over all primary tests, of which {tests} are here and {made}
could be made so far; their number grows with the studies that are still to come. `contradicted` is by an interval that
excludes the prediction, without correction; where failed runs or a rule decide, it says so. In the parts below p is of
the hypothesis that the mean lies outside of what was predicted, so that it is high where a test is contradicted. A
claim with several tests is supported if all are, and contradicted if one is, whatever the others say. The verdict is on
the prediction in the fourth column, at the size and length of training of its study, and on no wider reading of the
claim. What stands there beside the tests, after their verdicts, is secondary and supports nothing.

"Smallest effect", here and in all parts below, is what so many seeds, as far apart as these, show at 80 % power
(two-sided, 5 %, before Holm): of a primary test a distance from the boundary of what was predicted, of any other mean a
distance from whatever fixed value one has in mind, a factor (×) where it is the mean of a ratio's logs."""
    return f"{text}\n\n{study.markdown(head, rows)}"


def measured(mine: Sequence[study.Verdict], part: study.Section) -> str:
    """What the tests of a claim measured, predicted and found, and what else there is to know."""
    name, parts = mine[0][0].claim, []
    for test, _, word in mine:
        least = study.least_effect(test)
        beside = [f"smallest effect {least}"] if least != "–" else []
        beside += [word] if len(mine) > 1 else []
        parts.append(f"{test.sentence}: {study.effect(test)}" + (f" ({'; '.join(beside)})" if beside else ""))
    changed = [CHANGED] if name in part.changed else []
    return "<br>".join([*parts, *changed, *filter(None, [part.notes.get(name)])])


def headline(sections: Sequence[study.Section]) -> str:
    """What the project's README says: how the claims came out, those that its thesis rests on first."""
    found = study.adjusted([test for each in sections for test in each.tests])
    words: dict[str, str] = {}
    for name in dict.fromkeys(test.claim for test, *_ in found):
        words[name] = study.of_claim([word for test, _, word in found if test.claim == name])
    say_of = {claim.name: claim.sentence.rstrip(".") for claim in CLAIMS}
    order = [*THESIS, *(claim.name for claim in CLAIMS if claim.name not in THESIS)]
    rows = []
    for name in (name for name in order if name in words):
        mine = [each for each in found if each[0].claim == name]
        part = next(each for each in sections if any(test.claim == name for test in each.tests))
        mark = " †" if name in part.changed else ""
        seeds = "/".join(dict.fromkeys(study.seeds_of(test) for test, *_ in mine))
        rows.append([f"{say_of[name]} ({name})", f"**{words[name]}**{mark}", briefly(mine), seeds])
    counts = [(word, [name for name in words if words[name] == word]) for word in ORDER]
    tally = ", ".join(f"{len(names)} {word}" for word, names in counts if names)
    open_ = len(CLAIMS) - len(words)
    rest = f"; {open_} are not tested yet" if open_ else ""
    marked = " (†: a test when its rows were known)" if any(each.changed for each in sections) else ""
    text = f"""Of {len(CLAIMS)} claims of two widely read notes on layer normalisation, tested on models of width 64:
{tally}{rest}. A verdict is on the prediction beside the
effect, at this size and length of training, and on no wider reading of the claim; a mean that points the right way
supports nothing. The tests were fixed beforehand in `analyses/PREREGISTRATION.md`, which also lists what was
changed{marked}; every run, the failed ones too, is in `data/results/`. What each test
is, what it could have shown, what else was found and what would change our mind:
[analyses/README.md](analyses/README.md#findings)."""
    figures = [FIGURE] if any(each.name == "growth" for each in sections) else []
    head = ["claim", "verdict", "effect [95 % interval over seeds]", "seeds"]
    return "\n\n".join([text, study.markdown(head, rows), *figures])


def side_by_side(results: Path) -> tuple[str, ...]:
    """What `benchmark.py` measured, in brief and in full, in markdown; nothing where it has not yet."""
    path = results / f"{BESIDE}.json"
    if not path.exists():
        return ()
    with study.errors_of(path):
        found = json.loads(path.read_text())
    entries = [entry for entry in found["checkpoints"] if entry.get("comparisons")]
    return benchmark_report.brief(found, entries), benchmark_report.text(found, entries)


def briefly(mine: Sequence[study.Verdict]) -> str:
    """What the tests of a claim measured, what they found and what was predicted, in a few words each."""
    parts = []
    for test, _, word in mine:
        beside = [study.region(test)] if isinstance(test, study.Primary) else []
        beside += [word] if len(mine) > 1 else []
        parts.append(f"{study.label(test)}: {study.effect(test)}" + (f" ({', '.join(beside)})" if beside else ""))
    return "<br>".join(parts)


CHANGED = "A test was changed when its rows were known (see the preregistration)."
ORDER = ("supported", "contradicted", "undecided", study.UNJUDGED)
FIGURE = "![How the stream grows and neighbouring states differ, over depth](analyses/figures/growth.png)"


if __name__ == "__main__":
    sys.exit(main())
