"""Images per second of one forward pass: vitrail beside its peers, in one process, in turn.

    make bench                                                (all; about 15 minutes on two cores)
    .venv/bin/python benchmarks/forward.py --models Ti --rounds 5

Every round runs each engine once, so that a machine that slows down slows all of them; a figure is the median over
rounds, a ratio the median of the rounds' ratios. All engines but vit-pytorch hold the same weights, and their logits
are compared. The ceiling is what the machine's own matrix product reaches in the same rounds, on the published count
of multiply-accumulates, of which vitrail spares a part (`encode` in models/vit.py says which).
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from peers import huggingface_vit, load_peer, timm_vit, torchvision_vit
from redraw import redraw
from vitrail.configs.zoo import find
from vitrail.models.create import build

BATCHES = {"Ti": (1, 16), "S": (1, 16), "B": (1, 8)}
EAGER = ("timm", "transformers", "torchvision", "vit-pytorch")


def engines(size):
    """Name -> function from images to logits (a tensor or an array), all of one architecture."""
    config = find(f"ViT-{size}/16")
    model = redraw(build(config), std=0.02)
    made = {"vitrail": model}
    for name, make in (("timm", timm_vit), ("transformers", huggingface_vit), ("torchvision", torchvision_vit)):
        try:
            peer, rename, run = make(config)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        peer.load_state_dict(rename(model.state_dict()))
        peer.eval()
        made[name] = run
    vit_pytorch = load_peer("vit_pytorch")
    made["vit-pytorch"] = vit_pytorch.ViT(
        image_size=224, patch_size=16, num_classes=1000, dim=config.width, depth=config.depth, heads=config.heads,
        mlp_dim=config.mlp, dim_head=config.width // config.heads,
    ).eval()  # fmt: skip
    return config, made


def runtimes(model, batch):
    """ONNX Runtime and OpenVINO on the exported model; they are given two threads as torch is."""
    import onnxruntime
    import openvino

    made = {}
    images = torch.randn(batch, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            model,
            (images,),
            path,
            input_names=["pixel_values"],
            output_names=["logits"],
            verbose=False,
            external_data=False,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
        made["onnxruntime"] = lambda images: session.run(None, {"pixel_values": images.numpy()})[0]
        compiled = openvino.compile_model(
            openvino.Core().read_model(path), "CPU",
            {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"},
        )  # fmt: skip
        made["openvino"] = lambda images: compiled(images.numpy())[0]
    return made


def gemm_peak():
    """Seconds for one multiply-accumulate of a large matrix product."""
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    return lambda: left @ right, size**3


def race(runs, rounds):
    """Seconds of every run in every round, in turn; two rounds of warm-up are not counted."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[2:] for name, values in seconds.items()}


def ratio(ours, theirs):
    """How many times faster than `theirs` we are: the median over rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds, images/s (% of ceiling)\n"
    )
    columns = ("vitrail", *EAGER, "onnxruntime", "openvino")
    print(f"| model | batch | ceiling | {' | '.join(columns)} | over best eager | largest logit gap |")
    print("|---" * (len(columns) + 5) + "|")
    gains = []
    with torch.inference_mode():
        for size in arguments.models:
            config, eager = engines(size)
            for batch in BATCHES[size]:
                images = torch.randn(batch, 3, 224, 224)
                with torch.inference_mode(False), torch.no_grad():
                    made = eager | runtimes(eager["vitrail"], batch)
                logits = {name: torch.as_tensor(run(images)) for name, run in made.items() if name != "vit-pytorch"}
                gap = max((answer - logits["vitrail"]).abs().max().item() for answer in logits.values())
                product, macs = gemm_peak()
                runs = {name: partial(run, images) for name, run in made.items()}
                seconds = race(runs | {"ceiling": product}, arguments.rounds)
                ceiling = macs / statistics.median(seconds.pop("ceiling")) / config.macs
                speeds = {name: batch / statistics.median(values) for name, values in seconds.items()}
                best = max((name for name in EAGER if name in speeds), key=speeds.__getitem__)
                gains.append(ratio(seconds["vitrail"], seconds[best]))
                cells = " | ".join(f"{speeds[name]:.2f} ({speeds[name] / ceiling:.0%})" for name in columns)
                print(
                    f"| {config.name} | {batch} | {ceiling:.1f} | {cells} | {gains[-1]:.2f}x {best} | {gap:.1e} |",
                    flush=True,
                )
    mean = math.exp(statistics.mean(map(math.log, gains)))
    print(f"\ngeometric mean over the best eager peer of each row: {mean:.3f}x")


if __name__ == "__main__":
    main()
