"""Recorded activations as a table."""

import torch

import vitrail


def test_repr_of_activations_is_a_table_of_names_and_shapes():
    model = vitrail.create("ViT-Pico/2", classes=3, depth=2).eval()
    activations = vitrail.look(model, torch.zeros(1, 1, 8, 8), layers=[1])
    assert repr(activations).splitlines() == [
        "step                shape",
        'steps["patches"]    1 x 16 x 4',
        'steps["projected"]  1 x 16 x 48',
        'steps["tokens"]     1 x 17 x 48',
        'steps["blocks.1"]   1 x 17 x 48',
        'steps["pooled"]     1 x 48',
        f"attention[1]        1 x {model.config.heads} x 17 x 17",
        "logits              1 x 3",
    ]
