"""Parity of `forward.js` with torch and of `preprocess.js` with Pillow, in a real browser."""

import copy
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.sources.registry import open_data
from vitrail.lab.exact import redraw
from vitrail.models.layers import patchify, unpatchify
from vitrail.reports.explain.explain_page import pack_tensors, page_config

CLOTHES = open_data("fashion-40").splits["test"].images
SCRIPTS = [
    resources.files("vitrail").joinpath(name).read_text(encoding="utf-8")
    for name in ("reports/forward.js", "reports/explain/preprocess.js")
]
# Run every image. Return the largest difference of each step, relative to max(1, largest value), and the logits.
COMPARE = """async ({ config, layout, images, size, steps, change }) => {
  const numbers = new Float32Array(await (await fetch("/numbers")).arrayBuffer());
  let at = 0;
  const next = (count) => numbers.subarray(at, (at += count));
  const tensors = Object.fromEntries(layout.map(([name, count]) => [name, next(count)]));
  const sets = Object.fromEntries(["masked", "heads", "attention", "mlp"].map((name) => [name, new Set(change[name])]));
  const worst = {}, logits = [];
  for (let image = 0; image < images; image++) {
    const result = forward({ config, tensors }, next(size), { ...change, ...sets });
    const lens = Object.fromEntries(result.lens.map((logits, i) => [`lens.${i}`, logits]));
    const all = { ...result.steps, logits: result.logits, ...lens };
    logits.push([...result.logits]);
    for (const [name, count] of steps) {
      const expected = next(count);
      if (all[name].length !== count) throw new Error(`${name} has ${all[name].length} numbers, not ${count}`);
      let largest = 1, off = 0;
      for (let i = 0; i < count; i++) {
        if (Number.isFinite(expected[i])) largest = Math.max(largest, Math.abs(expected[i]));
        off = Math.max(off, all[name][i] === expected[i] ? 0 : Math.abs(all[name][i] - expected[i]));
      }
      worst[name] = Math.max(worst[name] ?? 0, Number.isNaN(off) ? Infinity : off / largest);
    }
  }
  return { worst, logits, extra: Object.keys(forward({ config, tensors }, numbers.subarray(0, size)).steps) };
}"""


@pytest.fixture(scope="module")
def script_page(browser):
    """Return a page with both scripts, and the content of a local server by path.

    The server transfers megabytes of step values, for which `page.evaluate` is too slow.
    """
    served = {"/": b"<!doctype html><title>x</title>", "/favicon.ico": b""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = served[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        for script in SCRIPTS:
            page.add_script_tag(content=script)
        yield page, served
        page.close()
        server.shutdown()


def compare_steps(script_page, model, images, expected, change=None):
    """Compare the steps of forward.js with expected ones (B, ...), by name. Return differences and logits."""
    page, served = script_page
    tensors = pack_tensors(model)
    expected = {name: step.detach().float().contiguous() for name, step in expected.items()}
    parts = [torch.from_numpy(tensor.ravel()) for tensor in tensors.values()]
    for number, image in enumerate(images):
        parts += [image.flatten(), *(step[number].flatten() for step in expected.values())]
    served["/numbers"] = torch.cat(parts).numpy().tobytes()
    arguments = {
        "config": page_config(model.config),
        "layout": [[name, tensor.size] for name, tensor in tensors.items()],
        "images": len(images),
        "size": images[0].numel(),
        "steps": [[name, step[0].numel()] for name, step in expected.items()],
        "change": change or {},
    }
    return page.evaluate(COMPARE, arguments)


def torch_steps(model, images):
    """Return every named step of `look`, the logits, and the logits as if each layer were the last."""
    with torch.inference_mode():
        activations = vitrail.look(model, images, inside=None)
        lens = {f"lens.{0}": model.read(activations.steps["tokens"])}
        lens |= {f"lens.{n + 1}": model.read(activations.steps[f"blocks.{n}"]) for n in range(model.config.depth)}
    return {**activations.steps, **lens, "logits": activations.logits}


def shuffle_patches(images, order, patch, grid):
    return unpatchify(patchify(images, patch)[:, order], grid, patch)


@pytest.fixture(scope="module")
def bundle():
    return vitrail.load("fashion")


@pytest.fixture(scope="module")
def clothes(bundle):
    return bundle.preprocess(CLOTHES)


ORDER = torch.randperm(49, generator=torch.Generator().manual_seed(1))


def without_positions(model):
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.pos_embed.zero_()
    return changed


def test_all_steps_of_forty_images_equal_torch(script_page, bundle, clothes):
    expected = torch_steps(bundle.model, clothes)
    result = compare_steps(script_page, bundle.model, clothes, expected)
    assert set(result["extra"]) == expected.keys() - {"logits", *(name for name in expected if name[:4] == "lens")}
    assert len(result["worst"]) == 4 + 5 * 14 + 6 + 1
    assert max(result["worst"].values()) < 1e-4, result["worst"]
    assert np.argmax(result["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


@pytest.mark.parametrize("case", ["positions", "no positions"])
def test_shuffled_patches_equal_torch(script_page, bundle, clothes, case):
    """The order of patches changes the logits only with positions."""
    model, change = bundle.model, {"order": ORDER.tolist(), "positions": case == "positions"}
    if case == "no positions":
        model = without_positions(model)
    expected = torch_steps(model, shuffle_patches(clothes[:8], ORDER, (4, 4), (7, 7)))
    result = compare_steps(script_page, bundle.model, clothes[:8], expected, change)
    assert max(result["worst"].values()) < 1e-4
    in_order = compare_steps(script_page, bundle.model, clothes[:8], {}, {"positions": change["positions"]})
    difference = np.abs(np.array(result["logits"]) - in_order["logits"]).max()
    assert difference < 1e-5 if case == "no positions" else difference > 1


def test_no_positions_equals_torch(script_page, bundle, clothes):
    expected = torch_steps(without_positions(bundle.model), clothes)
    result = compare_steps(script_page, bundle.model, clothes, expected, {"positions": False})
    assert max(result["worst"].values()) < 1e-4
    assert np.argmax(result["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


def test_switched_off_head_equals_torch(script_page, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    mask = torch.ones(96)
    mask[32:64] = 0
    model.blocks[2].attn.proj.register_forward_pre_hook(lambda _, inputs: (inputs[0] * mask,))
    expected = torch_steps(model, clothes[:8])
    expected["blocks.2.heads"] = expected["blocks.2.heads"] * torch.tensor([1.0, 0, 1])[:, None, None]
    result = compare_steps(script_page, bundle.model, clothes[:8], expected, {"heads": ["2.1"]})
    assert max(result["worst"].values()) < 1e-4
    assert (expected["logits"] - torch_steps(bundle.model, clothes[:8])["logits"]).abs().max() > 0.01


def test_switched_off_parts_of_layers_equal_torch(script_page, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    with torch.no_grad():
        for linear in (model.blocks[1].attn.proj, model.blocks[3].attn.proj, model.blocks[3].mlp.fc2):
            linear.weight.zero_()
            linear.bias.zero_()
    expected = torch_steps(model, clothes[:4])
    expected = {name: step for name, step in expected.items() if name.rpartition(".")[2] not in ("msa", "z2")}
    result = compare_steps(script_page, bundle.model, clothes[:4], expected, {"attention": [1, 3], "mlp": [3]})
    assert max(result["worst"].values()) < 1e-4


def test_temperature_equals_torch(script_page, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    for block in model.blocks:
        block.attn.scale = 32**-0.5 / 4
    expected = {name: step for name, step in torch_steps(model, clothes[:4]).items() if not name.endswith("scores")}
    result = compare_steps(script_page, bundle.model, clothes[:4], expected, {"temperature": 4})
    assert max(result["worst"].values()) < 1e-4


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_masked_patches_equal_torch_without_these_tokens(script_page, pool):
    model = redraw(vitrail.create("ViT-Nano/7", classes=5, pool=pool), std=0.2).eval()
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    masked = [0, 5, 6, 15]
    prefix = int(pool == "cls")
    visible = [*range(prefix), *(n + prefix for n in range(16) if n not in masked)]
    with torch.inference_mode():
        tokens = model.embed(images)[:, visible]
        logits = model.read(model.encode(tokens))
    result = compare_steps(script_page, model, images, {"logits": logits}, {"masked": masked})
    assert result["worst"]["logits"] < 1e-4
    assert np.abs(result["logits"] - model(images).detach().numpy()).max() > 0.01


def random_model(seed):
    """Return a model with a random config that the page supports and random weights."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[rng.integers(len(choices))]  # noqa: E731
    heads, head_width = pick(1, 2, 3, 5), pick(4, 8, 12)
    patch, grid = (pick(2, 3, 7), pick(2, 4, 5)), (pick(1, 3, 4), pick(2, 3, 5))
    model = vitrail.create(
        "ViT-Nano/7",
        channels=pick(1, 3),
        classes=int(rng.integers(1, 12)),
        patch=patch,
        resolution=(patch[0] * grid[0], patch[1] * grid[1]),
        width=heads * head_width,
        heads=heads,
        depth=pick(1, 2, 3),
        mlp=int(rng.integers(3, 70)),
        registers=pick(0, 0, 1, 4),
        pool=pick("cls", "gap"),
        representation=pick("none", "tanh", "gelu"),
        position=pick("none", "learned-1d", "learned-2d", "sincos-1d", "sincos-2d"),
        class_position=bool(pick(True, False)),
        activation=pick("gelu", "gelu-tanh"),
        qkv_bias=bool(pick(True, False)),
        norm_epsilon=pick(1e-6, 1e-3),
    )
    return redraw(model, std=pick(0.05, 0.3, 1.0)).eval()


@pytest.mark.parametrize("seed", range(20))
def test_random_models_equal_torch(script_page, seed):
    model = random_model(seed)
    config = model.config
    assert config.why_not_in_page is None
    images = torch.randn(2, config.channels, *config.resolution, generator=torch.Generator().manual_seed(seed))
    expected = torch_steps(model, images)
    result = compare_steps(script_page, model, images, expected)
    assert max(result["worst"].values()) < 1e-4, (config, result["worst"])
    assert np.argmax(result["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


# Preprocessing

rng = np.random.default_rng(0)
NOISE = rng.integers(0, 256, (61, 43, 4)).astype(np.uint8)
SMOOTH = Image.fromarray(NOISE).resize((300, 200), Image.Resampling.BICUBIC)


def png_bytes(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


FILES = {
    "grey, small": Image.fromarray(NOISE[..., 0]),
    "grey, of the size": Image.fromarray(NOISE[:28, :28, 0]),
    "grey, tiny": Image.fromarray(NOISE[:9, :5, 0]),
    "colour, wide": SMOOTH.convert("RGB"),
    "colour, tall": Image.fromarray(NOISE[..., :3]),
    "with transparency": SMOOTH,
    "grey with transparency": SMOOTH.convert("LA"),
    "palette": SMOOTH.convert("RGB").quantize(40),
    "black and white": Image.fromarray(NOISE[..., 0] > 100),
    "16 bits": Image.fromarray(NOISE[..., 0].astype(np.uint16) * 257),
}
PREPROCESS_SETTINGS = [
    {"resolution": (28, 28), "crop_fraction": 1.0, "mean": (0.5,), "std": (0.5,)},
    {"resolution": (32, 24), "crop_fraction": 0.9},
    {"resolution": (30, 40), "resize": "squash", "interpolation": "bilinear", "mean": (0.4,), "std": (0.2,)},
    {"resolution": (33, 33), "resize": "pad", "crop_fraction": 1.0, "background": (250, 128, 3)},
]
READ_FILES = """async ({ preprocess, names }) => {
  const results = {};
  for (const name of names) {
    const file = await (await fetch("/" + encodeURIComponent(name))).blob();
    const pixels = cropped(await decode(file, preprocess), preprocess);
    results[name] = { pixels: [...pixels], scaled: [...scaled(pixels, preprocess)] };
  }
  return results;
}"""


@pytest.mark.parametrize("settings", PREPROCESS_SETTINGS, ids=lambda settings: settings.get("resize", "shorter"))
def test_files_give_the_same_pixels_as_in_python(script_page, settings):
    page, served = script_page
    preprocess = vitrail.Preprocess(**settings)
    files = {name: png_bytes(image) for name, image in FILES.items()}
    served |= {"/" + name.replace(" ", "%20").replace(",", "%2C"): content for name, content in files.items()}
    arguments = {"preprocess": json.loads(json.dumps(preprocess.to_json())), "names": list(files)}
    results = page.evaluate(READ_FILES, arguments)
    for name, content in files.items():
        expected = preprocess.crop(content)
        pixels = np.array(results[name]["pixels"], np.uint8).reshape(expected.shape)
        difference = np.abs(pixels.astype(int) - expected).max()
        assert difference <= 1, (name, difference)
        levels = preprocess.scale_array(pixels[None])
        assert np.abs(np.array(results[name]["scaled"]).reshape(levels.shape) - levels).max() < 1e-6, name
