"""What `vitrail inspect` costs for one image, without evidence: seconds, peak memory, size of the page.

    .venv/bin/python benchmarks/pages.py [ViT-Ti/16 ViT-B/16 ViT-L/16]          (about a minute on two cores)

Weights are random, which makes attention flatter than a trained model's; the image is drawn. Each page is made by a
process of its own, from its start to its end.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitrail

CHILD = """
import sys
from vitrail.cli import main
main(["inspect", *sys.argv[1:]])
status = open("/proc/self/status").read()
print("peak", status.split("VmHWM:")[1].split()[0])
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["ViT-Ti/16", "ViT-B/16", "ViT-L/16"])
    chosen = parser.parse_args()
    print("| model | seconds | peak memory | page |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        rows, columns = np.indices((300, 400))
        colours = np.stack([rows * 255 // 300, columns * 255 // 400, (rows * columns) % 256], axis=-1)
        Image.fromarray(colours.astype(np.uint8)).save(f"{folder}/picture.png")
        for name in chosen.models:
            torch.manual_seed(0)
            model = vitrail.create(name)
            torch.nn.init.normal_(model.head.weight, std=0.02)
            bundle = vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=model.config.resolution))
            vitrail.save(bundle, f"{folder}/bundle", force=True)
            words = [f"{folder}/bundle", f"{folder}/picture.png", "--output", f"{folder}/page", "--force"]
            start = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True)
            seconds = time.perf_counter() - start
            peak = int(done.stdout.split("peak")[1]) / 1e6
            page = (Path(folder) / "page" / "index.html").read_text()
            kept = "head means" if "--full" in page else "every head"
            print(f"| {name} | {seconds:.1f} | {peak:.2f} GB | {len(page.encode()) / 1e6:.1f} MB, {kept} |", flush=True)


if __name__ == "__main__":
    main()
