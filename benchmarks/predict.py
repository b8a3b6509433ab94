"""From image files to answers: `vitrail predict` beside timm and transformers' pipeline, all with DeiT-Ti/16.

    .venv/bin/python benchmarks/predict.py                      (all; about 20 minutes on two cores)
    .venv/bin/python benchmarks/predict.py --parts cold --rounds 5

`cold` starts a new process for every answer, from the command to its first line. `small` answers the 500 photos of
`imagenet-val-500` in one warm process, `camera` the same photos at 12 megapixels. Every round runs each engine once; a
figure is the median over rounds, a ratio the median of the rounds' ratios. All hold the same weights, and answers are
counted. timm's loop is what a user writes; its DataLoader decodes in two processes; the pipeline squashes photos to
224 x 224, as it does by default. Needs `imagenet-val-500` and `deit-ti16` (see tests/conftest.py).
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
from forward import has_bfloat16, race, ratio, usable_ways
from images import SHARED, PerSample, camera_photos, timm_transform
from peers import huggingface_vit, load_peer, timm_vit
from vitrail import Bundle, Classifier, Preprocess, create, save
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from vitrail.data.sources.registry import open_data
from vitrail.inference.engine import cores
from vitrail.inference.onnx_engine import OnnxEngine

BATCH = 16

# What a user types, for a process of its own. The operators are declared because torchvision's wheel lacks them for a
# CPU build of torch (see tests/peers.py, which imports more than a user would).
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


class Work:
    """The model in every form, in a temporary folder."""

    def __init__(self, folder):
        self.folder = folder
        self.model = create("ViT-Ti/16").eval()
        self.model.load_state_dict(load_file(SHARED / "deit-ti16" / "model.safetensors"))
        self.bundle = folder / "deit"
        save(Bundle(model=self.model, preprocess=Preprocess()), self.bundle)
        self.ways = usable_ways(self.bundle)
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
        """Name -> command that answers the photos named after it."""
        ours = [sys.executable, "-m", "vitrail", "predict", str(self.bundle), "--json"]
        return {
            **{f"vitrail, {way}": [*ours, "--engine", way.engine, "--precision", way.precision] for way in self.ways},
            "timm": [sys.executable, "-c", TIMM, str(SHARED)],
            "transformers": [sys.executable, "-W", "ignore", "-c", TRANSFORMERS, str(self.folder / "huggingface")],
            "(import torch alone)": [sys.executable, "-c", "import torch; print(1)"],
        }

    def engines(self):
        """Name -> function from paths to class numbers."""
        made = {
            f"vitrail, {way}{', jpeg=double' if jpeg == 'double' else ''}": partial(
                self._ours, Classifier(self.bundle, **way._asdict(), jpeg=jpeg)
            )
            for jpeg in ("exact", "double")
            for way in self.ways
        }
        peers = {
            "timm loop": partial(self._loop, batch=1),
            f"timm loop, batch {BATCH}": partial(self._loop, batch=BATCH),
            f"timm, DataLoader of 2 processes, batch {BATCH}": self._loader,
            f"transformers' pipeline, batch {BATCH}": self._pipeline,
        }
        if has_bfloat16():
            peers |= {f"{name}, bfloat16": partial(cast, run) for name, run in peers.items()}
        return made | peers

    @staticmethod
    def _ours(classifier, photos):
        return [int(row["predictions"][0]["label"]) for row in classifier.stream(photos, top_k=5)]

    @torch.inference_mode()
    def _loop(self, photos, batch):
        answers = []
        for at in range(0, len(photos), batch):
            images = []
            for path in photos[at : at + batch]:
                with Image.open(path) as image:
                    images.append(self.transform(image.convert("RGB")))
            answers += self.timm(torch.stack(images)).softmax(-1).topk(5).indices[:, 0].tolist()
        return answers

    @torch.inference_mode()
    def _loader(self, photos):
        dataset = PerSample(photos, np.zeros(len(photos), int), self.transform)
        loader = torch.utils.data.DataLoader(dataset, BATCH, num_workers=2)
        return [
            answer for images, _ in loader for answer in self.timm(images).softmax(-1).topk(5).indices[:, 0].tolist()
        ]

    def _pipeline(self, photos):
        answers = self.pipeline(photos, batch_size=BATCH, top_k=5)
        return [int(answer[0]["label"].removeprefix("LABEL_")) for answer in answers]


def cast(run, photos):
    """All answers under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return run(photos)


def first_line(command):
    """Seconds from the command to its first line; the process is then ended."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        line = process.stdout.readline()
        seconds = time.perf_counter() - start
        process.kill()
    if not line:
        raise RuntimeError(f"no answer from {command[:4]}")
    return seconds


def cold(work, photo, rounds):
    """The command to the first answer, files in the system's cache."""
    commands = work.commands()
    seconds = {name: [] for name in commands}
    for number in range(1 + rounds):
        for name, command in commands.items():
            taken = first_line([*command, photo])
            if number:
                seconds[name].append(taken)
    alone = seconds["(import torch alone)"]
    print("\nA new process, from the command to its first answer:\n")
    print("| engine | seconds | beyond import torch |\n|---|---|---|")
    for name, values in seconds.items():
        beyond = statistics.median(own - bare for own, bare in zip(values, alone, strict=True))
        print(f"| {name} | {statistics.median(values):.2f} | {'' if values is alone else f'{beyond:+.2f}'} |")


def warm(work, photos, labels, rounds, title):
    """Images/s and right answers of each engine."""
    answers = {}

    def answer(name, run):
        answers[name] = np.array(run(photos))

    engines = work.engines()
    times = race({name: partial(answer, name, run) for name, run in engines.items()}, rounds, takes_long=True)
    peers = [name for name in times if not name.startswith("vitrail")]
    best = min(peers, key=lambda name: statistics.median(times[name]))
    print(f"\n{title}: {len(photos)} photos\n")
    print("| engine | images/s | over the fastest peer | right | answers as timm's |\n|---|---|---|---|---|")
    for name, seconds in times.items():
        over = "" if name in peers else f"{ratio(seconds, times[best]):.2f}x"
        right = f"{(answers[name] == labels).sum()} ({(answers[name] == labels).mean():.1%})"
        same = (answers[name] == answers["timm loop"]).sum()
        print(f"| {name} | {len(photos) / statistics.median(seconds):.1f} | {over} | {right} | {same} |", flush=True)


def main():
    parts = ("cold", "small", "camera")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=int, default=500, help="how many of the 500 photos to answer")
    parser.add_argument("--camera-photos", type=int, default=60, help="how many of them to enlarge")
    chosen = parser.parse_args()
    photos = open_data(SHARED / "imagenet-val-500").first_split.images[: chosen.photos]
    # Folder names are ImageNet's class numbers.
    labels = np.array([int(Path(path).parent.name) for path in photos])
    torch.set_num_threads(cores())
    print(f"torch {torch.__version__}, {cores()} threads, {chosen.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder))
        proof = json.loads((OnnxEngine.prepare(work.bundle, "float32") / "proof.json").read_text())
        print(f"largest logit difference of ONNX Runtime: {proof['max_logit_difference']:.1e}")
        if "cold" in chosen.parts:
            cold(work, photos[0], chosen.rounds)
        if "small" in chosen.parts:
            warm(work, photos, labels, chosen.rounds, "imagenet-val-500 as it is")
        if "camera" in chosen.parts:
            # Spread over the classes.
            some = np.linspace(0, len(photos) - 1, min(chosen.camera_photos, len(photos))).astype(int)
            place = Path(folder, "camera")
            place.mkdir()
            large = camera_photos([photos[index] for index in some], place)
            sizes = [Path(path).stat().st_size / 1e6 for path in large]
            title = f"Enlarged to 12 megapixels, {statistics.median(sizes):.1f} MB a file"
            warm(work, large, labels[some], chosen.rounds, title)


if __name__ == "__main__":
    main()
