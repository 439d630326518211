"""What is around the code: versions, pins, package data, what git holds, and which module may import which."""

import ast
import importlib.metadata
import importlib.resources
import re
import subprocess
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import depthprobe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "depthprobe"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A module imports only what stands above it; a folder is named by itself and its modules see one another
LAYERS = (
    {"errors", "glossary_depth"},
    {"processes"},
    {"offload", "placement"},
    {"glossary", "estimate", "documents", "formats", "fingerprint"},
    {"contrast"},
    {"conversions", "arrays"},
    {"checkpoint", "corpus"},
    {"fresh"},
    {"blocks"},
    {"stream"},
    {"taps"},
    {"anatomy"},
    {"branches"},
    {"verify"},
    {"probes", "prepare"},
    {"measure"},
    {"ablations"},
    {"summary", "cotangents"},
    {"depth"},
    {"controls"},
    {"report", "progress"},
    {"lab"},
    {"ablation", "effective", "gradient"},
    {"analysis", "evidence"},
    {"criteria"},
    {"verdict"},
    {"comparison"},
    {"depthprobe"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
# Said more narrowly than by the layers: a report is words and figures about numbers that are there already
ONLY = {"report": {"errors", "glossary"}}


def tracked() -> list[Path]:
    """The files of the working tree that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    assert PACKAGE / "errors.py" in files
    return [path for path in files if path.is_file()]


def sources() -> dict[str, ast.Module]:
    """Every module of the package, by its dotted name, parsed."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return modules


MODULES = sources()


def imported(nodes: list[ast.AST]) -> set[str]:
    """The package's own modules that these nodes import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else str(node.module) for name in whole}
    return {name for name in names if name.split(".")[0] == "depthprobe"}


def layer(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


# --- the package ---------------------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    version = PROJECT["version"]
    assert importlib.metadata.version("depthprobe") == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    headings = re.findall(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["date-released"] == headings[0][1]


def test_citation_has_what_the_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == PROJECT["authors"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", citation["date-released"])


def test_licence_is_the_one_that_is_named() -> None:
    assert PROJECT["license"] == yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"] == "Apache-2.0"
    text = " ".join((ROOT / "LICENSE").read_text().split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_file_that_is_not_python_is_declared_and_found() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    declared = {path for pattern in setuptools["package-data"]["depthprobe"] for path in PACKAGE.glob(pattern)}
    held = {path for path in tracked() if path.is_relative_to(PACKAGE) and path.suffix != ".py"}
    assert declared == held
    assert {path.suffix for path in held} == {".jinja", ".css", ".csv", ".typed"}
    for path in held:
        assert importlib.resources.files("depthprobe").joinpath(*path.relative_to(PACKAGE).parts).is_file()


def test_every_folder_is_a_package() -> None:
    """setuptools leaves out a folder without __init__.py, and an editable installation does not show it."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert folders == {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_console_scripts_can_be_called() -> None:
    scripts = importlib.metadata.distribution("depthprobe").entry_points.select(group="console_scripts")
    assert {script.name for script in scripts} == PROJECT["scripts"].keys()
    for script in scripts:
        assert callable(script.load())


# --- what it needs -------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """constraints.txt, name → version."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    exact = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in exact}


def test_constraints_pin_what_is_asked_for_within_its_range() -> None:
    pinned = pins()
    for text in [
        *PROJECT["dependencies"],
        *(text for extra in PROJECT["optional-dependencies"].values() for text in extra),
    ]:
        requirement = Requirement(text)
        if requirement.name != "depthprobe":
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text
    assert pinned["torch"] == "2.13.0"


def test_constraints_pin_everything_that_comes_along() -> None:
    """All that the installed dependencies need in turn. What torch asks for depends on its build."""
    pinned, todo, seen = pins(), [Requirement("depthprobe[dev]")], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                key = (canonicalize_name(needed.name), tuple(sorted(needed.extras)))
                if key not in seen and key[0] != "torch":
                    seen.add(key)
                    todo.append(needed)
    names = {name for name, _ in seen} - {"depthprobe", "setuptools"}
    assert len(names) > 30
    assert names <= pinned.keys()


# --- what git holds ------------------------------------------------------------------------------------------------


def test_no_file_is_large() -> None:
    assert [path for path in tracked() if path.stat().st_size > 8 * 2**20] == []


def test_no_file_names_a_machine_or_a_registry_host() -> None:
    hosts = [
        ("py", "pi.org"),
        ("python", "hosted.org"),
        ("npm", "js.org"),
        ("deb.", "debian.org"),
        ("download.py", "torch.org"),
    ]
    folders = [("/wo", "rk/"), ("/ro", "ot/"), ("/op", "t/"), ("/ho", "me/"), (".py", "env")]
    patterns = [(start + end).encode() for start, end in hosts + folders]
    found = [(path.name, pattern) for path in tracked() for pattern in patterns if pattern in path.read_bytes()]
    assert found == []


# --- how it is written ---------------------------------------------------------------------------------------------


def test_imports_run_one_way() -> None:
    rank = {name: position for position, names in enumerate(LAYERS) for name in names}
    assert {layer(module) for module in MODULES} - rank.keys() == set(), "give these a place in LAYERS"
    for module, tree in MODULES.items():
        own = layer(module)
        others = {layer(name) for name in imported(list(ast.walk(tree)))} - {own}
        assert {name for name in others if rank[name] >= rank[own]} == set(), f"{module} imports what stands below it"
        assert others <= ONLY.get(own, others), f"{module} may import {ONLY.get(own)} only"


def test_no_imports_in_a_circle() -> None:
    graph = {module: imported(tree.body) - {module} for module, tree in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert graph["depthprobe.checkpoint"] >= {"depthprobe.errors"}


def test_what_is_public_is_documented() -> None:
    for name in depthprobe.__all__:
        assert len((getattr(depthprobe, name).__doc__ or "").split()) > 5, name
    bare = []
    for module, tree in MODULES.items():
        assert ast.get_docstring(tree) or module.endswith("__main__"), module
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        for node in classes + [child for parent in [tree, *classes] for child in parent.body]:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                bare += [] if ast.get_docstring(node) else [f"{module}.{node.name}"]
    assert bare == []
