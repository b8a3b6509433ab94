"""Images per second of a forward pass: vitrail and other libraries, alternating in one process.

    make bench                                                (all; about 15 minutes on two cores)
    .venv/bin/python benchmarks/forward.py --models Ti --rounds 5

Each round runs every engine once, so that a slowdown of the machine affects all engines. Speeds are medians over
rounds, ratios are medians of the rounds' ratios. All engines except vit-pytorch have the same weights, and their
logits are compared. The ceiling is the speed at which the machine's matrix product, measured in the same rounds,
would compute the published number of multiply-accumulates. vitrail skips a part of them (see `encode` in
models/families/vit/model.py).
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
PAUSE_SECONDS = 0.05  # between runs


def eager_models(size):
    """Return the configuration of a ViT, and functions from images to logits by library, all of this architecture."""
    config = find(f"ViT-{size}/16")
    model = redraw(build(config), std=0.02)
    models = {"vitrail": model}
    for name, make in (("timm", timm_vit), ("transformers", huggingface_vit), ("torchvision", torchvision_vit)):
        try:
            peer, rename, run = make(config)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        peer.load_state_dict(rename(model.state_dict()))
        peer.eval()
        models[name] = run
    vit_pytorch = load_peer("vit_pytorch")
    models["vit-pytorch"] = vit_pytorch.ViT(
        image_size=224,
        patch_size=16,
        num_classes=1000,
        dim=config.width,
        depth=config.depth,
        heads=config.heads,
        mlp_dim=config.mlp,
        dim_head=config.width // config.heads,
    ).eval()
    return config, models


def write_graph(model, batch, path):
    """Export a model to ONNX for batches of this size and return the path.

    The shapes that torch stores are removed: ONNX Runtime's quantiser fails on them.
    """
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
    """Return a function from images to logits that runs ONNX Runtime with as many threads as torch has."""
    onnxruntime = import_engine_package("onnxruntime", "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"pixel_values": images.numpy()})[0]


def openvino_model(path, **settings):
    """Return a function from images to logits that runs OpenVINO with as many threads as torch has."""
    openvino = import_engine_package("openvino", "openvino")
    defaults = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(openvino.Core().read_model(path), "CPU", defaults | settings)
    return lambda images: compiled(images.numpy())["logits"]


def float32_runtimes(path):
    """Return functions from images to logits by ONNX Runtime and OpenVINO in float32."""
    return {"onnxruntime": onnxruntime_session(path), "openvino": openvino_model(path, INFERENCE_PRECISION_HINT="f32")}


def reduced_runtimes(path):
    """Return functions by ONNX Runtime in dynamic int8, and by OpenVINO in its default precision."""
    int8_path = path.with_suffix(".int8.onnx")
    import_engine_package("onnxruntime.quantization", "onnx").quantize_dynamic(
        path, int8_path, op_types_to_quantize=["MatMul", "Gemm"]
    )
    return {"onnxruntime int8": onnxruntime_session(int8_path), "openvino default": openvino_model(path)}


def timm_model(model):
    """Return timm's model with the weights of our model."""
    peer, rename, _ = timm_vit(model.config)
    peer.load_state_dict(rename(model.state_dict()))
    return peer.eval()


def run_in_bfloat16(run, images):
    """Run a forward pass under autocast to bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return run(images).float()


def has_bfloat16():
    """Return whether a matrix product is faster in bfloat16 than in float32, by measurement."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left = torch.randn(256, 256).to(dtype)
        left @ left
        start = time.perf_counter()
        for _ in range(5):
            left @ left
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] < seconds[torch.float32]


def open_our_engines(path, threads):
    """Open our engines in each precision that this CPU supports. They map cropped images (uint8) to logits."""
    return {
        f"vitrail {choice}": ENGINES[choice.engine].open(path, None, choice.precision).running(threads)
        for choice in usable_choices(path)
    }


def run_scaled(run, pixels):
    """Scale cropped images (uint8), as our engines do, and run a peer's forward pass."""
    return run(torch.from_numpy(Preprocess().scale_array(pixels)))


def usable_choices(path):
    """Return the engines and precisions that this CPU supports."""
    choices = find_usable(str(path), list_choices())[0]
    return [choice for choice in choices if choice.precision != "bfloat16" or has_bfloat16()]


def race_precisions(sizes, rounds, threads):
    """Print the table of engines and precisions: our fastest and the peers' fastest, from the same cropped images.

    ONNX Runtime and OpenVINO run the graph that torch.onnx exports from timm's model, for this batch size. The last
    column of each half compares with the same runtimes on our graph, which has separate projections and computes less
    in the last block.
    """
    gains = {column: [] for column in ("float32", "float32, on our graph", "any precision", "any, on our graph")}
    half = "ours | best peer | ratio | to peers on our graph"
    print(f"| model | batch | in float32: {half} | any precision: {half} |\n" + "|---" * 10 + "|")
    for size in sizes:
        config, eager = eager_models(size)
        model = eager.pop("vitrail")
        eager.pop("vit-pytorch")
        separated = copy.deepcopy(model)
        separate_(separated)
        reduced = {
            f"{name} bfloat16": partial(run_in_bfloat16, eager[name])
            for name in ("timm", "transformers")
            if name in eager and has_bfloat16()
        }
        with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
            folder = Path(temporary)
            save(Bundle(model=model, preprocess=Preprocess()), folder / "bundle")
            ours = {
                name: stack.enter_context(running)
                for name, running in open_our_engines(folder / "bundle", threads).items()
            }
            for batch in BATCHES[size]:
                pixels = torch.randint(0, 256, (batch, 224, 224, 3), dtype=torch.uint8).numpy()
                timm_graph = write_graph(timm_model(model), batch, folder / f"timm-{batch}.onnx")
                our_graph = write_graph(separated, batch, folder / f"ours-{batch}.onnx")
                exact, rounded = eager | float32_runtimes(timm_graph), reduced | reduced_runtimes(timm_graph)
                exact_on_ours = {f"{name}, our graph": run for name, run in float32_runtimes(our_graph).items()}
                rounded_on_ours = {f"{name}, our graph": run for name, run in reduced_runtimes(our_graph).items()}
                peers = exact | rounded | exact_on_ours | rounded_on_ours
                runs = {name: partial(run, pixels) for name, run in ours.items()}
                seconds = race(runs | {name: partial(run_scaled, run, pixels) for name, run in peers.items()}, rounds)
                medians = {name: statistics.median(values) for name, values in seconds.items()}
                cells = []
                our_float32 = [name for name in ours if name.endswith("float32")]
                for our_names, peer_names, all_names, columns in (
                    (our_float32, exact, exact | exact_on_ours, list(gains)[:2]),
                    (list(ours), exact | rounded, peers, list(gains)[2:]),
                ):
                    fastest, peer, any_peer = (
                        min(names, key=medians.get) for names in (our_names, peer_names, all_names)
                    )
                    for column, other in zip(columns, (peer, any_peer), strict=True):
                        gains[column].append(ratio(seconds[fastest], seconds[other]))
                    cells += [
                        f"{batch / medians[name]:.1f} {name.removeprefix('vitrail ')}" for name in (fastest, peer)
                    ]
                    cells += [f"{gains[columns[0]][-1]:.2f}x", f"{gains[columns[1]][-1]:.2f}x {any_peer}"]
                print(f"| {config.name} | {batch} | {' | '.join(cells)} |", flush=True)
    for name, ratios in gains.items():
        print(f"\n{name}: geometric mean {statistics.geometric_mean(ratios):.3f}x, lowest {min(ratios):.2f}x")


def large_matrix_product():
    """Return a function that computes a large matrix product, and its number of multiply-accumulates."""
    size = 1536
    left, right = torch.randn(size, size), torch.randn(size, size)
    return lambda: left @ right, size**3


def race(runs, rounds, *, takes_long=False):
    """Return the seconds of every function in every round, by name. The first round is not counted.

    The functions alternate. Before each, a pause lets the threads of the previous one stop (those of ONNX Runtime spin
    for a while), and an uncounted call warms it up, unless it `takes_long`.
    """
    seconds = {name: [] for name in runs}
    for _ in range(1 + rounds):
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            if not takes_long:
                run()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def ratio(ours, theirs):
    """Return how many times faster `ours` are than `theirs`, both in seconds by round: the median over rounds."""
    return statistics.median(their / our for our, their in zip(ours, theirs, strict=True))


def race_vits(sizes, rounds):
    """Print the table of ViTs: images per second of each library."""
    columns = ("vitrail", *EAGER, "onnxruntime", "openvino")
    print(f"| model | batch | ceiling | {' | '.join(columns)} | over best eager | largest logit gap |")
    print("|---" * (len(columns) + 5) + "|")
    gains = []
    for size in sizes:
        config, eager = eager_models(size)
        for batch in BATCHES[size]:
            images = torch.randn(batch, 3, 224, 224)
            with tempfile.TemporaryDirectory() as folder:
                models = eager | float32_runtimes(write_graph(eager["vitrail"], batch, Path(folder) / "model.onnx"))
            logits = {name: torch.as_tensor(run(images)) for name, run in models.items() if name != "vit-pytorch"}
            gap = max((other - logits["vitrail"]).abs().max().item() for other in logits.values())
            product, macs = large_matrix_product()
            seconds = race({name: partial(run, images) for name, run in models.items()} | {"ceiling": product}, rounds)
            ceiling = macs / statistics.median(seconds.pop("ceiling")) / config.macs
            speeds = {name: batch / statistics.median(values) for name, values in seconds.items()}
            fastest = max((name for name in EAGER if name in speeds), key=speeds.__getitem__)
            gains.append(ratio(seconds["vitrail"], seconds[fastest]))
            cells = " | ".join(f"{speeds[name]:.2f} ({speeds[name] / ceiling:.0%})" for name in columns)
            print(
                f"| {config.name} | {batch} | {ceiling:.1f} | {cells} | {gains[-1]:.2f}x {fastest} | {gap:.1e} |",
                flush=True,
            )
    mean = statistics.geometric_mean(gains)
    print(f"\ngeometric mean over the best eager peer of each row: {mean:.3f}x\n")


def race_families(names, rounds):
    """Print the table of the other families: images per second of vitrail and timm."""
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
    parser.add_argument(
        "--ways",
        nargs="*",
        choices=BATCHES,
        default=list(BATCHES),
        help="ViTs to run by each engine in each precision",
    )
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
            race_precisions(arguments.ways, arguments.rounds, arguments.threads)
        if arguments.families:
            race_families(arguments.families, arguments.rounds)


if __name__ == "__main__":
    main()
