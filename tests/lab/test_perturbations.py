"""The lab's measures compared with exact and published values."""

import math

import numpy as np
import pytest
import torch

from vitrail.analysis.heads import measure_heads
from vitrail.bundles.pretrained import create
from vitrail.lab import internals, perturbations
from vitrail.lab.exact import redraw
from vitrail.lab.measurements import MeasuredValues
from vitrail.lab.perturbations import PerturbedPredictions
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.models.base import Layout


def test_shift_moves_every_pixel_and_mirrors_the_border():
    image = torch.arange(25.0).view(1, 1, 5, 5)
    moved = perturbations.shift(image, np.array([1]), np.array([-2]))
    assert torch.equal(moved[0, 0, 1:, :3], image[0, 0, :4, 2:])
    assert moved[0, 0, 0, 0] == image[0, 0, 1, 2]  # mirrored without repeating the border
    assert moved[0, 0, 1, 4] == image[0, 0, 0, 2]
    assert torch.equal(perturbations.shift(image, np.array([0]), np.array([0])), image)


def test_ring_shift_draws_every_shift_of_its_distance_and_no_other():
    spot = torch.zeros(4000, 1, 9, 9)
    spot[:, :, 4, 4] = 1
    moved = perturbations.ring_shift(2)(spot, np.arange(4000))
    _, _, rows, columns = moved.nonzero(as_tuple=True)
    shifts, counts = np.unique(np.stack([rows - 4, columns - 4], axis=1), axis=0, return_counts=True)
    assert len(shifts) == 16
    assert (np.abs(shifts).max(axis=1) == 2).all()
    assert counts.min() > 190  # 250 of each
    assert perturbations.shift_distances(28) == (1, 2, 3, 4)
    assert perturbations.shift_distances(224) == (8, 16, 24, 32)
    assert perturbations.shift_distances(8) == (1,)


def test_shuffle_keeps_blocks_whole_and_differs_between_images():
    image = torch.arange(64.0).view(1, 1, 8, 8).expand(5, 1, 8, 8).contiguous()
    moved = perturbations.shuffle((2, 2))(image, np.arange(5))
    last_two = perturbations.shuffle((2, 2))(image[3:], np.arange(3, 5))
    assert torch.equal(last_two, moved[3:])  # independent of the batch
    corners = moved[:, 0, ::4, ::4].flatten(1).long()
    assert all(sorted(row.tolist()) == [0, 4, 32, 36] for row in corners)
    assert len({tuple(row.tolist()) for row in corners}) > 1
    assert torch.equal(moved[:, 0, 1::4, 2::4], moved[:, 0, ::4, ::4] + 10)
    assert perturbations.shuffle_grids((28, 28)) == [(2, 2), (4, 4), (7, 7), (14, 14)]
    assert perturbations.shuffle_grids((224, 224), (32, 32)) == [(2, 2), (4, 4), (8, 8), (16, 16)]


def test_drop_removes_its_exact_share_and_larger_shares_contain_smaller():
    images = torch.rand(3, 2, 8, 8)
    few, many = (perturbations.drop(share, (4, 4))(images, np.arange(3)) for share in (0.25, 0.75))
    is_dropped = [(mask != images).any(1) for mask in (few, many)]
    assert [mask.sum(dim=(1, 2)).tolist() for mask in is_dropped] == [[16] * 3, [48] * 3]
    assert (is_dropped[1] | ~is_dropped[0]).all()
    assert few[0][:, is_dropped[0][0]][:, 0].tolist() == pytest.approx(images[0].mean(dim=(1, 2)).tolist())


def test_low_pass_and_high_pass_add_up_to_the_image():
    images = torch.randn(2, 3, 12, 10)
    numbers = np.arange(2)
    mean = images.mean(dim=(2, 3), keepdim=True)
    low, high = perturbations.low_pass(0.4)(images, numbers), perturbations.high_pass(0.4)(images, numbers)
    assert torch.allclose(low + high - mean, images, atol=1e-5)
    assert torch.allclose(perturbations.low_pass(1.5)(images, numbers), images, atol=1e-5)
    wave = (
        torch.sin(torch.arange(12) * math.pi / 2 + 0.3).view(1, 1, 1, 12).expand(1, 1, 12, 12)
    )  # half of the highest frequency
    assert torch.allclose(perturbations.low_pass(0.51)(wave, numbers[:1]), wave, atol=1e-5)
    assert perturbations.low_pass(0.49)(wave, numbers[:1]).abs().max() < 1e-5


def test_linearised_ratio_has_the_error_of_the_bootstrap():
    right = np.array([1, 1, 1, 0, 0, 1, 1, 1], float)
    same = np.array([1, 0, 1, 1, 0, 1, 1, 0.5]) * right
    values = perturbations.linearised_ratio(same, right)
    estimate = perturbations.mean_of(values)
    assert estimate.value == pytest.approx(4.5 / 6)
    samples = np.random.default_rng(0).integers(8, size=(20_000, 8))
    samples = samples[right[samples].sum(1) > 2]
    spread = np.std(same[samples].sum(1) / right[samples].sum(1))
    assert estimate.error == pytest.approx(spread, rel=0.25)
    predictions = {
        "shift 1 0": PerturbedPredictions(right > 0, same > 0.4),
        "shift 2 0": PerturbedPredictions(right > 0, np.zeros(8, bool)),
    }
    assert perturbations.shift_values(predictions, right > 0)["consistency"].mean() == pytest.approx(0.5 * 5 / 6)
    assert perturbations.shift_values(predictions, right > 0, 2)["consistency"].mean() == pytest.approx(0)
    assert (
        PerturbedPredictions.from_json(predictions["shift 1 0"].to_json(), 8).same.tolist()
        == predictions["shift 1 0"].same.tolist()
    )


# Exact values


@pytest.mark.parametrize(
    ("grid", "step", "uniform", "box"),
    [((14, 14), 16, 116.4922, 16.6981), ((7, 7), 4, 14.4379, 4.0544), ((4, 4), 7, 14.0561, 6.7714)],
)
def test_attention_distances_match_exact_values(grid, step, uniform, box):
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    near = (np.abs(rows[:, None] - rows) <= 1) & (np.abs(columns[:, None] - columns) <= 1)
    attention = np.stack([np.ones_like(near, float), near.astype(float)])
    attention /= attention.sum(axis=2, keepdims=True)
    measured = measure_heads(attention[None], Layout(grid, (step, step), 0, "mean"))
    assert measured.distance[0].tolist() == pytest.approx([uniform, box], abs=5e-5)
    assert measured.of_uniform[0, 0] == pytest.approx(1)


def test_untrained_attention_is_near_uniform_and_cnn_has_no_heads():
    images = torch.randn(3, 1, 28, 28)
    distances = internals.head_distances(create("ViT-Micro/4"), images)
    assert {layer: layer_distances.shape for layer, layer_distances in distances.items()} == dict.fromkeys(
        range(6), (3, 4)
    )
    assert all(abs(layer_distances.mean() - 1) < 0.1 for layer_distances in distances.values())
    assert internals.head_distances(create("ResNet-Nano"), images) == {}


def test_equivariance_error_of_patches_and_circular_convolutions_is_zero():
    images = torch.randn(6, 1, 28, 28, dtype=torch.float64)
    patches = redraw(create("ViT-Nano/7", position="none", depth=1).double())
    errors = internals.equivariance_errors(patches, images, [1, 4, 7])
    assert errors["blocks.0"][7].max() < 1e-12
    assert errors["pooled"][7].max() < 1e-12
    assert errors["blocks.0"][1].min() > 0.1
    positions = internals.equivariance_errors(redraw(create("ViT-Nano/7", depth=1).double()), images, [7])
    assert positions["blocks.0"][7].min() > 1e-3
    circular = redraw(create("ResNet-Nano", edges="circular", strides=(1, 1, 1)).double())
    errors = internals.equivariance_errors(circular, images, [1, 5])
    assert set(errors) == {"blocks.0", "blocks.1", "blocks.2", "pooled"}
    assert max(values.max() for layer in errors.values() for values in layer.values()) < 1e-12
    strided = internals.equivariance_errors(redraw(create("ResNet-Nano", edges="circular").double()), images, [1, 4])
    assert strided["blocks.2"][4].max() < 1e-12
    assert strided["blocks.2"][1].min() > 1e-3


def test_equivariance_error_of_unrelated_images_is_one(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def unrelated(_model, images):
        return {"pooled": 3 + 5 * torch.randn(len(images), 8, 1, 1, generator=generator, dtype=torch.float64)}

    monkeypatch.setattr(internals, "_layer_maps", unrelated)
    errors = internals.equivariance_errors(create("ViT-Pico/2"), torch.zeros(2000, 1, 8, 8), [1])
    assert errors["pooled"][1].mean() == pytest.approx(1, abs=0.03)


def test_features_shifted_by_a_fraction_are_interpolated():
    rolled = internals._roll(torch.arange(6.0).view(1, 1, 1, 6), 1.5, 3)
    assert rolled.flatten().tolist() == [4.5, 2.5, 0.5, 1.5, 2.5, 3.5]
    model = redraw(create("ViT-Pico/2", patch=1, position="none", depth=1, resolution=16).double())
    images = torch.randn(8, 1, 16, 16, dtype=torch.float64)
    assert internals.equivariance_errors(model, images, [1])["blocks.0"][1].max() < 1e-12


def test_receptive_area_matches_a_convolution():
    model = create("ResNet-Nano", resolution=29, edges="circular").eval()
    areas = internals.receptive_areas(model, torch.randn(2, 1, 29, 29), [0], share=1.0)
    assert areas[0].tolist() == pytest.approx([(7 / 29) ** 2] * 2)  # three 3 x 3 convolutions
    assert [internals.third_layer(depth) for depth in (1, 3, 4, 5, 6, 12)] == [0, 0, 0, 1, 1, 3]


def test_layer_similarity_has_a_jackknife_error():
    torch.manual_seed(0)
    model = create("ViT-Nano/7")
    similarity = internals.layer_similarity(model, torch.randn(64, 1, 28, 28))
    assert np.diag(similarity.table) == pytest.approx(1)
    estimate = similarity.estimate()
    assert 0 < estimate.value <= 1
    assert estimate.freedom == 3
    assert internals.layer_similarity(model, torch.randn(20, 1, 28, 28)) is None
    estimate = internals.jackknife(2.0, np.array([1.0, 2.0, 3.0]))
    assert estimate.error == pytest.approx(np.std([-1, 0, 1], ddof=1) * 2 / math.sqrt(3))


def test_calibration_error_of_a_calibrated_and_an_overconfident_model():
    generator = np.random.default_rng(0)
    confidences = generator.uniform(0.5, 1, 2000)
    probabilities = np.stack([confidences, 1 - confidences], axis=1)
    calibrated = perturbations.measure_calibration(probabilities, generator.uniform(size=2000) < confidences, draws=50)
    assert calibrated.error.value < 2 * calibrated.expected_error
    overconfident = perturbations.measure_calibration(
        probabilities, generator.uniform(size=2000) < confidences - 0.2, draws=50
    )
    assert overconfident.error.value == pytest.approx(0.2, abs=0.03)
    assert overconfident.error.interval()[0] > overconfident.expected_error
    assert perturbations.mean_of(overconfident.overconfidence).value == pytest.approx(0.2, abs=0.03)


def test_predict_perturbed_compares_images_in_order():
    model = redraw(create("ViT-Pico/2"))
    images = torch.randn(40, 1, 8, 8)
    plain = perturbations.predict_probabilities(model, images).argmax(axis=1)
    by_name = {"none": lambda images, _: images, "negative": lambda images, _: -images}
    predictions = dict(perturbations.predict_perturbed(model, images, plain, by_name, plain=plain))
    assert predictions["none"].right.all()
    assert predictions["none"].same.all()
    assert 0 < predictions["negative"].same.mean() < 1


def test_measured_values_are_paired_by_seed(tmp_path):
    """Noise that two variants share does not count, nor do seeds that one of them lacks."""
    results = Results(tmp_path / "results.jsonl", "x")
    groups = {name: [Trial(name, {"seed": seed}) for seed in range(5)] for name in "ab"}
    for name, trials in groups.items():
        for seed, trial in enumerate(trials[: 4 if name == "a" else 5]):
            value = (name == "a") + seed + (0.01 * (-1) ** seed if name == "a" else 0)
            values = (value + np.array([-0.001, 0.001] * 50)).tolist()
            results.add({"key": trial.trial_id("x"), "cell": trial.to_json(), "result": {"v": values}, "measured": {}})
    measured = MeasuredValues(results, groups, lambda result: result["v"])
    difference = measured.difference("a", "b")
    assert (difference.value, difference.freedom) == (pytest.approx(1), 3)
    assert difference.error == pytest.approx(0.01 / math.sqrt(3))
    assert measured.difference("a", "c") is None
    assert measured.estimate("b").value == pytest.approx(2)
    assert measured.seeds == "4-5"
