"""Token merging: the outputs that it must not change, the merged groups, and the saved computation."""

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
    """Return a model with 4 x 6 patches of 4 pixels and random weights, in double precision for exact comparisons."""
    return redraw(ViT(CONFIG.replace(**changes)).double(), std=0.4).eval()


def images(count=3):
    return torch.randn(count, 2, 16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def merged_twice(tokens=25, prefix=1, counts=(7, 5)):
    x = torch.randn(2, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups, merged = None, x
    for count in counts:
        merged, groups = merge(merged, groups, match(merged, prefix, count, chessboard((4, 6))))
    return x, merged, groups


# The merge itself


def test_merged_tokens_are_group_means_and_sizes_sum_to_the_tokens():
    x, merged, groups = merged_twice()
    assert merged.shape == (2, 13, 8)
    assert groups.size_BM.sum(1).tolist() == [25, 25]
    assert groups.size_BM.max() > 2  # the second merge joined groups of the first merge
    rows = groups.group_rows()
    for image in range(2):
        for token in range(13):
            members = x[image][rows[image] == 13 * image + token]
            assert len(members) == groups.size_BM[image, token]
            torch.testing.assert_close(members.mean(0), merged[image, token])
    torch.testing.assert_close(spread(merged, groups).mean(1), x.mean(1))


def test_class_token_and_registers_are_never_merged():
    x = torch.randn(2, 28, 8)
    x[:, :4] = 1.0  # [CLS] and registers are equal to each other
    x[:, 4:6] = 1.0  # and to the first patches
    merged, groups = merge(x, None, match(x, 4, 12, chessboard((4, 6))))
    assert torch.equal(merged[:, :4], x[:, :4])
    assert groups.size_BM[:, :4].tolist() == [[1.0] * 4] * 2
    assert groups.size_BM.sum(1).tolist() == [28, 28]


def test_the_most_similar_patches_are_merged():
    x = torch.eye(12, dtype=torch.float64)[None] + 0.01
    x[0, 5] = x[0, 4] + 0.001 * x[0, 7]  # 4 and 5 are neighbours on a board of 2 x 6
    x[0, 9] = x[0, 3] + 0.002 * x[0, 7]
    groups = merge(x, None, match(x, 0, 2, chessboard((2, 6))))[1]
    rows = groups.group_rows()[0]
    assert rows[4] == rows[5]
    assert rows[3] == rows[9]
    assert sorted(groups.size_BM[0].tolist()) == [1.0] * 8 + [2.0] * 2


def test_match_selects_the_pairs_of_lowest_cost():
    """Compare a second merge with a loop over pairs. The cost of a pair is the increase of the squared distances from
    the mean of the group, times the square root of the attention of [CLS] to both tokens."""
    x, merged, groups = merged_twice(counts=(7,))
    attention = torch.rand(2, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs = match(merged, 1, 3, None, groups, attention)
    rows = groups.group_rows()

    def squares(image, *tokens):
        members = torch.cat([x[image][rows[image] == 18 * image + token] for token in tokens])
        return (members - members.mean(0)).square().sum()

    for image in range(2):
        costs = {}
        for source, target in itertools.product(range(2, 18, 2), range(1, 18, 2)):  # every second patch after [CLS]
            means = [x[image][rows[image] == 18 * image + token].mean(0) for token in (source, target)]
            torch.testing.assert_close(means[0], merged[image, source])
            gain = squares(image, source, target) - squares(image, source) - squares(image, target)
            costs[source, target] = gain * (attention[image, source] + attention[image, target]).sqrt()
        lowest = {  # cost and target of each source
            source: min((cost, target) for (joining, target), cost in costs.items() if joining == source)
            for source, _ in costs
        }
        joining = sorted(lowest, key=lambda source: lowest[source][0])[:3]
        assert (pairs.joins_BR[image] - 18 * image).tolist() == joining
        targets = pairs.into_BR[image] - 15 * image
        assert (pairs.stays_BM[image][targets] - 18 * image).tolist() == [lowest[source][1] for source in joining]


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": False}, {"attention_scale": 1.0}, {"norm_order": "post"}])
def test_cls_attention_equals_its_row_of_the_attention_weights(changes):
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


def test_batched_merging_equals_merging_each_image():
    x, merged, _ = merged_twice()
    for image in range(2):
        single, groups = x[image : image + 1], None
        for count in (7, 5):
            single, groups = merge(single, groups, match(single, 1, count, chessboard((4, 6))))
        torch.testing.assert_close(single[0], merged[image])


# The model


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
def test_merging_no_tokens_gives_bit_identical_logits(pool):
    plain, unmerged = small(pool=pool), small(pool=pool, merge=0)
    assert unmerged.config == plain.config
    assert unmerged.config.merge == ()
    assert torch.equal(plain(images()), unmerged(images()))


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("norm_order", ["pre", "post"])
def test_merging_equal_patches_keeps_the_logits(pool, norm_order):
    """Every second patch is a copy of its neighbour. Merging all copies keeps the logits (in single precision), because
    log(size) gives a group the attention of its tokens."""
    changes = {"pool": pool, "norm_order": norm_order, "registers": 2, "position": "none"}
    plain, merged = (small(**changes, **merging).float() for merging in ({}, {"merge": [12, 0, 0]}))
    flat = patchify(images().float(), (4, 4))
    flat = flat[:, 0::2].repeat_interleave(2, dim=1)
    batch_images = unpatchify(flat, (4, 6), (4, 4))
    expected = plain(batch_images)
    assert merged.config.layer_tokens == tuple(tokens - 12 for tokens in plain.config.layer_tokens)
    assert (merged(batch_images) - expected).abs().max() < 1e-5 * expected.abs().max()
    unsized = merged.clone_with().eval()
    unsized.encode = without_sizes(unsized)
    assert (unsized(batch_images) - expected).abs().max() > 1e-3 * expected.abs().max()
    assert (merged(images().float()) - plain(images().float())).abs().max() > 1e-3 * expected.abs().max()


def without_sizes(model):
    """Return an `encode` method in which a group gets the attention of a single token."""

    def encode(z, activations=None, all_tokens=False):
        z, groups = merge(z, None, match(z, model.config.prefix, 12, model.board))
        for block in model.blocks:
            z = block(z)
        return spread(z, groups)

    return encode


def test_merged_layers_compute_what_equal_tokens_would_in_every_layer():
    """A layer with merged tokens gives the outputs of all tokens, if the tokens of a group are equal."""
    model = small(merge=[5, 0, 4], pool="gap", registers=1)
    activations = vitrail.look(model, images(), inside=None)
    for layer, block in enumerate(model.blocks):
        layer_input = walkthrough_of(model).layer_input(layer, activations)
        torch.testing.assert_close(block(layer_input), activations.steps[f"blocks.{layer}"])
        torch.testing.assert_close(activations.attention[layer].sum(-1), torch.ones(3, 2, 25, dtype=torch.float64))
        torch.testing.assert_close(activations.attention[layer], activations.steps[f"blocks.{layer}.weights"])
        groups = [len(rows.unique(dim=0)) for rows in layer_input]
        assert groups == [model.config.layer_tokens[layer]] * 3
    assert model.config.layer_tokens == (20, 20, 16)


def test_look_does_not_change_the_logits_of_a_merging_model():
    model = small(merge=[5, 4, 3], registers=1).float()
    batch_images = images().float()
    activations = vitrail.look(model, batch_images, inside=None)
    assert torch.equal(activations.logits, model(batch_images))
    assert {
        step.shape[1] for name, step in activations.steps.items() if name in ("blocks.0", "blocks.1", "blocks.2")
    } == {26}
    assert [output.shape for output in model.feature_maps(batch_images, layers=None)] == [(3, 16, 4, 6)] * 3


def test_permuting_patches_of_one_board_colour_permutes_the_outputs():
    model = small(position="none", merge=[6, 0, 0])
    generator = torch.Generator().manual_seed(1)
    board = chessboard((4, 6))
    order = torch.empty(24, dtype=torch.long)
    for colour in board.chunk(2):
        order[colour] = colour[torch.randperm(12, generator=generator)]
    flat = patchify(images(), (4, 4))
    activations, permuted = (
        vitrail.look(model, unpatchify(patches, (4, 6), (4, 4))) for patches in (flat, flat[:, order])
    )
    torch.testing.assert_close(activations.logits, permuted.logits)
    torch.testing.assert_close(activations.steps["blocks.0"][:, 1:][:, order], permuted.steps["blocks.0"][:, 1:])


def test_gradients_reach_every_weight_and_every_pixel():
    model = small(merge=[5, 5, 5], pool="gap").train()
    batch_images = images().requires_grad_()
    model(batch_images).square().sum().backward()
    assert (batch_images.grad != 0).all()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_training_with_token_drop_merges_at_most_half_of_the_remaining_patches():
    model = small(merge=12, token_drop=0.5, pool="gap").train()
    assert model.encode(model.embed(images())).shape == (3, 12, 16)
    model.checkpoints_activations = True
    model(images()).sum().backward()


def test_macs_by_arithmetic_equal_the_built_model():
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


def test_invalid_merge_settings_raise_a_one_line_error():
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


def test_bundle_stores_merge_and_conversion_to_other_libraries_is_rejected(tmp_path):
    model = redraw(vitrail.create("ViT-Nano/7", merge=[0, 4, 0, 3]), std=0.05)
    path = bundle_of(model, tmp_path / "bundle")
    assert vitrail.load(path).model.config.merge == (0, 4, 0, 3)
    with pytest.raises(UsageError, match=r"Model must be one that timm has, got merge \(0, 4, 0, 3\)"):
        convert(str(path), tmp_path / "converted", to="timm", images=[np.zeros((28, 28), np.uint8)])


@pytest.mark.parametrize("pool", ["cls", pytest.param("gap", marks=pytest.mark.slow)])
def test_onnx_runtime_equals_torch_at_every_batch_size(pool, tmp_path):
    model = redraw(vitrail.create("ViT-Nano/7", merge=[3, 4, 0, 3], pool=pool, classes=5), std=0.1)
    folder = OnnxEngine.prepare(bundle_of(model, tmp_path / "bundle"), "float32")
    runtime = import_engine_package("onnxruntime", "onnx")
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    batch_images = torch.randn(7, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.eval()(batch_images).numpy()
    for batch in (1, 2, 3, 7):
        logits = session.run(["logits"], {"pixel_values": batch_images[:batch].numpy()})[0]
        assert np.abs(logits - expected[:batch]).max() < 1e-4 * np.abs(expected).max()


def test_inspect_page_explains_that_merged_patches_share_maps(tmp_path):
    pages = []
    for counts in ([0, 4, 0, 3], 0):
        path = bundle_of(redraw(vitrail.create("ViT-Nano/7", merge=counts), std=0.1), tmp_path / f"bundle-{len(pages)}")
        output = tmp_path / f"page-{len(pages)}"
        vitrail.inspect(path, [np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)], output=output)
        pages.append((output / "index.html").read_text(encoding="utf-8"))
    assert ["Merged patches have the same maps" in page for page in pages] == [True, False]


# The search


@pytest.fixture(scope="module")
def curve():
    bundle = vitrail.load("fashion")
    images = open_data("fashion-40").first_split.images[:20]
    reports = []
    return bundle, images, find_merge(bundle, images, 0.05, tell=reports.append), reports


def test_each_search_step_saves_macs_and_keeps_the_tolerance(curve):
    bundle, images, costs, reports = curve
    assert costs[0] == MergeCost((0,) * 5, count_macs(bundle.model.config), 0, 20, 0.0)
    assert len(costs) > 4
    assert all(before.macs > after.macs for before, after in itertools.pairwise(costs))
    assert all(cost.changed <= 1 for cost in costs)
    assert costs[0].macs / costs[-1].macs > 1.5
    assert len(reports) == len(costs) - 1
    assert f"{costs[-1].changed} of 20 predictions changed" in reports[-1]
    # The changed predictions are those of the model with this setting.
    evaluator = MergeEvaluator(bundle, images)
    for cost in (costs[1], costs[-1]):
        assert evaluator.measure(cost.merge) == cost
        classifier = vitrail.Classifier(dataclasses.replace(bundle, model=with_merge(bundle.model, cost.merge)))
        labels = [prediction[0]["label"] for prediction in classifier.predict(images, top_k=1)]
        plain_labels = [prediction[0]["label"] for prediction in vitrail.Classifier(bundle).predict(images, top_k=1)]
        is_changed = [label != plain for label, plain in zip(labels, plain_labels, strict=True)]
        assert sum(is_changed) == cost.changed
    document = costs[-1].to_json()
    assert document["merge"] == list(costs[-1].merge)
    assert document["interval"] == list(wilson_interval(costs[-1].changed, 20))


def test_search_counts_the_macs_of_the_trimmed_last_block():
    """The last block of a model that reads [CLS] computes one token: merging in front of it saves little."""
    plain, late, early = (count_macs(CONFIG.replace(merge=merge)) for merge in (0, [0, 0, 12], [12, 0, 0]))
    assert plain < CONFIG.macs
    assert 0 < plain - late < (plain - early) / 5


def test_search_prefers_sequence_lengths_that_are_fast():
    config = find("ViT-Ti/16")
    first = _merge_more(config, (0,) * 12, 6)
    assert first == (0,) * 6 + (21,) + (0,) * 5
    second = _merge_more(config, first, 4)
    assert config.replace(merge=second).layer_tokens == (197,) * 4 + (176, 176) + (160,) * 6
    merged = (0,) * 4 + (93,) + (0,) * 7
    assert _merge_more(config, merged, 4) is None


def test_invalid_searches_raise_a_one_line_error(curve):
    bundle, images, _, _ = curve
    with pytest.raises(UsageError, match=r"Tolerance must be a number from 0 to 1, got 2"):
        find_merge(bundle, images, 2)
    with pytest.raises(UsageError, match="Images to search on must be at least one"):
        find_merge(bundle, [], 0.1)
    mixer = vitrail.create("Mixer-Nano/7")
    preprocess = vitrail.Preprocess(resolution=28, mean=(0.5,), std=(0.5,))
    with pytest.raises(UsageError, match=r"Merging must have a ViT or hybrid .* got Mixer-Nano/7"):
        find_merge(vitrail.Bundle(model=mixer, preprocess=preprocess), images, 0.1)
