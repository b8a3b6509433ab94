"""`forward.js` and `preprocess.js` in a real browser, against torch and Pillow."""

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
# Runs every image and returns, by the name of the step, the largest difference relative to max(1, largest value).
COMPARE = """async ({ config, layout, images, size, steps, change }) => {
  const numbers = new Float32Array(await (await fetch("/numbers")).arrayBuffer());
  let at = 0;
  const next = (count) => numbers.subarray(at, (at += count));
  const tensors = Object.fromEntries(layout.map(([name, count]) => [name, next(count)]));
  const sets = Object.fromEntries(["masked", "heads", "attention", "mlp"].map((name) => [name, new Set(change[name])]));
  const worst = {}, logits = [];
  for (let image = 0; image < images; image++) {
    const found = forward({ config, tensors }, next(size), { ...change, ...sets });
    const lens = Object.fromEntries(found.lens.map((one, i) => [`lens.${i}`, one]));
    const all = { ...found.steps, logits: found.logits, ...lens };
    logits.push([...found.logits]);
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
def lab(browser):
    """A page with both scripts, and what a server on this machine gives it: megabytes of steps are too slow for the
    browser's own channel."""
    served = {"/": b"<!doctype html><title>x</title>", "/favicon.ico": b""}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = served[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
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


def compared(lab, model, images, expected, change=None):
    """JavaScript's steps of these images against expected ones (B, ...), by name."""
    page, served = lab
    tensors = pack_tensors(model)
    expected = {name: step.detach().float().contiguous() for name, step in expected.items()}
    parts = [torch.from_numpy(one.ravel()) for one in tensors.values()]
    for number, image in enumerate(images):
        parts += [image.flatten(), *(step[number].flatten() for step in expected.values())]
    served["/numbers"] = torch.cat(parts).numpy().tobytes()
    asked = {
        "config": page_config(model.config),
        "layout": [[name, one.size] for name, one in tensors.items()],
        "images": len(images),
        "size": images[0].numel(),
        "steps": [[name, step[0].numel()] for name, step in expected.items()],
        "change": change or {},
    }
    return page.evaluate(COMPARE, asked)


def seen_by_torch(model, images):
    """Every named step of `look`, the logits, and the logits if each layer were the last."""
    with torch.inference_mode():
        seen = vitrail.look(model, images, inside=None)
        lens = {f"lens.{0}": model.read(seen.steps["tokens"])}
        lens |= {f"lens.{n + 1}": model.read(seen.steps[f"blocks.{n}"]) for n in range(model.config.depth)}
    return {**seen.steps, **lens, "logits": seen.logits}


def shuffled(images, order, patch, grid):
    return unpatchify(patchify(images, patch)[:, order], grid, patch)


@pytest.fixture(scope="module")
def bundle():
    return vitrail.load("fashion")


@pytest.fixture(scope="module")
def clothes(bundle):
    return bundle.preprocess(CLOTHES)


ORDER = torch.randperm(49, generator=torch.Generator().manual_seed(1))


def without_positions(model):
    bare = copy.deepcopy(model)
    with torch.no_grad():
        bare.pos_embed.zero_()
    return bare


def test_every_step_of_forty_images_is_torchs(lab, bundle, clothes):
    expected = seen_by_torch(bundle.model, clothes)
    found = compared(lab, bundle.model, clothes, expected)
    assert set(found["extra"]) == expected.keys() - {"logits", *(name for name in expected if name[:4] == "lens")}
    assert len(found["worst"]) == 4 + 5 * 14 + 6 + 1
    assert max(found["worst"].values()) < 1e-4, found["worst"]
    assert np.argmax(found["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


@pytest.mark.parametrize("kept", ["positions", "no positions"])
def test_shuffled_patches(lab, bundle, clothes, kept):
    """Without positions the answer does not move; with them, it does."""
    model, change = bundle.model, {"order": ORDER.tolist(), "positions": kept == "positions"}
    if kept == "no positions":
        model = without_positions(model)
    expected = seen_by_torch(model, shuffled(clothes[:8], ORDER, (4, 4), (7, 7)))
    found = compared(lab, bundle.model, clothes[:8], expected, change)
    assert max(found["worst"].values()) < 1e-4
    straight = compared(lab, bundle.model, clothes[:8], {}, {"positions": change["positions"]})
    moved = np.abs(np.array(found["logits"]) - straight["logits"]).max()
    assert moved < 1e-5 if kept == "no positions" else moved > 1


def test_positions_off(lab, bundle, clothes):
    expected = seen_by_torch(without_positions(bundle.model), clothes)
    found = compared(lab, bundle.model, clothes, expected, {"positions": False})
    assert max(found["worst"].values()) < 1e-4
    assert np.argmax(found["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


def test_a_head_knocked_out(lab, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    keep = torch.ones(96)
    keep[32:64] = 0
    model.blocks[2].attn.proj.register_forward_pre_hook(lambda _, given: (given[0] * keep,))
    expected = seen_by_torch(model, clothes[:8])
    expected["blocks.2.heads"] = expected["blocks.2.heads"] * torch.tensor([1.0, 0, 1])[:, None, None]
    found = compared(lab, bundle.model, clothes[:8], expected, {"heads": ["2.1"]})
    assert max(found["worst"].values()) < 1e-4
    assert (expected["logits"] - seen_by_torch(bundle.model, clothes[:8])["logits"]).abs().max() > 0.01


def test_parts_of_layers_knocked_out(lab, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    with torch.no_grad():
        for linear in (model.blocks[1].attn.proj, model.blocks[3].attn.proj, model.blocks[3].mlp.fc2):
            linear.weight.zero_()
            linear.bias.zero_()
    expected = seen_by_torch(model, clothes[:4])
    expected = {name: step for name, step in expected.items() if name.rpartition(".")[2] not in ("msa", "z2")}
    found = compared(lab, bundle.model, clothes[:4], expected, {"attention": [1, 3], "mlp": [3]})
    assert max(found["worst"].values()) < 1e-4


def test_temperature(lab, bundle, clothes):
    model = copy.deepcopy(bundle.model)
    for block in model.blocks:
        block.attn.scale = 32**-0.5 / 4
    expected = {name: step for name, step in seen_by_torch(model, clothes[:4]).items() if not name.endswith("scores")}
    found = compared(lab, bundle.model, clothes[:4], expected, {"temperature": 4})
    assert max(found["worst"].values()) < 1e-4


@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_masked_patches_might_as_well_not_be_there(lab, pool):
    model = redraw(vitrail.create("ViT-Nano/7", classes=5, pool=pool), std=0.2).eval()
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    masked = [0, 5, 6, 15]
    prefix = int(pool == "cls")
    kept = [*range(prefix), *(n + prefix for n in range(16) if n not in masked)]
    with torch.inference_mode():
        tokens = model.embed(images)[:, kept]
        logits = model.read(model.encode(tokens))
    found = compared(lab, model, images, {"logits": logits}, {"masked": masked})
    assert found["worst"]["logits"] < 1e-4
    assert np.abs(found["logits"] - model(images).detach().numpy()).max() > 0.01


def draw(seed):
    """A model that the page can run, drawn at random with random weights."""
    chance = np.random.default_rng(seed)
    pick = lambda *choices: choices[chance.integers(len(choices))]  # noqa: E731
    heads, narrow = pick(1, 2, 3, 5), pick(4, 8, 12)
    patch, grid = (pick(2, 3, 7), pick(2, 4, 5)), (pick(1, 3, 4), pick(2, 3, 5))
    model = vitrail.create(
        "ViT-Nano/7",
        channels=pick(1, 3),
        classes=int(chance.integers(1, 12)),
        patch=patch,
        resolution=(patch[0] * grid[0], patch[1] * grid[1]),
        width=heads * narrow,
        heads=heads,
        depth=pick(1, 2, 3),
        mlp=int(chance.integers(3, 70)),
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
def test_twenty_random_models_are_torchs(lab, seed):
    model = draw(seed)
    c = model.config
    assert c.why_not_in_page is None
    images = torch.randn(2, c.channels, *c.resolution, generator=torch.Generator().manual_seed(seed))
    expected = seen_by_torch(model, images)
    found = compared(lab, model, images, expected)
    assert max(found["worst"].values()) < 1e-4, (c, found["worst"])
    assert np.argmax(found["logits"], 1).tolist() == expected["logits"].argmax(1).tolist()


# Preprocessing

chance = np.random.default_rng(0)
NOISE = chance.integers(0, 256, (61, 43, 4)).astype(np.uint8)
SMOOTH = Image.fromarray(NOISE).resize((300, 200), Image.Resampling.BICUBIC)


def file_of(image, **how):
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **how)
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
RULES = [
    {"resolution": (28, 28), "crop_fraction": 1.0, "mean": (0.5,), "std": (0.5,)},
    {"resolution": (32, 24), "crop_fraction": 0.9},
    {"resolution": (30, 40), "resize": "squash", "interpolation": "bilinear", "mean": (0.4,), "std": (0.2,)},
    {"resolution": (33, 33), "resize": "pad", "crop_fraction": 1.0, "background": (250, 128, 3)},
]
READ = """async ({ rules, names }) => {
  const found = {};
  for (const name of names) {
    const pixels = cropped(await decode(await (await fetch("/" + encodeURIComponent(name))).blob(), rules), rules);
    found[name] = { pixels: [...pixels], scaled: [...scaled(pixels, rules)] };
  }
  return found;
}"""


@pytest.mark.parametrize("settings", RULES, ids=lambda settings: settings.get("resize", "shorter"))
def test_a_file_becomes_pythons_pixels(lab, settings):
    page, served = lab
    preprocess = vitrail.Preprocess(**settings)
    files = {name: file_of(image) for name, image in FILES.items()}
    served |= {"/" + name.replace(" ", "%20").replace(",", "%2C"): content for name, content in files.items()}
    found = page.evaluate(READ, {"rules": json.loads(json.dumps(preprocess.to_json())), "names": list(files)})
    for name, content in files.items():
        expected = preprocess.crop(content)
        got = np.array(found[name]["pixels"], np.uint8).reshape(expected.shape)
        off = np.abs(got.astype(int) - expected).max()
        assert off <= 1, (name, off)
        levels = preprocess.scale_array(got[None])
        assert np.abs(np.array(found[name]["scaled"]).reshape(levels.shape) - levels).max() < 1e-6, name
