"""Time, peak memory and page size of `vitrail inspect` for one image, without evidence.

    .venv/bin/python benchmarks/pages.py [ViT-Ti/16 ViT-B/16 ViT-L/16]          (about a minute on two cores)

Weights are random, so attention is more uniform than that of a trained model. The image is synthetic. Each page is
written by a separate process, and the time includes its start.
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
    options = parser.parse_args()
    print("| model | seconds | peak memory | page |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        rows, columns = np.indices((300, 400))
        colours = np.stack([rows * 255 // 300, columns * 255 // 400, (rows * columns) % 256], axis=-1)
        Image.fromarray(colours.astype(np.uint8)).save(f"{folder}/picture.png")
        for name in options.models:
            torch.manual_seed(0)
            model = vitrail.create(name)
            torch.nn.init.normal_(model.head.weight, std=0.02)
            bundle = vitrail.Bundle(model=model, preprocess=vitrail.Preprocess(resolution=model.config.resolution))
            vitrail.save(bundle, f"{folder}/bundle", force=True)
            arguments = [f"{folder}/bundle", f"{folder}/picture.png", "--output", f"{folder}/page", "--force"]
            start = time.perf_counter()
            process = subprocess.run(
                [sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=True
            )
            seconds = time.perf_counter() - start
            peak = int(process.stdout.split("peak")[1]) / 1e6
            page = (Path(folder) / "page" / "index.html").read_text()
            detail = "head means" if "--full" in page else "every head"
            print(
                f"| {name} | {seconds:.1f} | {peak:.2f} GB | {len(page.encode()) / 1e6:.1f} MB, {detail} |", flush=True
            )


if __name__ == "__main__":
    main()
