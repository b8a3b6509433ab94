"""The bundle, format 1: a folder with everything that a model needs to be used, and nothing that can run code.

config.json         format, family, and every setting of the model
model.safetensors   its tensors, and no metadata: equal weights are equal bytes
preprocess.json     what happens to pixels before the model sees them
labels.json         the name of each class, or null
provenance.json     where it comes from: data, scores, licences, versions
README.md           the model card
manifest.json       SHA-256 of every file above
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.configs.bundle import FORMAT, check_folder
from vitrail.errors import DamagedError, UsageError
from vitrail.images.preprocess import Preprocess
from vitrail.models.base import AnyModel, Model
from vitrail.models.create import build
from vitrail.storage import whole_folder, write_json
from vitrail.weights.parts import Parts, check_provenance, read_parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A model with what its use needs. The parts are checked against each other."""

    model: AnyModel
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    """The name of each class, in the order of the logits."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Anything that JSON can hold about where this comes from."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model) or not isinstance(self.preprocess, Preprocess):
            kinds = f"{type(self.model).__name__} and {type(self.preprocess).__name__}"
            raise UsageError(f"Bundle must have a model from vitrail.create and a vitrail.Preprocess, got {kinds}.")
        object.__setattr__(self, "labels", self.parts.labels)

    @property
    def parts(self) -> Parts:
        """Everything but the weights."""
        return Parts(
            config=self.model.config, preprocess=self.preprocess, labels=self.labels, provenance=self.provenance
        )


def save(bundle: Bundle, path: str | Path, *, force: bool = False) -> None:
    """Write `bundle` to the folder `path`, whole or not at all. An existing path is refused unless `force`."""
    config = bundle.model.config
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in bundle.model.state_dict().items()}
    # What is written must be what can be read: a model that was changed by hand no longer is what its settings say.
    with torch.device("meta"):
        expected = build(config)
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise UsageError(
            f"Model must have finite weights, got others in {', '.join(broken[:5])}. Did training diverge?"
        )
    if problems := _mismatch(expected, tensors):
        raise UsageError(f"Model must be as its configuration says (and not compiled or wrapped), got: {problems}.")
    check_provenance(bundle.provenance)
    with whole_folder(Path(path), force=force) as folder:
        write_json(folder / "config.json", {"format": FORMAT, "family": config.family, **config.to_json()})
        write_json(folder / "preprocess.json", bundle.preprocess.to_json())
        write_json(folder / "labels.json", bundle.labels)
        write_json(folder / "provenance.json", bundle.provenance)
        (folder / "README.md").write_text(_model_card(bundle), encoding="utf-8")
        save_tensors(tensors, folder / "model.safetensors")


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; what goes wrong is an OSError, as for other files."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(None, str(error).removeprefix("Error while serializing: "), str(path)) from None


def load(path: str | Path) -> Bundle:
    """Read a bundle back: a folder, or an embedded one by its name ("fashion").

    Every file is checked against the manifest, every tensor against the model.
    """
    parts, folder = read_parts(path), check_folder(path)
    with torch.device("meta"):
        model = build(parts.config)
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{str(weights)!r} cannot be read ({error}).") from None
    if problems := _mismatch(model, tensors):
        raise DamagedError(f"{str(weights)!r} does not fit {parts.config.name or parts.config.family}: {problems}.")
    # Into memory of its own: kernels choose their path by alignment, and a view into the file would answer with other
    # last bits than the model that was saved.
    model.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
    model.fill_tables()
    return Bundle(model=model.eval(), preprocess=parts.preprocess, labels=parts.labels, provenance=parts.provenance)


def _mismatch(model: AnyModel, tensors: dict[str, Tensor]) -> str:
    """Which tensors are missing, left over, or of another shape or kind than the model's; empty where all fit."""
    expected = model.state_dict()
    problems = [
        *(f"{name} is missing" for name in expected.keys() - tensors.keys()),
        *(f"{name} is unknown" for name in tensors.keys() - expected.keys()),
    ]
    for name in expected.keys() & tensors.keys():
        theirs, ours = tensors[name], expected[name]
        if theirs.shape != ours.shape:
            problems.append(f"{name} has shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
        elif theirs.is_floating_point() != ours.is_floating_point():
            problems.append(f"{name} has numbers of kind {theirs.dtype} instead of {ours.dtype}")
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(sorted(problems)[:5]) + more


def _model_card(bundle: Bundle) -> str:
    """What a stranger reads first; the front matter is what model hubs read."""
    info = bundle.model.config.info()
    provenance = bundle.provenance
    height, width = info["resolution"]
    is_classifier = getattr(bundle.model.config, "output", "classes") == "classes"
    task = "image-classification" if is_classifier else "unconditional-image-generation"
    use = 'print(vitrail.Classifier("path/to/this/folder").predict(["picture.png"]))'
    if not is_classifier:
        use = 'model = vitrail.load("path/to/this/folder").model'
    lines = [
        "---",
        "library_name: vitrail",
        f"pipeline_tag: {task}",
        f"license: {json.dumps(provenance.get('licence', 'unknown'))}",
        f"tags: [{task}, {info['family']}]",
        "---",
        f"# {info['name'] or info['family']}",
        "",
        f"{info['parameters']:,} parameters, {info['macs']:,} multiply-accumulates for one picture of"
        f" {height} x {width} pixels with {info['channels']} channel(s), {info['classes']:,} classes.",
        "",
        "```python",
        "import vitrail",
        use,
        "```",
        "",
        "## Where it comes from",
        "",
        *(f"- {key.replace('_', ' ')}: {value}" for key, value in provenance.items()),
    ]
    if not provenance:
        lines.append("Nothing is recorded.")
    return "\n".join(lines) + "\n"
