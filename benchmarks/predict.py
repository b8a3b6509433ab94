"""Images per second from files to predictions: `vitrail predict`, timm and transformers' pipeline with DeiT-Ti/16.

    .venv/bin/python benchmarks/predict.py                      (all; about 20 minutes on two cores)
    .venv/bin/python benchmarks/predict.py --parts cold --rounds 5

`cold` starts a new process for every prediction and measures the time to its first line. `small` predicts the 500
photos of `imagenet-val-500` in one warm process, `camera` the same photos at 12 megapixels. Each round runs every
engine once; speeds are medians over rounds, ratios are medians of the rounds' ratios. All engines have the same
weights, and equal predictions are counted. The loop with timm is what a user writes; its DataLoader decodes in two
processes. The pipeline squashes photos to 224 x 224, as it does by default. Needs `imagenet-val-500` and `deit-ti16`
(see tests/conftest.py).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from forward import has_bfloat16, race, ratio, usable_choices
from images import SHARED, PerSample, camera_photos, timm_transform
from peers import huggingface_vit, load_peer, timm_vit
from vitrail import Bundle, Classifier, Preprocess, create, save
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from vitrail.data.sources.registry import open_data
from vitrail.inference.engine import thread_count
from vitrail.inference.onnx_engine import OnnxEngine

BATCH = 16

# Programs of a user for the part `cold`. The operators are declared because torchvision's wheel lacks them for a CPU
# build of torch (see tests/peers.py, which imports more than a user would).
DECLARE = """
import sys, torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
TIMM = (
    DECLARE
    + """
import timm
from PIL import Image
from safetensors.torch import load_file
folder, *photos = sys.argv[1:]
model = timm.create_model("deit_tiny_patch16_224").eval()
model.load_state_dict(load_file(folder + "/deit-ti16/model.safetensors"))
transform = timm.data.create_transform(224, interpolation="bicubic", crop_pct=0.9)
with torch.inference_mode():
    for photo in photos:
        print(model(transform(Image.open(photo).convert("RGB"))[None]).softmax(-1).topk(5), flush=True)
"""
)
TRANSFORMERS = (
    DECLARE
    + """
from transformers import ViTImageProcessorPil, pipeline
folder, *photos = sys.argv[1:]
processor = ViTImageProcessorPil.from_pretrained(folder)
for answer in pipeline("image-classification", model=folder, image_processor=processor)(photos):
    print(answer, flush=True)
"""
)


class PredictionBenchmark:
    """DeiT-Ti/16 in the form of each library, in a temporary folder."""

    def __init__(self, folder):
        self.folder = folder
        self.model = create("ViT-Ti/16").eval()
        self.model.load_state_dict(load_file(SHARED / "deit-ti16" / "model.safetensors"))
        self.bundle = folder / "deit"
        save(Bundle(model=self.model, preprocess=Preprocess()), self.bundle)
        self.choices = usable_choices(self.bundle)
        self.timm, _, _ = timm_vit(self.model.config)
        self.timm.load_state_dict(self.model.state_dict())
        self.timm.eval()
        self.transform = timm_transform()
        transformers = load_peer("transformers")
        peer, rename, _ = huggingface_vit(self.model.config)
        peer.load_state_dict(rename(self.model.state_dict()))
        processor = transformers.ViTImageProcessorPil(
            size={"height": 224, "width": 224}, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD, resample=3
        )
        peer.eval().save_pretrained(folder / "huggingface")
        processor.save_pretrained(folder / "huggingface")
        self.pipeline = transformers.pipeline("image-classification", model=peer, image_processor=processor)

    def commands(self):
        """Return the command of each engine that predicts the photos named after it."""
        ours = [sys.executable, "-m", "vitrail", "predict", str(self.bundle), "--json"]
        return {
            **{
                f"vitrail, {choice}": [*ours, "--engine", choice.engine, "--precision", choice.precision]
                for choice in self.choices
            },
            "timm": [sys.executable, "-c", TIMM, str(SHARED)],
            "transformers": [sys.executable, "-W", "ignore", "-c", TRANSFORMERS, str(self.folder / "huggingface")],
            "(import torch alone)": [sys.executable, "-c", "import torch; print(1)"],
        }

    def engines(self):
        """Return a function from paths to class numbers for each engine."""
        engines = {
            f"vitrail, {choice}{', jpeg=double' if jpeg == 'double' else ''}": partial(
                self._predict_with_vitrail, Classifier(self.bundle, **choice._asdict(), jpeg=jpeg)
            )
            for jpeg in ("exact", "double")
            for choice in self.choices
        }
        peers = {
            "timm loop": partial(self._predict_in_loop, batch=1),
            f"timm loop, batch {BATCH}": partial(self._predict_in_loop, batch=BATCH),
            f"timm, DataLoader of 2 processes, batch {BATCH}": self._predict_with_loader,
            f"transformers' pipeline, batch {BATCH}": self._predict_with_pipeline,
        }
        if has_bfloat16():
            peers |= {f"{name}, bfloat16": partial(run_in_bfloat16, run) for name, run in peers.items()}
        return engines | peers

    @staticmethod
    def _predict_with_vitrail(classifier, photos):
        return [int(row["predictions"][0]["label"]) for row in classifier.stream(photos, top_k=5)]

    @torch.inference_mode()
    def _predict_in_loop(self, photos, batch):
        predictions = []
        for start in range(0, len(photos), batch):
            images = []
            for path in photos[start : start + batch]:
                with Image.open(path) as image:
                    images.append(self.transform(image.convert("RGB")))
            predictions += self.timm(torch.stack(images)).softmax(-1).topk(5).indices[:, 0].tolist()
        return predictions

    @torch.inference_mode()
    def _predict_with_loader(self, photos):
        dataset = PerSample(photos, np.zeros(len(photos), int), self.transform)
        loader = torch.utils.data.DataLoader(dataset, BATCH, num_workers=2)
        return [label for images, _ in loader for label in self.timm(images).softmax(-1).topk(5).indices[:, 0].tolist()]

    def _predict_with_pipeline(self, photos):
        predictions = self.pipeline(photos, batch_size=BATCH, top_k=5)
        return [int(prediction[0]["label"].removeprefix("LABEL_")) for prediction in predictions]


def run_in_bfloat16(run, photos):
    """Predict photos under autocast to bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return run(photos)


def time_first_line(command):
    """Return the seconds from a command to its first line. The process is then killed."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.kill()
    if not line:
        raise RuntimeError(f"no output of {command[:4]}")
    return seconds


def race_cold_starts(benchmark, photo, rounds):
    """Print the seconds from a command to its first prediction, with the files in the system's cache."""
    commands = benchmark.commands()
    seconds = {name: [] for name in commands}
    for number in range(1 + rounds):
        for name, command in commands.items():
            duration = time_first_line([*command, photo])
            if number:
                seconds[name].append(duration)
    import_seconds = seconds["(import torch alone)"]
    print("\nA new process, from the command to its first prediction:\n")
    print("| engine | seconds | beyond import torch |\n|---|---|---|")
    for name, values in seconds.items():
        beyond = statistics.median(total - importing for total, importing in zip(values, import_seconds, strict=True))
        print(f"| {name} | {statistics.median(values):.2f} | {'' if values is import_seconds else f'{beyond:+.2f}'} |")


def race_warm(benchmark, photos, labels, rounds, title):
    """Print the images per second and the correct predictions of each engine."""
    predictions = {}

    def predict(name, run):
        predictions[name] = np.array(run(photos))

    engines = benchmark.engines()
    times = race({name: partial(predict, name, run) for name, run in engines.items()}, rounds, takes_long=True)
    peers = [name for name in times if not name.startswith("vitrail")]
    fastest = min(peers, key=lambda name: statistics.median(times[name]))
    print(f"\n{title}: {len(photos)} photos\n")
    print("| engine | images/s | over the fastest peer | correct | equal to timm's |\n|---|---|---|---|---|")
    for name, seconds in times.items():
        speedup = "" if name in peers else f"{ratio(seconds, times[fastest]):.2f}x"
        correct = f"{(predictions[name] == labels).sum()} ({(predictions[name] == labels).mean():.1%})"
        equal = (predictions[name] == predictions["timm loop"]).sum()
        print(
            f"| {name} | {len(photos) / statistics.median(seconds):.1f} | {speedup} | {correct} | {equal} |", flush=True
        )


def main():
    parts = ("cold", "small", "camera")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=int, default=500, help="number of the 500 photos to predict")
    parser.add_argument("--camera-photos", type=int, default=60, help="number of photos to enlarge")
    options = parser.parse_args()
    photos = open_data(SHARED / "imagenet-val-500").first_split.images[: options.photos]
    # Folder names are ImageNet's class numbers.
    labels = np.array([int(Path(path).parent.name) for path in photos])
    torch.set_num_threads(thread_count())
    print(f"torch {torch.__version__}, {thread_count()} threads, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = PredictionBenchmark(Path(folder))
        proof = json.loads((OnnxEngine.prepare(benchmark.bundle, "float32") / "proof.json").read_text())
        print(f"largest logit difference of ONNX Runtime: {proof['max_logit_difference']:.1e}")
        if "cold" in options.parts:
            race_cold_starts(benchmark, photos[0], options.rounds)
        if "small" in options.parts:
            race_warm(benchmark, photos, labels, options.rounds, "imagenet-val-500")
        if "camera" in options.parts:
            # Photos spread over the classes.
            indices = np.linspace(0, len(photos) - 1, min(options.camera_photos, len(photos))).astype(int)
            camera_folder = Path(folder, "camera")
            camera_folder.mkdir()
            large = camera_photos([photos[index] for index in indices], camera_folder)
            sizes = [Path(path).stat().st_size / 1e6 for path in large]
            title = f"Enlarged to 12 megapixels, {statistics.median(sizes):.1f} MB per file"
            race_warm(benchmark, large, labels[indices], options.rounds, title)


if __name__ == "__main__":
    main()
