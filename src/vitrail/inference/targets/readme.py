"""README.md of an exported model, with the text of run.py."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.bundles.metadata import BundleInfo
from vitrail.core.files import write_text
from vitrail.inference.targets.program import PROGRAM, argument_name, format_names, required_packages

if TYPE_CHECKING:
    from vitrail.inference.targets.base import Target


def write_readme(
    folder: Path,
    info: BundleInfo,
    target: "type[Target]",
    model: str,
    batch: int,
    proof: dict[str, Any],
    program: str,
) -> None:
    """Write README.md for the model at a path in the folder. The model takes `batch` images per call.

    `program` is the text of run.py.
    """
    name = info.config.name or info.config.family
    licence = info.provenance.get("licence", "unknown")
    (height, width), channels = info.config.resolution, info.config.channels
    batches = "any number of images" if proof["batch"] == "any" else f"{batch} images"
    packages = required_packages(info.preprocess, target)
    text = f"""# {name}, exported to {target.name}

`{model}` takes `pixel_values` ({batches}, {channels} channels, {height} x {width} pixels; float32, normalised as
described in `preprocess.json`) and returns `logits` and `features`, the input of the head. `{PROGRAM}` runs it without
vitrail; it needs only the packages {format_names(packages)}:

```bash
pip install {" ".join(packages)}
python {PROGRAM} {argument_name(info.preprocess)}
```

This is `{PROGRAM}`:

```python
{program}```

{target.notes}

The model computes in {proof["precision"]}. {proof["same_answers"]} of {proof["pictures"]} predictions are the same as
with torch, and logits differ by at most {proof["max_logit_difference"]:.1e}; `proof.json` has these numbers and the
hashes of the files.{_describe_changes(proof)} Licence of the weights: {licence}.
"""
    write_text(folder / "README.md", text.replace("\n\n\n\n", "\n\n"))


def _describe_changes(proof: dict[str, Any]) -> str:
    """Return sentences about merged tokens, and about the predictions that `vitrail bench` compared with float32."""
    text = ""
    if "merging" in proof:
        text += f" The model merges tokens: {describe_merging(proof['merging'])}."
    if (measured := proof.get("measured")) is not None and proof["precision"] != "float32":
        text += (
            f" On {measured['data']}, {measured['same']:,} of {measured['images']:,} predictions are the same as in"
            " float32."
        )
    return text


def describe_merging(merging: dict[str, Any]) -> str:
    """Return how many tokens are merged before each layer, and how many predictions this changes."""
    counts = ", ".join(map(str, merging["merge"]))
    if not merging.get("curve"):
        return f"{counts} before its layers; changed predictions were not counted (no --data)"
    cost = merging["curve"][-1]
    low, high = cost["interval"]
    return (
        f"{counts} before its layers; {cost['changed']} of {cost['count']} predictions differ from the model without"
        f" merging on {merging['data']} ({low:.1%} to {high:.1%})"
    )
