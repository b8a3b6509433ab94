"""Token merging: what it must not change, to the bit or within rounding, and what it saves."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.bundles.convert import convert
from vitrail.core.errors import UsageError
from vitrail.core.intervals import wilson_interval
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.merge_search import MergeCost, MergeEvaluator, _merge_more, count_macs, find_merge, with_merge
from vitrail.inference.engine import import_engine_package
from vitrail.inference.onnx_engine import OnnxEngine
from vitrail.lab.exact import redraw
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.merging import chessboard, match, merge, spread
from vitrail.models.families.vit.model import ViT
from vitrail.models.layers import patchify, unpatchify
from vitrail.models.walkthrough import walkthrough_of
from vitrail.models.zoo import find

CONFIG = ViTConfig(resolution=(16, 24), patch=(4, 4), width=16, heads=2, mlp=32, depth=3, classes=5, channels=2)


def small(**changes):
    """4 x 6 patches of 4 pixels, redrawn, in double precision: equal means equal."""
    return redraw(ViT(CONFIG.replace(**changes)).double(), std=0.4).eval()


def images(count=3):
    return torch.randn(count, 2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def merged_twice(tokens=25, prefix=1, counts=(7, 5)):
    x = torch.randn(2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups, now = None, x
    for count in counts:
        now, groups = merge(now, groups, match(now, prefix, count, chessboard((4, 6))))
    return x, now, groups


# The merge itself


def test_sizes_sum_to_the_tokens_and_each_token_is_the_mean_of_its_group():
    x, now, groups = merged_twice()
    assert now.shape == (2, 13, 8)
    assert groups.size_BM.sum(1).tolist() == [25, 25]
    assert groups.size_BM.max() > 2  # some are merged with merged ones
    home = groups.home()
    for image in range(2):
        for token in range(13):
            members = x[image][home[image] == 13 * image + token]
            assert len(members) == groups.size_BM[image, token]
            torch.testing.assert_close(members.mean(0), now[image, token])
    torch.testing.assert_close(spread(now, groups).mean(1), x.mean(1))


def test_class_token_and_registers_are_never_merged_though_nothing_resembles_more():
    x = torch.randn(2, 28, 8)
    x[:, :4] = 1.0  # [CLS] and registers are equal to each other,
    x[:, 4:6] = 1.0  # and to the first patches
    now, groups = merge(x, None, match(x, 4, 12, chessboard((4, 6))))
    assert torch.equal(now[:, :4], x[:, :4])
    assert groups.size_BM[:, :4].tolist() == [[1.0] * 4] * 2
    assert groups.size_BM.sum(1).tolist() == [28, 28]


def test_the_most_similar_patches_join():
    x = torch.eye(12, dtype=torch.float64)[None] + 0.01
    x[0, 5] = x[0, 4] + 0.001 * x[0, 7]  # 4 and 5 are neighbours on a board of 2 x 6
    x[0, 9] = x[0, 3] + 0.002 * x[0, 7]
    groups = merge(x, None, match(x, 0, 2, chessboard((2, 6))))[1]
    home = groups.home()[0]
    assert home[4] == home[5]
    assert home[3] == home[9]
    assert sorted(groups.size_BM[0].tolist()) == [1.0] * 8 + [2.0] * 2


def test_what_joins_costs_least_by_the_squares_that_a_group_gains_and_by_what_is_read():
    """A second merge against a loop over pairs: the gain in squared distances from the mean, by definition."""
    x, now, groups = merged_twice(counts=(7,))
    paid = torch.rand(2, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = match(now, 1, 3, None, groups, paid)
    home = groups.home()

    def squares(image, *tokens):
        members = torch.cat([x[image][home[image] == 18 * image + token] for token in tokens])
        return (members - members.mean(0)).square().sum()

    for image in range(2):
        costs = {}
        for source, target in itertools.product(range(2, 18, 2), range(1, 18, 2)):  # every second patch after [CLS]
            means = [x[image][home[image] == 18 * image + token].mean(0) for token in (source, target)]
            torch.testing.assert_close(means[0], now[image, source])
            gain = squares(image, source, target) - squares(image, source) - squares(image, target)
            costs[source, target] = gain * (paid[image, source] + paid[image, target]).sqrt()
        best = {
            source: min((cost, target) for (one, target), cost in costs.items() if one == source) for source, _ in costs
        }
        chosen = sorted(best, key=lambda source: best[source][0])[:3]
        assert (found.joins_BR[image] - 18 * image).tolist() == chosen
        rows = found.into_BR[image] - 15 * image
        assert (found.stays_BM[image][rows] - 18 * image).tolist() == [best[source][1] for source in chosen]


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"attention_scale": 1.0}, {"norm_order": "post"}])
def test_what_the_class_token_reads_is_its_row_of_the_attention(changes):
    model = small(**changes)
    z = model.embed(images())
    block = model.blocks[1]
    torch.testing.assert_close(block.cls_attention(z), block.attention(z, None, None)[:, :, 0].mean(1))


@pytest.mark.parametrize("grid", [(4, 6), (3, 5), (7, 7), (1, 6)])
def test_all_neighbours_of_a_source_are_targets(grid):
    board = chessboard(grid)
    sources = grid[0] * grid[1] // 2
    rows, columns = board // grid[1], board % grid[1]
    colours = (rows + columns) % 2
    assert sorted(board.tolist()) == list(range(len(board)))
    assert colours.tolist() == [0] * (len(board) - sources) + [1] * sources


def test_a_batch_merges_each_image_as_if_alone():
    x, now, _ = merged_twice()
    for image in range(2):
        alone, groups = x[image : image + 1], None
        for count in (7, 5):
            alone, groups = merge(alone, groups, match(alone, 1, count, chessboard((4, 6))))
        torch.testing.assert_close(alone[0], now[image])


# The model


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_merging_nothing_is_the_same_bits(pool):
    plain, none = small(pool=pool), small(pool=pool, merge=0)
    assert none.config == plain.config
    assert none.config.merge == ()
    assert torch.equal(plain(images()), none(images()))


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_merging_equal_patches_gives_the_answer_of_all_of_them(pool, norm_order):
    """Every patch of one colour is a copy of its neighbour: as many tokens as are copies can go, and log(size) makes
    up for them. In single precision, as used."""
    changes = {"pool": pool, "norm_order": norm_order, "registers": 2, "position": "none"}
    plain, merged = (small(**changes, **more).float() for more in ({}, {"merge": [12, 0, 0]}))
    flat = patchify(images().float(), (4, 4))
    flat = flat[:, 0::2].repeat_interleave(2, dim=1)
    pictures = unpatchify(flat, (4, 6), (4, 4))
    expected = plain(pictures)
    assert merged.config.layer_tokens == tuple(tokens - 12 for tokens in plain.config.layer_tokens)
    assert (merged(pictures) - expected).abs().max() < 1e-5 * expected.abs().max()
    unsized = merged.clone_with().eval()
    unsized.encode = without_sizes(unsized)
    assert (unsized(pictures) - expected).abs().max() > 1e-3 * expected.abs().max()
    assert (merged(images().float()) - plain(images().float())).abs().max() > 1e-3 * expected.abs().max()


def without_sizes(model):
    """The same encoder, in which a group gets the attention of one token."""

    def encode(z, seen=None, all_tokens=False):
        z, groups = merge(z, None, match(z, model.config.prefix, 12, model.board))
        for block in model.blocks:
            z = block(z)
        return spread(z, groups)

    return encode


def test_merging_twice_equals_the_mean_of_equal_tokens_in_every_layer():
    """What a merged layer computes is what all tokens would, if those of a group were equal."""
    model = small(merge=[5, 0, 4], pool="gap", registers=1)
    seen = vitrail.look(model, images(), inside=None)
    for layer, block in enumerate(model.blocks):
        entered = walkthrough_of(model).layer_input(layer, seen)
        torch.testing.assert_close(block(entered), seen.steps[f"blocks.{layer}"])
        torch.testing.assert_close(seen.attention[layer].sum(-1), torch.ones(3, 2, 25, dtype=torch.float64))
        torch.testing.assert_close(seen.attention[layer], seen.steps[f"blocks.{layer}.weights"])
        groups = [len(rows.unique(dim=0)) for rows in entered]
        assert groups == [model.config.layer_tokens[layer]] * 3
    assert model.config.layer_tokens == (20, 20, 16)


def test_looking_does_not_change_the_logits():
    model = small(merge=[5, 4, 3], registers=1).float()
    pictures = images().float()
    seen = vitrail.look(model, pictures, inside=None)
    assert torch.equal(seen.logits, model(pictures))
    assert {step.shape[1] for name, step in seen.steps.items() if name in ("blocks.0", "blocks.1", "blocks.2")} == {26}
    assert [one.shape for one in model.feature_maps(pictures, layers=None)] == [(3, 16, 4, 6)] * 3


def test_moving_patches_within_a_colour_of_the_board_permutes_the_merge():
    model = small(position="none", merge=[6, 0, 0])
    generator = torch.Generator().manual_seed(1)
    board = chessboard((4, 6))
    order = torch.empty(24, dtype=torch.long)
    for colour in board.chunk(2):
        order[colour] = colour[torch.randperm(12, generator=generator)]
    flat = patchify(images(), (4, 4))
    seen, moved = (vitrail.look(model, unpatchify(one, (4, 6), (4, 4))) for one in (flat, flat[:, order]))
    torch.testing.assert_close(seen.logits, moved.logits)
    torch.testing.assert_close(seen.steps["blocks.0"][:, 1:][:, order], moved.steps["blocks.0"][:, 1:])


def test_gradients_reach_every_weight_and_every_pixel():
    model = small(merge=[5, 5, 5], pool="gap").train()
    pictures = images().requires_grad_()
    model(pictures).square().sum().backward()
    assert (pictures.grad != 0).all()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_training_with_dropped_tokens_merges_at_most_half_of_the_rest():
    model = small(merge=12, token_drop=0.5, pool="gap").train()
    assert model.encode(model.embed(images())).shape == (3, 12, 16)
    model.checkpoints_activations = True
    model(images()).sum().backward()


def test_counts_by_arithmetic_are_those_of_the_built_model():
    for changes in ({"merge": [5, 0, 4]}, {"merge": 100, "pool": "gap"}, {"merge": [0, 7, 0], "pool": "map"}):
        config = CONFIG.replace(**changes)
        with torch.device("meta"):
            model = ViT(config)
        with FlopCounterMode(display=False) as counter:
            model.read(model.encode(model.embed(torch.empty(1, 2, 16, 24, device="meta")), all_tokens=True))
        assert counter.get_total_flops() == 2 * config.macs < 2 * CONFIG.replace(pool=config.pool).macs
    assert CONFIG.replace(merge=100).layer_tokens == (13, 7, 4)
    assert CONFIG.replace(merge=[3, 0, 3]).info()["layer_tokens"] == [22, 22, 19]
    assert "layer_tokens" not in CONFIG.info()


def test_settings_that_cannot_be_merged_are_refused_in_a_line():
    for changes in (
        {"merge": [1, 2]},
        {"merge": [1, -2, 0]},
        {"merge": "many"},
        {"merge": 4, "position": "rope-2d"},
        {"merge": 4, "position": "relative"},
        {"merge": 4, "position_at": "every"},
        {"merge": 4, "attention": "local"},
        {"merge": 4, "norm": "batch"},
    ):
        with pytest.raises(UsageError, match=r"^Merge must be"):
            CONFIG.replace(**changes)


def bundle_of(model, path):
    half = (0.5,) * model.config.channels
    preprocess = vitrail.Preprocess(resolution=model.config.resolution, mean=half, std=half)
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), path)
    return path


def test_a_bundle_keeps_it_and_other_libraries_are_refused(tmp_path):
    model = redraw(vitrail.create("ViT-Nano/7", merge=[0, 4, 0, 3]), std=0.05)
    path = bundle_of(model, tmp_path / "one")
    assert vitrail.load(path).model.config.merge == (0, 4, 0, 3)
    with pytest.raises(UsageError, match=r"Model must be one that timm has, got merge \(0, 4, 0, 3\)"):
        convert(str(path), tmp_path / "other", to="timm", images=[np.zeros((28, 28), np.uint8)])


@pytest.mark.parametrize("pool", ["cls", pytest.param("gap", marks=pytest.mark.slow)])
def test_onnx_runtime_gives_torchs_logits_at_every_batch(pool, tmp_path):
    model = redraw(vitrail.create("ViT-Nano/7", merge=[3, 4, 0, 3], pool=pool, classes=5), std=0.1)
    folder = OnnxEngine.prepare(bundle_of(model, tmp_path / "one"), "float32")
    runtime = import_engine_package("onnxruntime", "onnx")
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    pictures = torch.randn(7, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(pictures).numpy()
    for batch in (1, 2, 3, 7):
        logits = session.run(["logits"], {"pixel_values": pictures[:batch].numpy()})[0]
        assert np.abs(logits - expected[:batch]).max() < 1e-4 * np.abs(expected).max()


def test_the_page_of_inspect_says_that_patches_share_tokens(tmp_path):
    shown = []
    for counts in ([0, 4, 0, 3], 0):
        path = bundle_of(redraw(vitrail.create("ViT-Nano/7", merge=counts), std=0.1), tmp_path / f"one-{len(shown)}")
        output = tmp_path / f"page-{len(shown)}"
        vitrail.inspect(path, [np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)], output=output)
        shown.append((output / "index.html").read_text(encoding="utf-8"))
    assert ["Merged patches have the same maps" in page for page in shown] == [True, False]


# The search


@pytest.fixture(scope="module")
def curve():
    bundle = vitrail.load("fashion")
    images = open_data("fashion-40").first_split.images[:20]
    told = []
    return bundle, images, find_merge(bundle, images, 0.05, tell=told.append), told


def test_the_search_saves_more_at_every_step_and_keeps_the_tolerance(curve):
    bundle, images, prices, told = curve
    assert prices[0] == MergeCost((0,) * 5, count_macs(bundle.model.config), 0, 20, 0.0)
    assert len(prices) > 4
    assert all(before.macs > after.macs for before, after in itertools.pairwise(prices))
    assert all(price.changed <= 1 for price in prices)
    assert prices[0].macs / prices[-1].macs > 1.5
    assert len(told) == len(prices) - 1
    assert f"{prices[-1].changed} of 20 answers changed" in told[-1]
    # Each is what the model so set answers.
    judge = MergeEvaluator(bundle, images)
    for price in (prices[1], prices[-1]):
        assert judge.price(price.merge) == price
        answers = vitrail.Classifier(dataclasses.replace(bundle, model=with_merge(bundle.model, price.merge)))
        labels = [named[0]["label"] for named in answers.predict(images, top_k=1)]
        plain = [named[0]["label"] for named in vitrail.Classifier(bundle).predict(images, top_k=1)]
        assert sum(one != other for one, other in zip(labels, plain, strict=True)) == price.changed
    document = prices[-1].to_json()
    assert document["merge"] == list(prices[-1].merge)
    assert document["interval"] == list(wilson_interval(prices[-1].changed, 20))


def test_the_search_counts_what_is_computed():
    """The last block of a model that reads [CLS] computes one token: merging in front of it saves little."""
    plain, late, early = (count_macs(CONFIG.replace(merge=merge)) for merge in (0, [0, 0, 12], [12, 0, 0]))
    assert plain < CONFIG.macs
    assert 0 < plain - late < (plain - early) / 5


def test_sequences_have_fast_lengths():
    config = find("ViT-Ti/16")
    first = _merge_more(config, (0,) * 12, 6)
    assert first == (0,) * 6 + (21,) + (0,) * 5
    second = _merge_more(config, first, 4)
    assert config.replace(merge=second).layer_tokens == (197,) * 4 + (176, 176) + (160,) * 6
    most = (0,) * 4 + (93,) + (0,) * 7
    assert _merge_more(config, most, 4) is None


def test_a_search_that_cannot_be_is_refused_in_a_line(curve):
    bundle, images, _, _ = curve
    with pytest.raises(UsageError, match=r"Tolerance must be a number from 0 to 1, got 2"):
        find_merge(bundle, images, 2)
    with pytest.raises(UsageError, match="Images to search on must be at least one"):
        find_merge(bundle, [], 0.1)
    mixer = vitrail.create("Mixer-Nano/7")
    eye = vitrail.Preprocess(resolution=28, mean=(0.5,), std=(0.5,))
    with pytest.raises(UsageError, match=r"Merging must have a ViT or hybrid .* got Mixer-Nano/7"):
        find_merge(vitrail.Bundle(model=mixer, preprocess=eye), images, 0.1)
