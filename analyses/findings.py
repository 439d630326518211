"""Write what the studies found: every figure, every part of the findings, and the table of all claims.

    python analyses/findings.py

From data/results/ alone, in seconds; nothing is measured. Holm's correction is over the primary tests of all studies
whose tables are there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
TABLE = "claims"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("data/results"), help="the tables (default: %(default)s)")
    parser.add_argument("--figures", type=Path, default=Path("analyses/figures"), help="where the figures go")
    parser.add_argument("--readme", type=Path, default=Path("analyses/README.md"), help="what is rewritten")
    options = parser.parse_args(argv)
    try:
        run(options)
    except DepthprobeError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(options: argparse.Namespace) -> None:
    sections = read(options.results)
    for name, text in texts(sections).items():
        study.write_section(options.readme, name, text)
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
        effects = "; ".join(
            f"{study.effect(test)} ({word})" if len(mine) > 1 else study.effect(test) for test, _, word in mine
        )
        seeds = "/".join(dict.fromkeys(study.seeds_of(test) for test, *_ in mine))
        part = home[claim.name]
        figure = f"[{part.figures[0].name}](figures/{part.figures[0].name}.png)" if part.figures else ""
        rows.append([claim.name, claim.sentence, f"**{word}**", effects, seeds, figure, part.minds[claim.name]])
    tests = sum(not isinstance(test, study.Ruled) for test, *_ in found)
    head = ["claim", "what it says", "verdict", "what was found [95 % interval over seeds]", "seeds", "figure",
            "what would change our mind"]  # fmt: skip
    return f"Holm's correction is over {tests} primary tests.\n\n{study.markdown(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
