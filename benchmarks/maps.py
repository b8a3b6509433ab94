"""Which map is to be believed? Deletion and insertion of every map on photos, with intervals.

    .venv/bin/python benchmarks/maps.py                     (about 14 minutes on two cores)

DeiT-Ti/16, 100 ImageNet photos spread over the 500, the class that the model answers. Patches are taken away (filled
with the photo's mean colour) in the order of a map, most important first, or put back into an empty image; the number
is the answer's mean share on the way. `beside random` is the difference to a random order on the same photo. Intervals
are 95 % over photos (Student).
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


def interval(values, digits=3):
    low, high = mean_interval(values)
    return f"{np.mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=100)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(str(SHARED / "deit-ti16"), Path(folder) / "deit", "vitrail", verifies=False, images=[])
        bundle = load(f"{folder}/deit")
    photos = open_data(SHARED / "imagenet-val-500").first_split.sample_evenly(chosen.photos).images
    found: dict[str, list[tuple[float, float]]] = {}
    for number, photo in enumerate(photos):
        image = bundle.preprocess([photo])[0]
        seen = look(bundle.model, image[None])
        label, grid = int(seen.logits[0].argmax()), bundle.model.config.grid
        judged = {name: values[0] for name, values in maps(bundle.model, image[None], seen).items()}
        judged["occlusion"] = occlusion(bundle.model, image, label, grid)
        judged["random"] = np.random.default_rng(number).random(grid)
        for name, values in judged.items():
            found.setdefault(name, []).append(faith(bundle.model, image, label, values, grid))
    print("| map | deletion (low is good) | beside random | insertion (high is good) | beside random |")
    print("|---|---|---|---|---|")
    chance = np.array(found["random"])
    for name, rows in found.items():
        scores = np.array(rows)
        cells = []
        for column in (0, 1):
            cells.append(interval(scores[:, column].tolist()))
            gap = (scores - chance)[:, column].tolist()
            cells.append("-" if name == "random" else interval(gap))
        print("| " + " | ".join((name, *cells)) + " |")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
