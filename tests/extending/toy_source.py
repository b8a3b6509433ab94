"""A data source: `stripes:N`, N images of upright and lying stripes."""

from pathlib import Path

import numpy as np

from vitrail.data.dataset import Dataset
from vitrail.data.sources.arrays import dataset_from_arrays
from vitrail.data.sources.base import Source


class Stripes(Source):
    description = "stripes:N, made-up images of stripes"

    def recognises(self, data: str | Path) -> bool:
        word, _, count = str(data).partition(":")
        return word == "stripes" and count.isdecimal()

    def open(self, data: str | Path) -> Dataset:
        count = int(str(data).partition(":")[2])
        upright = np.tile(np.array([0, 255], np.uint8), (8, 4))
        images = np.stack([upright if index % 2 else upright.T for index in range(count)])
        labels = np.array(["lying", "upright"])[np.arange(count) % 2]
        return dataset_from_arrays({"images": images, "labels": labels}, str(data))
