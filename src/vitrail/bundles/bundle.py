"""The bundle, formats 1 and 2: a folder with everything that is needed to use a model, and nothing that can run code.

config.json         format, family, and every setting of the model
model.safetensors   its tensors, and no metadata: equal weights are equal bytes
preprocess.json     what happens to pixels before the model sees them
labels.json         the name of each class, or null
provenance.json     provenance: data, scores, licences, versions
answer.json         format 2: what the logits answer, if not one class (`bundles.decision`)
README.md           the model card
manifest.json       SHA-256 of every file above
"""

import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from vitrail.bundles.card import model_card
from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.bundles.folder import ANSWER_FILE, FORMAT, check_folder
from vitrail.bundles.metadata import BundleInfo, read_bundle_info
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import MANIFEST, atomic_folder, checksum, read_json, utf8_path, write_json
from vitrail.core.memory import check_allocation
from vitrail.core.notebook import card
from vitrail.core.registry import load_object
from vitrail.core.settings import pluralise
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel, Model
from vitrail.models.config import ModelConfig
from vitrail.models.create import build
from vitrail.models.device import choose_device, find_device

_MEASURED = ("scores", "proofs")


class MeasuredClaims(NamedTuple):
    """What a provenance claims of a model's answers, and of which model."""

    claims: dict[str, Any]
    """Its scores, and its proofs of equality with another library."""
    config: ModelConfig
    """Configuration of the model, this very object: a new head or another model has another one."""
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    answer: DecisionRule
    weights: str
    """SHA-256 of the model.safetensors that it was loaded from, otherwise the bundle's fingerprint; empty without
    claims."""

    def fits(self, bundle: "Bundle") -> bool:
        """Whether the parts of a bundle are those that were measured, whatever its weights are now."""
        known = (self.preprocess, self.labels, self.answer)
        return self.config is bundle.model.config and known == (bundle.preprocess, bundle.labels, bundle.answer)

    def is_of(self, bundle: "Bundle", weights: Path) -> bool:
        """Whether a bundle, whose weights are in this file, is the one that was measured."""
        is_same = not self.claims or self.weights in (checksum(weights), bundle.fingerprint())
        return is_same and self.fits(bundle)

    def forget(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """The provenance without these claims. Others of the same names stay: whoever made them answers for them."""
        return {
            name: value for name, value in provenance.items() if name not in self.claims or self.claims[name] != value
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A model with its preprocessing, labels and provenance, which are checked against each other.

    To change a part, make another bundle with `dataclasses.replace`: the preprocessing and the resize rule stay, and
    scores and proofs of another model, preprocessing, list of labels or answer leave the provenance.

        >>> bundle = vitrail.load("fashion")
        >>> bundle.model.reset_classifier(2)
        >>> shoes = dataclasses.replace(bundle, labels=("boot", "sandal"))
        >>> shoes.preprocess == bundle.preprocess, "scores" in bundle.provenance, "scores" in shoes.provenance
        (True, True, False)
    """

    model: AnyModel
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    """The name of each class, in the order of the logits."""
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where the model comes from; anything that JSON can hold."""
    answer: DecisionRule = SINGLE_LABEL
    """What the logits answer: one class, or several labels with their thresholds."""
    measured: MeasuredClaims | None = dataclasses.field(default=None, repr=False, compare=False)
    """What the provenance's scores were measured on; by default, this model as it is now."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model) or not isinstance(self.preprocess, Preprocess):
            kinds = f"{type(self.model).__name__} and {type(self.preprocess).__name__}"
            raise UsageError(f"Bundle must have a model from vitrail.create and a vitrail.Preprocess, got {kinds}.")
        object.__setattr__(self, "labels", self.info.labels)
        if self.measured is not None and not self.measured.fits(self):
            object.__setattr__(self, "provenance", self.measured.forget(self.provenance))
            object.__setattr__(self, "measured", None)
        if self.measured is None:
            claims = _claims(self.provenance)
            weights = self.fingerprint() if claims else ""
            measured = MeasuredClaims(claims, self.model.config, self.preprocess, self.labels, self.answer, weights)
            object.__setattr__(self, "measured", measured)

    @property
    def info(self) -> BundleInfo:
        """Everything but the weights."""
        return BundleInfo(
            config=self.model.config,
            preprocess=self.preprocess,
            labels=self.labels,
            provenance=self.provenance,
            answer=self.answer,
        )

    @property
    def is_trained(self) -> bool:
        """Whether the provenance records a training, or another library that the weights come from."""
        return bool({"steps", "converted_from"} & self.provenance.keys())

    def _repr_html_(self) -> str:
        config, known = self.model.config, self.provenance
        labels = self.labels or ()
        shown = ", ".join(labels[:5]) + (f", and {len(labels) - 5:,} more" if len(labels) > 5 else "")
        rows = [
            ("input", f"{' x '.join(map(str, config.resolution))} px, {pluralise(config.channels, 'channel')}"),
            ("classes", f"{config.classes:,}" + (f": {shown}" if shown else "")),
            ("parameters", f"{config.parameters:,}"),
            (
                "trained",
                f"{known['steps']:,} steps"
                if isinstance(known.get("steps"), int)
                else known.get("converted_from", "-"),
            ),
        ]
        scores = known.get("scores")
        if isinstance(scores, dict) and isinstance(scores.get("accuracy"), float):
            rows.append(("accuracy", f"{scores['accuracy']:.1%}"))
        return card(config.name or config.family, rows, "vitrail.Bundle")

    def fingerprint(self) -> str:
        """SHA-256 of everything that its answers depend on: settings, preprocessing, labels, answer and weights."""
        known = [self.model.config.to_document(), self.preprocess.to_json(), self.labels]
        if self.answer != SINGLE_LABEL:  # other fingerprints are what they were before there were answers
            known.append(self.answer.to_json())
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            plain = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def save(bundle: Bundle, path: str | Path, *, force: bool = False) -> None:
    """Write `bundle` to the folder `path`, atomically. An existing path is refused unless `force`.

    All parts are checked again, because the model may have changed since the bundle was made. Scores and proofs of
    other weights are left out.

        >>> vitrail.save(vitrail.load("fashion"), "copy")
        >>> vitrail.load("copy").labels[:2]
        ('Ankle boot', 'Bag')
    """
    config = bundle.model.config
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in bundle.model.state_dict().items()}
    # What is written must be what can be read: a model that was changed by hand no longer is what its settings say.
    expected = check_head(bundle.model)
    try:
        info = bundle.info
    except UsageError as error:
        raise UsageError(f"{error} Use dataclasses.replace(bundle, model=..., labels=..., preprocess=...).") from None
    if broken := not_finite(tensors):
        raise UsageError(
            f"Model must have finite weights, got NaN or infinity in {', '.join(broken[:5])}. Did training diverge?"
        )
    if problems := _mismatch(expected, {name: Header(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}):
        raise UsageError(f"Model must be as its configuration says (and not compiled or wrapped), got: {problems}.")
    with atomic_folder(Path(path), force=force) as folder:
        extensions = {"extensions": config.extensions} if config.extensions else {}
        document = {"format": 1 if bundle.answer == SINGLE_LABEL else FORMAT, **extensions, **config.to_document()}
        write_json(folder / "config.json", document)
        write_json(folder / "preprocess.json", info.preprocess.to_json())
        write_json(folder / "labels.json", info.labels)
        if bundle.answer != SINGLE_LABEL:
            write_json(folder / ANSWER_FILE, bundle.answer.to_json())
        save_tensors(tensors, folder / "model.safetensors")
        provenance = info.provenance
        if bundle.measured is not None and not bundle.measured.is_of(bundle, folder / "model.safetensors"):
            provenance = bundle.measured.forget(provenance)
        write_json(folder / "provenance.json", provenance)
        (folder / "README.md").write_text(model_card(config, provenance), encoding="utf-8")


def check_head(model: AnyModel) -> AnyModel:
    """Refuse a head that the configuration does not describe, in words that name it. Returns the model that it does
    describe, on the meta device."""
    with torch.device("meta"):
        expected = build(model.config)
    head = model.head
    if type(head) is not type(expected.head) or repr(head) != repr(expected.head):
        got = head if type(head) is nn.Linear else type(head).__name__
        raise UsageError(
            f"Head must be nn.Linear({model.head_width}, classes), or nn.Identity() for no classes, got {got}. Use"
            " model.reset_classifier(classes), or assign such a layer to model.head."
        )
    return expected


def _claims(provenance: dict[str, Any]) -> dict[str, Any]:
    return {name: provenance[name] for name in _MEASURED if name in provenance}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; failures raise OSError, as for other files."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(None, str(error).removeprefix("Error while serializing: "), str(path)) from None


def load(path: str | Path, *, device: str = "cpu") -> Bundle:
    """Load a bundle of this machine, with its model on a device: a folder, or an embedded bundle by its name
    ("fashion").

    Every file is checked against the manifest, every tensor against the model. The header of the weights is compared
    with the model's shapes before memory is allocated for them.
    """
    place = find_device(device)
    info, folder = read_bundle_info(path), check_folder(path)
    check_allocation((folder / "model.safetensors").stat().st_size, f"Bundle {str(path)!r}")
    with torch.device("meta"):
        model = load_object(info.config.model)(info.config)
    weights = folder / "model.safetensors"
    try:
        with utf8_path(weights) as known, safe_open(known, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            header = {name: Header(part.get_shape(), _DTYPES.get(part.get_dtype())) for name, part in slices.items()}
            if not info.config.classes:  # older versions wrote a head of zeros for one class
                ours = model.state_dict()
                header = {name: one for name, one in header.items() if name in ours or not name.startswith("head.")}
            if problems := _mismatch(model, header):
                name = info.config.name or info.config.family
                raise CorruptFileError(path=weights, cause=f"does not fit {name}: {problems}")
            # Into memory of its own: kernels choose their path by alignment, and a view into the file would answer
            # with other last bits than the model that was saved.
            tensors = {name: file.get_tensor(name).to(place, copy=True) for name in header}
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(path=weights, cause=f"cannot be read ({error})") from None
    if broken := not_finite(tensors):
        raise CorruptFileError(
            path=weights, cause=f"must hold finite numbers, got NaN or infinity in {', '.join(broken[:5])}"
        )
    model.load_state_dict(tensors, assign=True)
    model.fill_tables()
    model.eval()
    # What was verified above is the file that the manifest names.
    recorded = read_json(folder / MANIFEST)["files"][weights.name]
    return Bundle(
        model=model,
        preprocess=info.preprocess,
        labels=info.labels,
        provenance=info.provenance,
        answer=info.answer,
        measured=MeasuredClaims(
            _claims(info.provenance), model.config, info.preprocess, info.labels, info.answer, recorded
        ),
    )


def open_bundle(bundle: Bundle | str | Path) -> Bundle:
    """The bundle at a path or of a name, on the CPU; a `Bundle` as it is."""
    return bundle if isinstance(bundle, Bundle) else load(bundle)


def open_to_compute(bundle: Bundle | str | Path, *, device: str | None = None) -> Bundle:
    """The bundle on a device, by default on `auto`; a `Bundle` stays where it is, unless a device is given."""
    if not isinstance(bundle, Bundle):
        return load(bundle, device=str(choose_device("auto" if device is None else device)))
    if device is not None:
        bundle.model.to(choose_device(device))
    return bundle


def bundle_key(bundle: Bundle | str | Path) -> str:
    """SHA-256 of a bundle's manifest; of the parts of one that is in memory."""
    if isinstance(bundle, Bundle):
        return bundle.fingerprint()
    return hashlib.sha256((check_folder(bundle) / MANIFEST).read_bytes()).hexdigest()


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors with NaN or infinities. A finite sum proves that there is none, at a twentieth of the cost of
    checking every element; an infinite one may be an overflow, so then every element is checked."""
    return [name for name, tensor in tensors.items() if not tensor.sum().isfinite() and not tensor.isfinite().all()]


class Header(NamedTuple):
    """Header of a tensor in a file."""

    shape: Sequence[int]
    dtype: torch.dtype | None
    """None if no model uses this dtype."""


# What the header of a safetensors file calls the types of our tensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


def _mismatch(model: AnyModel, found: Mapping[str, Header]) -> str:
    """Which tensors are missing, left over, or of another shape or dtype than the model's; empty if all match."""
    expected = model.state_dict()
    problems = [
        *(f"{name} is missing" for name in expected.keys() - found.keys()),
        *(f"{name} is unknown" for name in found.keys() - expected.keys()),
    ]
    # Weights may be of any precision, but all of the same.
    reals = [dtype for _, dtype in found.values() if dtype is not None and dtype.is_floating_point]
    precision = statistics.mode(reals) if reals else torch.float32
    for name in expected.keys() & found.keys():
        (shape, dtype), ours = found[name], expected[name]
        wanted = precision if ours.is_floating_point() else ours.dtype
        if tuple(shape) != tuple(ours.shape):
            problems.append(f"{name} has shape {tuple(shape)} instead of {tuple(ours.shape)}")
        elif dtype != wanted:
            problems.append(f"{name} has numbers of type {dtype or 'unknown'} instead of {wanted}")
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(sorted(problems)[:5]) + more
