"""Inductive biases of the families: exact invariances, each with a counterexample, and parity with peers."""

import pytest
import torch

from tests.peers import import_peer, timm_with_weights
from vitrail.bundles.pretrained import create
from vitrail.lab.exact import redraw
from vitrail.lab.permute import move, patch_order, permutation, permute_input_weights
from vitrail.lab.position_measures import influence_matrix
from vitrail.models.convolutions import Projection
from vitrail.models.device import use_channels_last
from vitrail.models.families.lstm.model import sequence_order
from vitrail.models.layers import patchify, unpatchify
from vitrail.models.palette import nearest_colours

DIFFERENT = 1e-2  # least difference of logits, relative to the spread of the logits of different images
EQUAL = 1e-9  # largest difference by rounding in double precision


def make(name, **changes):
    return redraw(create(name, classes=5, **changes).double(), std=0.3)


def random_images(model, count=3):
    return torch.randn(count, model.config.channels, *model.config.resolution, dtype=torch.float64)


def difference(logits, other_logits):
    """Return the largest difference, relative to the spread of the logits of different images."""
    return ((logits - other_logits).abs().max() / (logits - logits.mean(0)).abs().max()).item()


def shuffle_patches(images, order, grid=(4, 4), patch=(7, 7)):
    return unpatchify(patchify(images, patch)[:, order], grid, patch)


def shuffle_within(images, order, grid=(4, 4), patch=(7, 7)):
    return unpatchify(patchify(images, patch)[..., order], grid, patch)


# CNN


@pytest.mark.parametrize("inputs", [1, 3, 7, 8, 9])
def test_gradients_of_strided_shortcuts_with_few_channels_are_exact(inputs):
    """With fewer than eight channels, torch's AVX2 kernel writes beyond the end of its buffer."""
    model = Projection(inputs, 14, 2)
    use_channels_last(model)
    images = torch.randn(64, inputs, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    exact_images, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (images, model.weight))
    for _ in range(20):
        images.grad = model.weight.grad = None
        model(images).square().sum().backward()
    torch.nn.functional.conv2d(exact_images, exact_weight, stride=2).square().sum().backward()
    for gradient, exact in ((images.grad, exact_images.grad), (model.weight.grad, exact_weight.grad)):
        assert (gradient - exact).norm() / exact.norm() < 1e-5


# MLP-Mixer


def test_mixer_weights_can_be_permuted_for_shuffled_patches():
    model = make("Mixer-Nano/7")
    images, order = random_images(model), torch.randperm(16)
    logits, shuffled = model(images), shuffle_patches(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, patch_order(order, (28, 28), (7, 7)))
    assert difference(logits, model(shuffled)) < EQUAL


@pytest.mark.parametrize("name", ["Mixer-Nano/7", "LSTM-Nano/7", "ViT-Nano/7"])
def test_shared_shuffle_within_patches_equals_a_permuted_projection(name):
    model = make(name, channels=3)
    images, order = random_images(model), permutation("within", (28, 28), (7, 7), 0)
    logits, shuffled = model(images), move(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, order)
    assert difference(logits, model(shuffled)) < EQUAL


@pytest.mark.parametrize("name", ["Mixer-Nano/7", "LSTM-Nano/7", "Hybrid-Nano", "iGPT-Micro", "MLP-Nano"])
def test_families_without_translation_bias_are_not_shift_invariant(name):
    model = make(name)
    images = random_images(model)
    assert difference(model(images), model(images.roll(7, 3))) > DIFFERENT


# Convolutional networks


def test_a_circular_cnn_without_strides_is_invariant_to_every_shift():
    model = make("ResNet-Nano", edges="circular", strides=(1, 1, 1))
    images = random_images(model)
    logits = model(images)
    for shift in ((1, 0), (0, 1), (3, 5), (13, 27)):
        assert difference(logits, model(images.roll(shift, (2, 3)))) < EQUAL
    with_edges = make("ResNet-Nano", strides=(1, 1, 1))
    assert difference(with_edges(images), with_edges(images.roll(5, 3))) > DIFFERENT


def test_a_strided_cnn_is_invariant_to_multiples_of_its_stride_alone():
    model = make("ResNet-Nano", edges="circular")
    images = random_images(model)
    logits = model(images)
    assert difference(logits, model(images.roll((4, 8), (2, 3)))) < EQUAL
    assert difference(logits, model(images.roll(1, 3))) > DIFFERENT
    assert difference(logits, model(images.roll(2, 3))) > DIFFERENT


@pytest.mark.parametrize("name", ["ResNet-Nano", "Hybrid-Nano", "LSTM-Nano/7"])
def test_cnn_hybrid_and_lstm_depend_on_neighbourhoods_and_order(name):
    model = make(name)
    images = random_images(model)
    logits = model(images)
    assert difference(logits, model(shuffle_patches(images, torch.randperm(16)))) > DIFFERENT
    assert difference(logits, model(shuffle_within(images, torch.randperm(49)))) > DIFFERENT
    assert difference(logits, model(move(images, torch.randperm(784)))) > DIFFERENT


@pytest.mark.parametrize(
    ("name", "changes"), [("Mixer-Nano/7", {}), ("ViT-Nano/7", {}), ("ViT-Nano/7", {"position": "none"})]
)
def test_patch_models_depend_on_which_pixels_share_a_patch(name, changes):
    """Shuffling all pixels mixes patches, and no permutation of the weights of these models undoes it."""
    model = make(name, **changes)
    images = random_images(model)
    assert difference(model(images), model(move(images, torch.randperm(784)))) > DIFFERENT


# Families without spatial bias


def test_mlp_weights_can_be_permuted_for_any_order_of_pixels():
    model = make("MLP-Nano", width=64, channels=3)
    images, order = random_images(model), torch.randperm(784)
    logits, shuffled = model(images), move(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, order)
    assert difference(logits, model(shuffled)) < EQUAL


def test_igpt_positions_can_be_permuted_for_any_order_of_pixels():
    model = make("iGPT-Micro")
    images, order = random_images(model), torch.randperm(196)
    logits, shuffled = model(images), move(images, order)
    assert difference(logits, model(shuffled)) > DIFFERENT
    assert permute_input_weights(model, order)
    assert difference(logits, model(shuffled)) < EQUAL
    causal = make("iGPT-Micro", causal=True)
    logits = causal(images)
    assert not permute_input_weights(causal, order)
    with torch.no_grad():
        causal.pos_embed.copy_(causal.pos_embed[:, order])
    assert difference(logits, causal(shuffled)) > DIFFERENT


UNSUPPORTED = [
    ("ResNet-Nano", {}, "within"),
    ("Hybrid-Nano", {}, "patches"),
    ("LSTM-Nano/7", {}, "patches"),
    ("Mixer-Nano/7", {}, "pixels"),
    ("Mixer-Nano/7", {"stride": 3}, "within"),
    ("ViT-Nano/7", {}, "pixels"),
    ("ViT-Nano/7", {"position": "sincos-2d"}, "patches"),
    ("ViT-Nano/7", {"position": "none", "attention": "local"}, "patches"),
]


@pytest.mark.parametrize(("name", "changes", "level"), UNSUPPORTED)
def test_unsupported_permutations_leave_the_weights_unchanged(name, changes, level):
    model = make(name, **changes)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert not permute_input_weights(model, permutation(level, (28, 28), (7, 7), 0))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


# Order and causality


@pytest.mark.parametrize("order", ["reversed", "column", "snake", "random", "random-reversed"])
def test_lstm_reads_patches_in_the_configured_order(order):
    plain, ordered = make("LSTM-Nano/7"), make("LSTM-Nano/7", order=order)
    images = random_images(plain)
    assert difference(plain(images), ordered(images)) > DIFFERENT
    sequence = sequence_order(order, (4, 4))
    assert sorted(sequence.tolist()) == list(range(16))
    assert difference(plain(shuffle_patches(images, sequence)), ordered(images)) < EQUAL


def test_sequence_orders_match_hand_computed_orders():
    assert sequence_order("column", (2, 3)).tolist() == [0, 3, 1, 4, 2, 5]
    assert sequence_order("snake", (2, 3)).tolist() == [0, 1, 2, 5, 4, 3]
    assert sequence_order("reversed", (2, 3)).tolist() == [5, 4, 3, 2, 1, 0]
    assert sequence_order("random", (2, 3), 0).tolist() == [3, 5, 2, 4, 1, 0]
    assert sequence_order("random-reversed", (2, 3), 0).tolist() == [0, 1, 4, 2, 5, 3]
    assert sequence_order("random", (4, 4), 1).tolist() != sequence_order("random", (4, 4), 2).tolist()


def test_later_patches_have_exactly_zero_influence_in_causal_families():
    is_earlier = torch.ones(16, 16, dtype=torch.bool).triu()
    assert torch.equal(influence_matrix(make("LSTM-Nano/7"), 1), is_earlier)
    assert influence_matrix(make("LSTM-Nano/7", bidirectional=True), 1).all()
    assert influence_matrix(make("Mixer-Nano/7"), 0).all()
    causal = influence_matrix(make("iGPT-Micro", causal=True, resolution=4), 1)
    assert not causal[~is_earlier].any()
    assert causal.diagonal().all()
    unmasked = influence_matrix(make("iGPT-Micro", resolution=4), 1)
    assert unmasked[~is_earlier].any()


def test_next_pixel_logits_do_not_depend_on_their_own_pixel():
    model = redraw(create("iGPT-Micro", output="pixels", causal=True, classes=16, resolution=5).double())
    images = torch.full((1, 1, 5, 5), -0.9, dtype=torch.float64)
    before = model(images)
    assert before.shape == (1, 25, 16)
    for pixel in range(25):
        changed = images.clone()
        changed.view(-1)[pixel] = 0.9
        moved = (model(changed) - before)[0].abs().amax(-1) > 0
        assert not moved[: pixel + 1].any()
        if pixel < 24:
            assert moved[pixel + 1]


def test_nearest_colours_are_computed_in_full_precision():
    model = create("iGPT-S", depth=1)
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    with torch.autocast("cpu", torch.bfloat16):
        quantised = nearest_colours(images, model.palette)
    assert torch.equal(nearest_colours(images, model.palette), quantised)


def test_igpt_initialisation_equals_the_published_code():
    model = create("iGPT-S", depth=4).requires_grad_(False)
    block = model.blocks[0]
    expected = {block.attn.qkv: 512**-0.5, block.attn.proj: (512 * 4) ** -0.5, block.mlp.fc1: 0.02, block.mlp.fc2: 0.02}
    for linear, std in expected.items():
        assert linear.weight.std() == pytest.approx(std, rel=0.01)


def test_palette_is_saved_with_the_model_and_gives_nearest_colours():
    model = create("iGPT-Micro", channels=3, palette=32)
    images = torch.rand(2, 3, 14, 14) * 2 - 1
    pixels = images.flatten(2).transpose(1, 2)
    assert torch.equal(
        nearest_colours(images, model.palette), torch.cdist(pixels, model.palette.expand(2, -1, -1)).argmin(-1)
    )
    assert "palette" in model.state_dict()
    assert model.palette.abs().max() <= 1
    assert torch.cdist(model.palette, model.palette).fill_diagonal_(9).min() > 0.1


# Parity with peers


@pytest.mark.parametrize(
    "name",
    [
        "R+ViT-Ti/16",
        "R26+ViT-S/32",
        pytest.param("R50+ViT-B/16", marks=pytest.mark.slow),
        "Mixer-S/32",
        pytest.param("Mixer-B/16", marks=pytest.mark.slow),
        "BiT-R50x1",
    ],
)
def test_large_models_equal_timm(name):
    import_peer("timm")
    model = redraw(create(name), std=0.05)
    check_equal(model, timm_with_weights(name, model))


def check_equal(model, peer):
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        ours, theirs = model(images), peer(images)
    assert (ours[0] - ours[1]).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_igpt_equals_transformers():
    transformers = import_peer("transformers")
    model = redraw(create("iGPT-S", depth=3, bias=True), std=0.05)
    peer = transformers.ImageGPTForCausalImageModeling(
        transformers.ImageGPTConfig(n_embd=512, n_layer=3, n_head=8, n_positions=1024, vocab_size=513)
    ).eval()
    tensors = {"transformer.wte.weight": model.colour_embed.weight, "transformer.wpe.weight": model.pos_embed[0]}
    tensors |= {"transformer.ln_f.weight": model.norm.weight, "lm_head.weight": model.head.weight}
    for layer, block in enumerate(model.blocks):
        for theirs, ours in (
            ("attn.c_attn", block.attn.qkv),
            ("attn.c_proj", block.attn.proj),
            ("mlp.c_fc", block.mlp.fc1),
            ("mlp.c_proj", block.mlp.fc2),
        ):
            tensors[f"transformer.h.{layer}.{theirs}.weight"] = ours.weight.T
            tensors[f"transformer.h.{layer}.{theirs}.bias"] = ours.bias
        tensors[f"transformer.h.{layer}.ln_1.weight"] = block.norm1.weight
        tensors[f"transformer.h.{layer}.ln_2.weight"] = block.norm2.weight
    missing, unexpected = peer.load_state_dict({key: value.detach() for key, value in tensors.items()}, strict=False)
    assert not unexpected
    assert not [key for key in missing if not key.endswith(("attn.bias", "attn.masked_bias"))]
    images = torch.rand(1, 3, 32, 32) * 2 - 1
    colours = torch.cat([torch.tensor([[512]]), nearest_colours(images, model.palette)[:, :-1]], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(images), peer(input_ids=colours).logits, rtol=0, atol=1e-4)
