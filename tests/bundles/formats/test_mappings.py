"""State-dict mappings of the model families, for every weight format."""

import pytest
import torch

from vitrail.bundles.formats.base import split_tensors
from vitrail.bundles.formats.registry import FORMATS
from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.core.registry import load_object
from vitrail.lab.exact import redraw
from vitrail.models.families import FAMILIES

MODELS = {
    "vit": ("ViT-Pico/2", {}),
    "hybrid": ("R26+ViT-S/32", {"depth": 1, "resolution": 32}),
    "resnet": ("BiT-R50x1", {"layers": (1, 1), "base": 32}),
    "mixer": ("Mixer-Pico/2", {}),
}
# Formats of models without a head.
FEATURES = {"dino": {"classes": 0}, "clip": {"classes": 0, "embedding_norm": True, "patch_bias": False}}
PAIRS = [(family, name) for family in MODELS for name in load_object(FAMILIES[family].weights)]


def test_every_state_dict_mapping_belongs_to_a_weight_format():
    with_weights = [family for family in FAMILIES if FAMILIES[family].weights]
    assert with_weights == list(MODELS)
    assert {name for _, name in PAIRS} == set(FORMATS)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_entries_cover_every_tensor_once_and_joining_inverts_splitting(family, name):
    model, settings = MODELS[family]
    settings = {"classes": 5, **settings, **FEATURES.get(name, {})}
    model = redraw(create(model, **settings), std=0.1)
    tensors = model.state_dict()
    entries = list(FORMATS[name](name).entries(model.config))
    assert [entry.ours for entry in entries] == list(tensors)
    theirs = split_tensors(entries, tensors)
    assert len(theirs) == sum(len(entry.theirs) for entry in entries)
    for entry in entries:
        assert torch.equal(entry.join([theirs[part] for part in entry.theirs]), tensors[entry.ours])


def test_a_family_that_a_library_lacks_is_refused():
    config = create("MLP-Pico").config
    for name, library in (("google", "Google's code"), ("huggingface", "transformers"), ("timm", "timm")):
        with pytest.raises(UsageError, match=f"^Model must be one that {library} has, got family mlp.$"):
            FORMATS[name](name).entries(config)
