"""Images per second of one forward pass: vitrail beside its peers, in one process, in turn.

    make bench                                                (all; about 15 minutes on two cores)
    .venv/bin/python benchmarks/forward.py --models Ti --rounds 5

Every round runs each engine once, so that a machine that slows down slows all of them; a figure is the median over
rounds, a ratio the median of the rounds' ratios. All engines but vit-pytorch hold the same weights, and their logits
are compared. The ceiling is what the machine's own matrix product reaches in the same rounds, on the published count
of multiply-accumulates, of which vitrail spares a part (`encode` in models/families/vit/model.py says which).
"""

import argparse
import contextlib
import copy
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from peers import huggingface_vit, load_peer, timm_vit, timm_with_weights, torchvision_vit
from vitrail import Bundle, Preprocess, save
from vitrail.inference.engine import import_engine_package
from vitrail.inference.registry import ENGINES
from vitrail.inference.select import find_usable, list_choices
from vitrail.lab.exact import redraw
from vitrail.models.create import build
from vitrail.models.layers import separate_
from vitrail.models.zoo import find

BATCHES = {"Ti": (1, 16), "S": (1, 16), "B": (1, 8)}
FAMILIES = ("R+ViT-Ti/16", "R26+ViT-S/32", "R50+ViT-B/16", "Mixer-S/16", "Mixer-B/16", "BiT-R50x1")
EAGER = ("timm", "transformers", "torchvision", "vit-pytorch")
REST = 0.05  # seconds between runs


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
        image_size=224,
        patch_size=16,
        num_classes=1000,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.mlp,
        dim_head=config.width // config.heads,
    ).eval()
    return config, made


def write_graph(model, batch, path):
    """Write a model as ONNX for batches of this size, as torch does it. ONNX Runtime's quantiser fails on the shapes
    that torch stores."""
    onnx = import_engine_package("onnx", "onnx")
    with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.randn(batch, 3, 224, 224),),
            path,
            input_names=["pixel_values"],
            output_names=["logits"],
            verbose=False,
            external_data=False,
        )
    graph = onnx.load(path)
    del graph.graph.value_info[:]
    onnx.save(graph, path)
    return path


def onnxruntime_session(path):
    """A function from images to logits, by ONNX Runtime with as many threads as torch has."""
    onnxruntime = import_engine_package("onnxruntime", "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"pixel_values": images.numpy()})[0]


def openvino_model(path, **settings):
    """The same by OpenVINO."""
    openvino = import_engine_package("openvino", "openvino")
    usual = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(openvino.Core().read_model(path), "CPU", usual | settings)
    return lambda images: compiled(images.numpy())["logits"]


def runtimes(path):
    """ONNX Runtime and OpenVINO in float32."""
    return {"onnxruntime": onnxruntime_session(path), "openvino": openvino_model(path, INFERENCE_PRECISION_HINT="f32")}


def reduced_runtimes(path):
    """What they do in reduced precision: ONNX Runtime's dynamic int8, and OpenVINO as it comes."""
    plain = path.with_suffix(".int8.onnx")
    import_engine_package("onnxruntime.quantization", "onnx").quantize_dynamic(
        path, plain, op_types_to_quantize=["MatMul", "Gemm"]
    )
    return {"onnxruntime int8": onnxruntime_session(plain), "openvino default": openvino_model(path)}


def timm_of(model):
    """timm's model with the weights of ours."""
    peer, rename, _ = timm_vit(model.config)
    peer.load_state_dict(rename(model.state_dict()))
    return peer.eval()


def cast(run, images):
    """A forward pass under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return run(images).float()


def has_bfloat16():
    """Whether a matrix product is faster in bfloat16 than in float32, by measurement."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(256, 256).to(dtype)
        left @ left
        start = time.perf_counter()
        for _ in range(5):
            left @ left
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] < seconds[torch.float32]


def our_ways(path, threads):
    """Our engines in each precision that this CPU has, with preprocessed bytes in and logits out."""
    return {
        f"vitrail {way}": ENGINES[way.engine].open(path, None, way.precision).running(threads)
        for way in usable_ways(path)
    }


def scaled(run, pixels):
    """A peer's forward pass from the same bytes as ours."""
    return run(torch.from_numpy(Preprocess().scale_array(pixels)))


def usable_ways(path):
    """Engines and precisions that this CPU has."""
    return [way for way in find_usable(str(path), list_choices())[0] if way.precision != "bfloat16" or has_bfloat16()]


def race_ways(sizes, rounds, threads):
    """The table of engines and precisions: ours beside what peers reach at their best, all from the same cropped
    images. ONNX Runtime and OpenVINO run what torch.onnx makes of timm's model, for just this batch; the last column of
    each half is about those that are given our graph, with its separate projections and a part of the last block
    spared."""
    gains = {column: [] for column in ("float32", "float32, on our graph", "any precision", "any, on our graph")}
    half = "ours | best peer | ratio | to peers on our graph"
    print(f"| model | batch | in float32: {half} | any precision: {half} |\n" + "|---" * 10 + "|")
    for size in sizes:
        config, eager = engines(size)
        model = eager.pop("vitrail")
        eager.pop("vit-pytorch")
        apart = copy.deepcopy(model)
        separate_(apart)
        reduced = {
            f"{name} bfloat16": partial(cast, eager[name])
            for name in ("timm", "transformers")
            if name in eager and has_bfloat16()
        }
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            folder = Path(place)
            save(Bundle(model=model, preprocess=Preprocess()), folder / "bundle")
            ours = {
                name: stack.enter_context(running) for name, running in our_ways(folder / "bundle", threads).items()
            }
            for batch in BATCHES[size]:
                pixels = torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8).numpy()
                theirs = write_graph(timm_of(model), batch, folder / f"timm-{batch}.onnx")
                given = write_graph(apart, batch, folder / f"ours-{batch}.onnx")
                exact, rounded = eager | runtimes(theirs), reduced | reduced_runtimes(theirs)
                lent = {f"{name}, our graph": run for name, run in runtimes(given).items()}
                lent_rounded = {f"{name}, our graph": run for name, run in reduced_runtimes(given).items()}
                peers = exact | rounded | lent | lent_rounded
                runs = {name: partial(run, pixels) for name, run in ours.items()}
                seconds = race(runs | {name: partial(scaled, run, pixels) for name, run in peers.items()}, rounds)
                medians = {name: statistics.median(values) for name, values in seconds.items()}
                cells = []
                for mine, known, with_graph, columns in (
                    ([name for name in ours if name.endswith("float32")], exact, exact | lent, list(gains)[:2]),
                    (list(ours), exact | rounded, peers, list(gains)[2:]),
                ):
                    best, peer, lender = (min(names, key=medians.get) for names in (mine, known, with_graph))
                    for column, other in zip(columns, (peer, lender), strict=True):
                        gains[column].append(ratio(seconds[best], seconds[other]))
                    cells += [f"{batch / medians[name]:.1f} {name.removeprefix('vitrail ')}" for name in (best, peer)]
                    cells += [f"{gains[columns[0]][-1]:.2f}x", f"{gains[columns[1]][-1]:.2f}x {lender}"]
                print(f"| {config.name} | {batch} | {' | '.join(cells)} |", flush=True)
    for name, some in gains.items():
        print(f"\n{name}: geometric mean {statistics.geometric_mean(some):.3f}x, least {min(some):.2f}x")


def gemm_peak():
    """Seconds for one multiply-accumulate of a large matrix product."""
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    return lambda: left @ right, size**3


def race(runs, rounds, *, takes_long=False):
    """Seconds of every run in every round, in turn; the first round is not counted. Before each run, the threads of the
    one before it have come to rest (those of ONNX Runtime spin for a while), and an uncounted call is made, unless it
    `takes_long`."""
    seconds = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            time.sleep(REST)
            if not takes_long:
                run()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(ours, theirs):
    """How many times faster than `theirs` we are: the median over rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


def race_vits(sizes, rounds):
    """The table of ViTs, row by row."""
    columns = ("vitrail", *EAGER, "onnxruntime", "openvino")
    print(f"| model | batch | ceiling | {' | '.join(columns)} | over best eager | largest logit gap |")
    print("|---" * (len(columns) + 5) + "|")
    gains = []
    for size in sizes:
        config, eager = engines(size)
        for batch in BATCHES[size]:
            images = torch.randn(batch, 3, 224, 224)
            with tempfile.TemporaryDirectory() as folder:
                made = eager | runtimes(write_graph(eager["vitrail"], batch, Path(folder) / "model.onnx"))
            logits = {name: torch.as_tensor(run(images)) for name, run in made.items() if name != "vit-pytorch"}
            gap = max((answer - logits["vitrail"]).abs().max().item() for answer in logits.values())
            product, macs = gemm_peak()
            seconds = race({name: partial(run, images) for name, run in made.items()} | {"ceiling": product}, rounds)
            ceiling = macs / statistics.median(seconds.pop("ceiling")) / config.macs
            speeds = {name: batch / statistics.median(values) for name, values in seconds.items()}
            best = max((name for name in EAGER if name in speeds), key=speeds.__getitem__)
            gains.append(ratio(seconds["vitrail"], seconds[best]))
            cells = " | ".join(f"{speeds[name]:.2f} ({speeds[name] / ceiling:.0%})" for name in columns)
            print(
                f"| {config.name} | {batch} | {ceiling:.1f} | {cells} | {gains[-1]:.2f}x {best} | {gap:.1e} |",
                flush=True,
            )
    mean = statistics.geometric_mean(gains)
    print(f"\ngeometric mean over the best eager peer of each row: {mean:.3f}x\n")


def race_families(names, rounds):
    """The table of the other families beside timm's."""
    print("| model | batch | vitrail | timm | over timm | largest logit gap |\n|---|---|---|---|---|---|")
    for name in names:
        model = redraw(build(find(name)), std=0.05)
        peer = timm_with_weights(name, model)
        for batch in (1, 8):
            images = torch.randn(batch, 3, 224, 224)
            gap = (model(images) - peer(images)).abs().max().item()
            seconds = race({"vitrail": partial(model, images), "timm": partial(peer, images)}, rounds)
            speeds = {engine: batch / statistics.median(values) for engine, values in seconds.items()}
            gain = ratio(seconds["vitrail"], seconds["timm"])
            print(
                f"| {name} | {batch} | {speeds['vitrail']:.2f} | {speeds['timm']:.2f} | {gain:.2f}x | {gap:.1e} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--ways", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds, images/s (% of ceiling)\n"
    )
    with torch.no_grad():
        if arguments.models:
            race_vits(arguments.models, arguments.rounds)
        if arguments.ways:
            race_ways(arguments.ways, arguments.rounds, arguments.threads)
        if arguments.families:
            race_families(arguments.families, arguments.rounds)


if __name__ == "__main__":
    main()
