"""Fidelity of attribution maps: deletion and insertion scores on photos, with intervals.

    .venv/bin/python benchmarks/maps.py                     (about 14 minutes on two cores)

DeiT-Ti/16 predicts 100 of the 500 ImageNet photos. Patches are removed (filled with the photo's mean colour) in the
order of a map, most important first, or inserted into an empty image. The score is the mean probability of the
predicted class over the steps. `minus random` is the difference to a random order on the same photo. Intervals are 95
% over photos (Student's t).
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from images import SHARED
from vitrail.analysis.evidence import faith, occlusion
from vitrail.analysis.maps import maps
from vitrail.bundles.bundle import load
from vitrail.bundles.convert import convert
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.metrics import mean_interval
from vitrail.models.activations import look


def format_interval(values, digits=3):
    """Format the mean of values and its 95 % interval."""
    low, high = mean_interval(values)
    return f"{np.mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(str(SHARED / "deit-ti16"), Path(folder) / "deit", "vitrail", verifies=False, images=[])
        bundle = load(f"{folder}/deit")
    photos = open_data(SHARED / "imagenet-val-500").first_split.sample_evenly(options.photos).images
    scores_by_map: dict[str, list[tuple[float, float]]] = {}
    for number, photo in enumerate(photos):
        image = bundle.preprocess([photo])[0]
        activations = look(bundle.model, image[None])
        label, grid = int(activations.logits[0].argmax()), bundle.model.config.grid
        image_maps = {name: values[0] for name, values in maps(bundle.model, image[None], activations).items()}
        image_maps["occlusion"] = occlusion(bundle.model, image, label, grid)
        image_maps["random"] = np.random.default_rng(number).random(grid)
        for name, values in image_maps.items():
            scores_by_map.setdefault(name, []).append(faith(bundle.model, image, label, values, grid))
    print("| map | deletion (lower is better) | minus random | insertion (higher is better) | minus random |")
    print("|---|---|---|---|---|")
    random_scores = np.array(scores_by_map["random"])
    for name, rows in scores_by_map.items():
        scores = np.array(rows)
        cells = []
        for column in (0, 1):
            cells.append(format_interval(scores[:, column].tolist()))
            differences = (scores - random_scores)[:, column].tolist()
            cells.append("-" if name == "random" else format_interval(differences))
        print("| " + " | ".join((name, *cells)) + " |")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
