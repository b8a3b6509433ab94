"""Bundles (formats 1 and 2): folders with a model, its preprocessing and its labels, without executable code.

config.json         format, family, and every setting of the model
model.safetensors   its tensors, and no metadata: equal weights are equal bytes
preprocess.json     how images are resized, cropped and normalised
labels.json         the name of each class, or null
provenance.json     training data, scores, licences, versions
answer.json         format 2: the decision rule, if it is not `SingleLabel` (`bundles.decision`)
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
from vitrail.bundles.folder import DECISION_RULE_FILE, FORMAT, check_folder, reread_if_replaced
from vitrail.bundles.metadata import BundleInfo, read_bundle_info
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import MANIFEST, atomic_folder, checksum, read_json, utf8_path, write_json
from vitrail.core.memory import LARGE_ALLOCATION, check_allocation
from vitrail.core.notebook import card
from vitrail.core.registry import load_object
from vitrail.core.settings import pluralise
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel, Model
from vitrail.models.config import ModelConfig
from vitrail.models.create import build
from vitrail.models.device import choose_device, find_device
from vitrail.models.head_layers import LAYER_TYPES
from vitrail.models.head_modules import describe_head

_CLAIMS = ("scores", "proofs")


class MeasuredClaims(NamedTuple):
    """Scores and proofs of a bundle's provenance, with the model and the settings they were measured on."""

    claims: dict[str, Any]
    """The provenance's scores and its proofs of equality with another library."""
    config: ModelConfig
    """Configuration of the model. Its identity is compared: a new head or another model has another object."""
    preprocess: Preprocess
    labels: tuple[str, ...] | None
    decision_rule: DecisionRule
    weights: str
    """SHA-256 of the model.safetensors that was loaded, otherwise the bundle's fingerprint. Empty without claims."""

    def has_settings_of(self, bundle: "Bundle") -> bool:
        """Return whether the claims were measured with the settings of `bundle`. Weights are not compared."""
        if self.config is not bundle.model.config:
            return False
        measured_settings = (self.preprocess, self.labels, self.decision_rule)
        return measured_settings == (bundle.preprocess, bundle.labels, bundle.answer)

    def apply_to(self, bundle: "Bundle", weights: Path) -> bool:
        """Return whether the claims were measured on `bundle`, whose weights are in the file `weights`."""
        has_weights = not self.claims or self.weights in (checksum(weights), bundle.fingerprint())
        return has_weights and self.has_settings_of(bundle)

    def remove_from(self, provenance: dict[str, Any]) -> dict[str, Any]:
        """Return the provenance without these claims. Newer values under the same names are kept."""
        return {
            name: value for name, value in provenance.items() if name not in self.claims or self.claims[name] != value
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """A model with its preprocessing, labels and provenance, which are checked against each other.

    To change a part, copy the bundle with `dataclasses.replace`. The other parts and the resize rule stay as they are.
    Scores and proofs are removed from the provenance if the model, preprocessing, labels or decision rule change.

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
    """Where the model comes from: a dictionary that JSON can represent."""
    answer: DecisionRule = SINGLE_LABEL
    """Decision rule: one class (`SingleLabel`), or several labels with their thresholds (`MultiLabel`)."""
    measured: MeasuredClaims | None = dataclasses.field(default=None, repr=False, compare=False)
    """The model that the provenance's scores were measured on. By default, this model in its current state."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, Model) or not isinstance(self.preprocess, Preprocess):
            types = f"{type(self.model).__name__} and {type(self.preprocess).__name__}"
            raise UsageError(f"Bundle must have a model from vitrail.create and a vitrail.Preprocess, got {types}.")
        object.__setattr__(self, "labels", self.info.labels)
        if self.measured is not None and not self.measured.has_settings_of(self):
            object.__setattr__(self, "provenance", self.measured.remove_from(self.provenance))
            object.__setattr__(self, "measured", None)
        if self.measured is None:
            claims = _scores_and_proofs(self.provenance)
            weights = self.fingerprint() if claims else ""
            measured = MeasuredClaims(claims, self.model.config, self.preprocess, self.labels, self.answer, weights)
            object.__setattr__(self, "measured", measured)
        self.model.preprocess = self.preprocess

    @property
    def info(self) -> BundleInfo:
        """The bundle without its weights."""
        return BundleInfo(
            config=self.model.config,
            preprocess=self.preprocess,
            labels=self.labels,
            provenance=self.provenance,
            answer=self.answer,
        )

    @property
    def is_trained(self) -> bool:
        """Whether the provenance records training steps or a conversion from another library."""
        return bool({"steps", "converted_from"} & self.provenance.keys())

    def _repr_html_(self) -> str:
        config, provenance = self.model.config, self.provenance
        labels = self.labels or ()
        first_labels = ", ".join(labels[:5]) + (f", and {len(labels) - 5:,} more" if len(labels) > 5 else "")
        rows = [
            ("input", f"{' x '.join(map(str, config.resolution))} px, {pluralise(config.channels, 'channel')}"),
            ("classes", f"{config.classes:,}" + (f": {first_labels}" if first_labels else "")),
            ("parameters", f"{config.parameters:,}"),
            (
                "trained",
                f"{provenance['steps']:,} steps"
                if isinstance(provenance.get("steps"), int)
                else provenance.get("converted_from", "-"),
            ),
        ]
        scores = provenance.get("scores")
        if isinstance(scores, dict) and isinstance(scores.get("accuracy"), float):
            rows.append(("accuracy", f"{scores['accuracy']:.1%}"))
        return card(config.name or config.family, rows, "vitrail.Bundle")

    def fingerprint(self) -> str:
        """Return the SHA-256 of everything that predictions depend on: settings, preprocessing, labels, decision rule
        and weights."""
        documents = [self.model.config.to_document(), self.preprocess.to_json(), self.labels]
        if self.answer != SINGLE_LABEL:  # keeps the fingerprints of bundles from before there were decision rules
            documents.append(self.answer.to_json())
        digest = hashlib.sha256(json.dumps(documents, sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            array = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
            digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def save(bundle: Bundle, path: str | Path, *, force: bool = False) -> None:
    """Write `bundle` to the folder `path`, atomically. An existing path is refused unless `force`.

    All parts are checked again, because the model may have changed since the bundle was created. Scores and proofs that
    were measured on other weights are left out.

        >>> vitrail.save(vitrail.load("fashion"), "copy")
        >>> vitrail.load("copy").labels[:2]
        ('Ankle boot', 'Bag')
    """
    config = bundle.model.config
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in bundle.model.state_dict().items()}
    # `load` builds the model from its settings, so a model that was modified by hand could not be read again.
    expected = check_head(bundle.model)
    try:
        info = bundle.info
    except UsageError as error:
        raise UsageError(f"{error} Use dataclasses.replace(bundle, model=..., labels=..., preprocess=...).") from None
    if not_finite := find_not_finite(tensors):
        raise UsageError(
            f"Model must have finite weights, got NaN or infinity in {', '.join(not_finite[:5])}. Did training diverge?"
        )
    if problems := _describe_mismatch(
        expected, {name: TensorHeader(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    ):
        raise UsageError(f"Model must be as its configuration says (and not compiled or wrapped), got: {problems}.")
    with atomic_folder(Path(path), force=force) as folder:
        extensions = {"extensions": config.extensions} if config.extensions else {}
        document = {"format": 1 if bundle.answer == SINGLE_LABEL else FORMAT, **extensions, **config.to_document()}
        write_json(folder / "config.json", document)
        write_json(folder / "preprocess.json", info.preprocess.to_json())
        write_json(folder / "labels.json", info.labels)
        if bundle.answer != SINGLE_LABEL:
            write_json(folder / DECISION_RULE_FILE, bundle.answer.to_json())
        save_tensors(tensors, folder / "model.safetensors")
        provenance = info.provenance
        if bundle.measured is not None and not bundle.measured.apply_to(bundle, folder / "model.safetensors"):
            provenance = bundle.measured.remove_from(provenance)
        write_json(folder / "provenance.json", provenance)
        (folder / "README.md").write_text(model_card(config, provenance), encoding="utf-8")


def check_head(model: AnyModel) -> AnyModel:
    """Raise UsageError if the model's head is not the one that its configuration describes. Return the model that the
    configuration describes, on the meta device."""
    with torch.device("meta"):
        expected = build(model.config)
    head = model.head
    described, required = (describe_head(module, model.head_width) for module in (head, expected.head))
    if described != required or (described is None and repr(head) != repr(expected.head)):
        got = head if isinstance(head, nn.Linear) else type(head).__name__
        raise UsageError(
            f"Head must be layers of torch.nn from width {model.head_width} to the classes, the last a linear one"
            f" ({', '.join(LAYER_TYPES)}), or nn.Identity() for no classes, got {got}. Assign such a head to"
            " model.head, or use model.reset_classifier(classes)."
        )
    return expected


def _scores_and_proofs(provenance: dict[str, Any]) -> dict[str, Any]:
    return {name: provenance[name] for name in _CLAIMS if name in provenance}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file. Raise OSError on failure, as other functions that write files do."""
    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(None, str(error).removeprefix("Error while serializing: "), str(path)) from None


@reread_if_replaced
def load(path: str | Path, *, device: str = "cpu") -> Bundle:
    """Load a local bundle, with its model on a device: a folder, or an embedded bundle by its name ("fashion").

    Every file is checked against the manifest, every tensor against the model. The header of the weights is compared
    with the model's shapes before memory is allocated for them.
    """
    torch_device = find_device(device)
    info, folder = read_bundle_info(path), check_folder(path)
    weights = folder / "model.safetensors"
    if (size := weights.stat().st_size) > LARGE_ALLOCATION:
        check_allocation(size, f"Bundle {str(path)!r}")
    with torch.device("meta"):
        model = load_object(info.config.model)(info.config)
    try:
        with utf8_path(weights) as utf8_weights, safe_open(utf8_weights, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            headers = {
                name: TensorHeader(part.get_shape(), _DTYPES.get(part.get_dtype())) for name, part in slices.items()
            }
            if not info.config.classes:  # older versions wrote a head of zeros for one class
                expected = model.state_dict()
                headers = {
                    name: header for name, header in headers.items() if name in expected or not name.startswith("head.")
                }
            if problems := _describe_mismatch(model, headers):
                name = info.config.name or info.config.family
                raise CorruptFileError(path=weights, cause=f"does not fit {name}: {problems}")
            # Copied, because kernels choose their path by alignment: logits computed from a view into the file would
            # differ in the last bits from those of the model that was saved.
            tensors = {name: file.get_tensor(name).to(torch_device, copy=True) for name in headers}
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(path=weights, cause=f"cannot be read ({error})") from None
    if not_finite := find_not_finite(tensors):
        raise CorruptFileError(
            path=weights, cause=f"must hold finite numbers, got NaN or infinity in {', '.join(not_finite[:5])}"
        )
    model.load_state_dict(tensors, assign=True)
    model.fill_tables()
    model.eval()
    # The file has been verified above, so its hash is the one in the manifest.
    weights_sha256 = read_json(folder / MANIFEST)["files"][weights.name]
    return Bundle(
        model=model,
        preprocess=info.preprocess,
        labels=info.labels,
        provenance=info.provenance,
        answer=info.answer,
        measured=MeasuredClaims(
            _scores_and_proofs(info.provenance), model.config, info.preprocess, info.labels, info.answer, weights_sha256
        ),
    )


def open_bundle(bundle: Bundle | str | Path) -> Bundle:
    """Load the bundle at a path or of a name, on the CPU. A `Bundle` is returned unchanged."""
    return bundle if isinstance(bundle, Bundle) else load(bundle)


def open_to_compute(bundle: Bundle | str | Path, *, device: str | None = None) -> Bundle:
    """Load a bundle on a device, by default on `auto`. The model of a `Bundle` is moved in place if `device` is
    given."""
    if not isinstance(bundle, Bundle):
        return load(bundle, device=str(choose_device("auto" if device is None else device)))
    if device is not None:
        bundle.model.to(choose_device(device))
    return bundle


def bundle_key(bundle: Bundle | str | Path) -> str:
    """Return the SHA-256 of a bundle's manifest. For a `Bundle` in memory, return its fingerprint."""
    if isinstance(bundle, Bundle):
        return bundle.fingerprint()
    return hashlib.sha256((check_folder(bundle) / MANIFEST).read_bytes()).hexdigest()


def find_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that contain NaN or infinity."""
    # A finite sum proves that all elements are finite, at a twentieth of the cost of checking each. The sum may also
    # overflow, so the elements are checked if it is not finite.
    return [name for name, tensor in tensors.items() if not tensor.sum().isfinite() and not tensor.isfinite().all()]


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: Sequence[int]
    dtype: torch.dtype | None
    """None if no model uses this dtype."""


# Names of dtypes in the header of a safetensors file.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


def _describe_mismatch(model: AnyModel, headers: Mapping[str, TensorHeader]) -> str:
    """Describe tensors that are missing, unknown, or of another shape or dtype than the model's. Return an empty string
    if all match."""
    expected = model.state_dict()
    problems = [
        *(f"{name} is missing" for name in expected.keys() - headers.keys()),
        *(f"{name} is unknown" for name in headers.keys() - expected.keys()),
    ]
    # Weights may have any precision, but all must have the same.
    float_dtypes = [dtype for _, dtype in headers.values() if dtype is not None and dtype.is_floating_point]
    precision = statistics.mode(float_dtypes) if float_dtypes else torch.float32
    for name in expected.keys() & headers.keys():
        (shape, dtype), tensor = headers[name], expected[name]
        expected_dtype = precision if tensor.is_floating_point() else tensor.dtype
        if tuple(shape) != tuple(tensor.shape):
            problems.append(f"{name} has shape {tuple(shape)} instead of {tuple(tensor.shape)}")
        elif dtype != expected_dtype:
            problems.append(f"{name} has numbers of type {dtype or 'unknown'} instead of {expected_dtype}")
    remainder = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(sorted(problems)[:5]) + remainder
