"""Images per second from files to batches: vitrail, Pillow with torchvision (as in timm), transformers and DataLoader.

    .venv/bin/python benchmarks/images.py                     (all; about 15 minutes on two cores)
    .venv/bin/python benchmarks/images.py --parts decode loader --rounds 3

Needs `imagenet-val-500` and `deit-ti16` (see tests/conftest.py) and, for the part `memory`, Fashion-MNIST. Each round
runs every engine once. Speeds are medians over rounds, ratios are medians of the rounds' ratios.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from safetensors.torch import load_file

from forward import race, ratio
from peers import load_peer
from vitrail import create
from vitrail.data.augment.config import Augment
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.data.sources.registry import open_data

SHARED = Path(os.environ.get("VITRAIL_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"


def timm_transform(**options):
    """Return the transform that timm creates for a model of 224 px."""
    return load_peer("timm.data").create_transform(
        input_size=224, interpolation="bicubic", crop_pct=0.9, mean=IMAGENET_MEAN, std=IMAGENET_STD, **options
    )


def decoders():
    """Return functions from a path to a tensor (3, 224, 224), by name of the engine."""
    transform = timm_transform()
    processor = load_peer("transformers").ViTImageProcessorPil(
        size={"height": 224, "width": 224}, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD, resample=3
    )

    def with_timm(path):
        with Image.open(path) as image:
            return transform(image.convert("RGB"))

    def with_transformers(path):
        with Image.open(path) as image:
            return processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    exact, double = Preprocess(), Preprocess(jpeg="double")
    return {
        "vitrail": lambda path: exact([path])[0],
        "vitrail, jpeg=double": lambda path: double([path])[0],
        "Pillow + torchvision (timm)": with_timm,
        "transformers": with_transformers,
    }


def camera_photos(photos, folder):
    """Enlarge photos to 12 megapixels with sensor noise and return their paths.

    The files have 3 to 5 MB, as those of a camera.
    """

    def enlarge(numbered_path):
        number, path = numbered_path
        with Image.open(path) as image:
            large = np.asarray(image.convert("RGB").resize((4000, 3000), Image.Resampling.BICUBIC), np.int16)
        noise = np.random.default_rng(number).normal(0, 5.5, (3000, 4000, 1)).astype(np.int16)
        target = folder / f"{number:03d}.jpg"
        Image.fromarray(np.clip(large + noise, 0, 255).astype(np.uint8)).save(target, quality=90, subsampling="4:2:0")
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(enlarge, enumerate(photos)))


def run_all(function, paths):
    """Call a function with each path."""
    for path in paths:
        function(path)


def race_decoders(photos, rounds, title):
    """Print the table of images per second of decoding and preprocessing."""
    engines = {name: partial(run_all, function, photos) for name, function in decoders().items()}
    times = race(engines, rounds)
    sizes = [Path(path).stat().st_size / 1e6 for path in photos]
    print(f"\n{title}: {len(photos)} files of {np.median(sizes):.2f} MB, one thread\n")
    print("| engine | images/s | over the fastest peer |\n|---|---|---|")
    peers = [name for name in times if not name.startswith("vitrail")]
    fastest = min(peers, key=lambda name: np.median(times[name]))
    for name, seconds in times.items():
        speedup = f"{ratio(seconds, times[fastest]):.2f}x" if name not in peers else ""
        print(f"| {name} | {len(photos) / np.median(seconds):.1f} | {speedup} |")


def compare_accuracy(photos, labels, title):
    """Print the accuracy of DeiT-Ti/16 with exact and with scaled JPEG decoding."""
    model = create("ViT-Ti/16").eval()
    model.load_state_dict(load_file(SHARED / "deit-ti16" / "model.safetensors"))
    print(f"\nDeiT-Ti/16 on {title}:\n")
    print("| decode | correct | largest mean pixel change of an image | same prediction |\n|---|---|---|---|")
    predictions, tensors = {}, {}
    for jpeg in ("exact", "double"):
        loader = Loader(Split("val", photos, labels), Preprocess(jpeg=jpeg), batch=50, shuffle=False)
        with torch.inference_mode():
            pixels = [batch.pixels for batch in loader.epoch()]
            predictions[jpeg] = torch.cat([model(loader.preprocess.scale(part)).argmax(1) for part in pixels]).numpy()
        tensors[jpeg] = torch.cat(pixels).numpy()
        change = np.abs(tensors[jpeg].astype(int) - tensors["exact"]).mean(axis=(1, 2, 3)).max()
        same = (predictions[jpeg] == predictions["exact"]).sum()
        print(f"| {jpeg} | {(predictions[jpeg] == labels).sum()} of {len(labels)} | {change:.2f} | {same} |")


class PerSample(torch.utils.data.Dataset):
    """Dataset that applies a transform to each image, as users of torch write it."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        source = self.images[index]
        if isinstance(source, str):
            with Image.open(source) as image:
                return self.transform(image.convert("RGB")), int(self.labels[index])
        return self.transform(Image.fromarray(source)), int(self.labels[index])


def drain(loader):
    """Load an epoch of a DataLoader and return the number of samples."""
    return sum(len(labels) for _, labels in loader)


def drain_ours(loader, epoch=0):
    """Load an epoch of our loader, normalise its batches, and return the number of samples."""
    return sum(len(loader.preprocess.scale(batch.pixels)) for batch in loader.epoch(epoch))


def race_loaders(photos, labels, rounds):
    """Race an epoch of image files: RandomResizedCrop, flip and normalisation at batch 50."""
    transform = timm_transform(is_training=True, auto_augment=None, color_jitter=None, hflip=0.5)
    dataset = PerSample(photos, labels, transform)
    settings = Augment(crop="resized", flip="random")
    split = Split("train", photos, labels)
    with tempfile.TemporaryDirectory() as folder, ImageCache(folder, 10**10) as cache:
        cached = Loader(split, Preprocess(), batch=50, settings=settings, cache=cache)
        drain_ours(cached)
        engines = {
            f"vitrail, {workers} workers": partial(
                drain_ours, Loader(split, Preprocess(), batch=50, settings=settings, workers=workers)
            )
            for workers in (0, 2)
        }
        engines["vitrail, 2 workers, second epoch from the cache"] = partial(drain_ours, cached, 1)
        for workers in (0, 2):
            engines[f"DataLoader, {workers} workers"] = partial(
                drain, torch.utils.data.DataLoader(dataset, 50, shuffle=True, num_workers=workers)
            )
        times = race(engines, rounds)
    print_table("imagenet-val-500, RandomResizedCrop 224, flip", times, len(photos), "DataLoader, 2 workers")


def race_loaders_in_memory(rounds):
    """Race an epoch of Fashion-MNIST's 10,000 test images: pad by 2, crop, flip and normalise at batch 128."""
    data = open_data("fashion-mnist").splits["test"]
    v1 = load_peer("torchvision.transforms")
    transform = v1.Compose(
        [v1.RandomCrop(28, padding=2), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.5,), (0.5,))]
    )
    dataset = PerSample(data.images[..., 0], data.labels, transform)
    preprocess = Preprocess(resolution=28, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    settings = Augment(crop="pad", padding=2, flip="random")
    engines = {
        f"vitrail, {workers} workers": partial(
            drain_ours, Loader(data, preprocess, batch=128, settings=settings, workers=workers)
        )
        for workers in (0, 1)
    }
    for workers in (0, 2):
        engines[f"DataLoader, {workers} workers"] = partial(
            drain, torch.utils.data.DataLoader(dataset, 128, shuffle=True, num_workers=workers)
        )
    print_table(
        "Fashion-MNIST in memory, pad and crop, flip", race(engines, rounds), len(data), "DataLoader, 2 workers"
    )


def print_table(title, times, count, reference):
    """Print the images per second of each loader, and the speedup over the reference."""
    print(f"\n{title}, end to end:\n\n| loader | images/s | over {reference} |\n|---|---|---|")
    for name, seconds in times.items():
        speedup = "" if name == reference else f"{ratio(seconds, times[reference]):.2f}x"
        print(f"| {name} | {count / np.median(seconds):,.0f} | {speedup} |")


def race_listing(rounds):
    """Print the seconds of listing 200,000 empty files in 1,000 folders."""
    timm_reader = load_peer("timm.data.readers.reader_image_folder")
    with tempfile.TemporaryDirectory() as folder:
        for label in range(1000):
            class_folder = Path(folder, f"class-{label:04d}")
            class_folder.mkdir()
            for number in range(200):
                (class_folder / f"{number}.jpg").touch()
        engines = {
            "vitrail": lambda: open_data(folder),
            "timm": lambda: timm_reader.find_images_and_targets(folder),
        }
        times = race(engines, rounds)
    print("\n200,000 files in 1,000 folders, listed and labelled:\n\n| reader | seconds | |\n|---|---|---|")
    for name, seconds in times.items():
        print(f"| {name} | {np.median(seconds):.2f} | {ratio(seconds, times['timm']):.2f}x |")


def main():
    parts = ("decode", "camera", "loader", "memory", "index")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--camera-photos", type=int, default=500, help="number of photos to enlarge for the comparison of accuracy"
    )
    options = parser.parse_args()
    data = open_data(SHARED / "imagenet-val-500").first_split
    # Folder names are ImageNet's class numbers.
    labels = np.array([int(Path(path).parent.name) for path in data.images])
    torch.set_num_threads(2)
    if "decode" in options.parts:
        race_decoders(data.images[:200], options.rounds, "Photos of ImageNet")
        compare_accuracy(data.images, labels, "the 500 photos")
    if "camera" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            photos = camera_photos(data.images[: options.camera_photos], Path(folder))
            print(f"wrote {len(photos)} camera photos in {time.perf_counter() - start:.0f} s", file=sys.stderr)
            race_decoders(photos[:12], options.rounds, "Camera photos, 4000 x 3000")
            compare_accuracy(photos, labels[: len(photos)], "the photos at 12 megapixels")
    if "loader" in options.parts:
        race_loaders(data.images, labels, options.rounds)
    if "memory" in options.parts:
        race_loaders_in_memory(options.rounds)
    if "index" in options.parts:
        race_listing(options.rounds)


if __name__ == "__main__":
    main()
