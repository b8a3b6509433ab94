"""Golden numbers: parameters, multiply-accumulates and sequence lengths, by arithmetic and in the built model."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bundles.pretrained import create
from vitrail.core.errors import UsageError
from vitrail.core.settings import pluralise
from vitrail.models.create import build
from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions.learned_2d import Learned2D
from vitrail.models.zoo import find

# Published counts: vision_transformer's models_test, torchvision's and keras-hub's docs; the rest follow from formulas.
PARAMETERS = [
    ("ViT-Ti/16", {}, 5_717_416),
    ("ViT-S/32", {}, 22_878_952),
    ("ViT-S/16", {}, 22_050_664),
    ("ViT-S/8", {}, 22_055_272),
    ("ViT-B/32", {}, 88_224_232),
    ("ViT-B/16", {}, 86_567_656),
    ("ViT-B/8", {}, 86_576_872),
    ("ViT-L/32", {}, 306_535_400),
    ("ViT-L/16", {}, 304_326_632),
    ("ViT-L/14", {}, 304_203_752),
    ("ViT-H/14", {}, 632_045_800),
    ("ViT-g/14", {}, 1_012_611_432),
    ("ViT-G/14", {}, 1_844_440_680),
    ("ViT-S/16", {"pool": "gap"}, 22_049_896),
    ("ViT-S/32", {"pool": "gap"}, 22_878_184),
    ("ViT-B/16", {"pool": "gap"}, 86_566_120),
    ("ViT-B/32", {"pool": "gap"}, 88_222_696),
    ("ViT-B/16", {"resolution": 384}, 86_859_496),
    ("ViT-L/16", {"resolution": 512}, 305_174_504),
    ("ViT-H/14", {"resolution": 518}, 633_470_440),
    ("ViT-B/16", {"classes": 21_843, "representation": "tanh"}, 103_186_515),
    ("ViT-B/16", {"channels": 1}, 86_174_440),
    ("ViT-B/16", {"channels": 13}, 88_533_736),
    ("ViT-B/16", {"classes": 10}, 85_806_346),
    ("R+ViT-Ti/16", {}, 6_337_704),
    ("R26+ViT-S/32", {}, 36_431_912),
    ("R26+ViT-B/32", {}, 101_383_976),
    ("R50+ViT-B/16", {}, 98_659_112),
    ("R50+ViT-L/32", {}, 328_994_856),
    ("Mixer-S/16", {}, 18_528_264),
    ("Mixer-S/32", {}, 19_104_624),
    ("Mixer-B/16", {}, 59_880_472),
    ("Mixer-B/32", {}, 60_293_428),
    ("Mixer-L/16", {}, 208_196_168),
    ("Mixer-L/32", {}, 206_939_264),
    ("Mixer-H/14", {}, 432_350_952),
    ("BiT-R50x1", {}, 25_549_352),
    ("BiT-R101x1", {}, 44_541_480),
    ("BiT-R50x3", {}, 217_319_080),
    ("BiT-R101x3", {}, 387_934_888),
    ("BiT-R152x1", {}, 60_185_128),
    ("BiT-R152x2", {}, 236_335_208),
    ("BiT-R152x4", {}, 936_533_224),
]

# In millions: the counts that torchvision documents, and for other models the same formula.
MEGA_MACS = [
    ("ViT-B/32", {}, 4_409),
    ("ViT-B/16", {}, 17_564),
    ("ViT-B/16", {"resolution": 384}, 55_484),
    ("ViT-L/32", {}, 15_378),
    ("ViT-L/16", {}, 61_555),
    ("ViT-L/16", {"resolution": 512}, 361_986),
    ("ViT-L/16", {"resolution": 384}, 191_066),
    ("ViT-H/14", {}, 167_295),
    ("ViT-H/14", {"resolution": 518}, 1_016_717),
    ("ViT-Ti/16", {}, 1_254),
    ("ViT-S/32", {}, 1_143),
    ("ViT-S/16", {}, 4_599),
    ("ViT-B/8", {}, 78_148),
    ("ViT-g/14", {}, 267_031),
]

TOKENS = [
    ("ViT-B/32", 224, 50),
    ("ViT-B/16", 224, 197),
    ("ViT-H/14", 224, 257),
    ("ViT-B/8", 224, 785),
    ("ViT-B/32", 384, 145),
    ("ViT-B/16", 384, 577),
    ("ViT-L/16", 512, 1025),
    ("ViT-H/14", 518, 1370),
    ("ViT-B/32", 448, 197),
]


@pytest.mark.parametrize(("name", "changes", "parameters"), PARAMETERS)
def test_parameters_are_the_published_counts(name, changes, parameters):
    assert find(name).replace(**changes).parameters == parameters


def test_parameters_without_head_are_the_published_counts():
    for name, parameters in {"ViT-B/16": 85_798_656, "ViT-L/16": 303_301_632, "ViT-H/14": 630_764_800}.items():
        config = find(name)
        assert config.parameters - config.width * 1000 - 1000 == parameters
    for name, parameters in {"iGPT-S": 76_309_504, "iGPT-M": 454_633_472, "iGPT-L": 1_361_464_320}.items():
        config = find(name)
        assert config.parameters - config.width * 512 == parameters


@pytest.mark.parametrize(("name", "changes", "mega_macs"), MEGA_MACS)
def test_macs_are_the_published_counts(name, changes, mega_macs):
    assert round(find(name).replace(**changes).macs / 1e6) == mega_macs


@pytest.mark.parametrize(("name", "resolution", "tokens"), TOKENS)
def test_sequence_lengths(name, resolution, tokens):
    assert find(name).replace(resolution=resolution).tokens == tokens


OPTIONS = [
    *({"position": position} for position in ("none", "learned-2d", "sincos-1d", "sincos-2d", "relative", "rope-2d")),
    *({"position": position, "position_at": "every"} for position in ("learned-1d", "learned-2d", "relative")),
    *({"position": position, "position_at": "shared"} for position in ("learned-1d", "learned-2d", "relative")),
    {"position": "relative", "wrap": True},
    {"pool": "gap", "position": "relative"},
    {"pool": "gap", "registers": 3},
    {"pool": "map"},
    {"registers": 4},
    {"class_position": False},
    {"qkv_bias": False},
    {"layer_scale": 1e-4},
    {"norm": "batch"},
    {"norm_order": "post", "activation": "relu"},
    *({"norm": "none", "activation": "none", "pool": pool} for pool in ("cls", "map")),
    {"residual": False, "attention_scale": 1},
    {"representation": "gelu"},
    {"resolution": (56, 35)},
    {"patch": (7, 14)},
    {"patch": 12, "stride": 8, "padding": 4},
    {"attention": "local"},
    {"attention": "local", "resolution": (84, 98), "registers": 2},
    {"attention": "strided", "resolution": 140, "pool": "gap", "position": "relative"},
]


def meta_model(config):
    with torch.device("meta"):
        return build(config)


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_arithmetic_equals_the_built_model_with_options(changes):
    check_arithmetic(find("ViT-Nano/7").replace(**changes))


def check_arithmetic(config):
    model = meta_model(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters
    images = torch.empty(1, config.channels, *config.resolution, device="meta")
    with FlopCounterMode(display=False) as counter:
        # The literature counts the complete last block; `forward` computes only [CLS] there.
        logits = model.read(model.encode(model.embed(images), all_tokens=True))
    assert counter.get_total_flops() == 2 * config.macs
    assert logits.shape == (1, config.classes)


def test_trimmed_last_block_saves_the_documented_share_of_macs():
    saved_shares = {}
    for name in ("ViT-B/16", "ViT-Nano/7"):
        config = find(name)
        model = meta_model(config)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, config.channels, *config.resolution, device="meta"))
        saved_shares[name] = 1 - counter.get_total_flops() / (2 * config.macs)
    assert saved_shares["ViT-B/16"] == pytest.approx(0.069, abs=5e-4)
    assert saved_shares["ViT-Nano/7"] == pytest.approx(0.176, abs=5e-3)


# Settings with tables, by family.
TABLES = [
    ("ViT-Nano/7", {"position": "sincos-1d"}),
    ("ViT-Nano/7", {"position": "sincos-2d", "pool": "gap"}),
    ("ViT-Nano/7", {"position": "rope-2d"}),
    ("ViT-Nano/7", {"position": "relative", "registers": 2}),
    ("ViT-Nano/7", {"position": "relative", "wrap": True, "attention": "local", "pool": "gap"}),
    ("ViT-Nano/7", {"attention": "strided"}),
    ("Hybrid-Nano", {"attention": "local"}),
    ("iGPT-Micro", {"causal": True}),
    ("LSTM-Nano/7", {"order": "snake"}),
    ("LSTM-Nano/7", {"order": "random"}),
]


@pytest.mark.parametrize(("name", "changes"), TABLES, ids=str)
def test_tables_of_the_model_equal_the_configuration(name, changes):
    check_tables(find(name).replace(**changes))


def check_tables(config):
    """Check that the model makes the tables that its configuration lists, on the meta device as well."""
    tables = build(config).make_tables()
    listed = {name: table and (table.shape, table.size) for name, table in config.tables.items()}
    assert listed == {
        name: None if table is None else (tuple(table.shape), table.numel() * table.element_size())
        for name, table in tables.items()
    }
    model = meta_model(config)
    for name, table in tables.items():
        meta_table = getattr(model, name)
        assert (meta_table is None) == (table is None)
        assert meta_table is None or (meta_table.is_meta and meta_table.shape == table.shape)


class LargestAllocation(TorchDispatchMode):
    """Dispatch mode that records the size in bytes of the largest tensor outside of the meta device."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.size = max(self.size, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize(("name", "changes"), TABLES, ids=str)
def test_building_on_meta_allocates_nothing(name, changes):
    """A bundle's configuration, also with a huge grid, is compared with its weights on the meta device."""
    side = {"vit": 7 * 80, "hybrid": 8 * 80, "igpt": 80, "lstm": 7 * 1000}[find(name).family]
    with LargestAllocation() as allocation:
        meta_model(find(name).replace(**changes, resolution=side))
    assert allocation.size < 100


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Nano/7", {"resolution": 700, "position": "relative", "wrap": True}),
        ("ViT-Nano/7", {"resolution": (7, 65_534), "patch": (7, 1), "attention": "local", "attention_span": 50_000}),
        ("ViT-Nano/7", {"resolution": 7000, "attention": "strided"}),
        ("ViT-Nano/7", {"resolution": 14_000, "position": "sincos-2d"}),
        ("ViT-Nano/7", {"resolution": 16_000, "patch": 1, "position": "rope-2d"}),
        ("iGPT-Micro", {"resolution": 512, "causal": True}),
        ("LSTM-Nano/7", {"resolution": 16_000, "patch": 1, "order": "random"}),
    ],
    ids=str,
)
def test_tables_that_would_fill_the_memory_are_rejected(name, changes):
    with pytest.raises(UsageError, match=r"^Tables of positions and masks must take at most 536,870,912 bytes, got"):
        find(name).replace(**changes)


def test_images_that_would_fill_the_memory_are_rejected():
    with pytest.raises(UsageError, match="must be at most 268,435,456, got 65,536 x 65,536 x 1"):
        find("ViT-Nano/8").replace(resolution=65_536, channels=1)


INVALID = [
    ({"resolution": 225}, "Resolution must divide into whole patches, got height 225 with patch 16. Use 224 or 240."),
    ({"resolution": 8}, "Resolution must be at least one patch, got height 8 with patch 16."),
    ({"resolution": (224, 225)}, "got width 225"),
    ({"resolution": -224}, "Resolution must be an integer from 1 to 65,536, got -224."),
    ({"resolution": "big"}, "Resolution must be an integer or a pair"),
    ({"resolution": (1, 2, 3)}, "Resolution must be an integer or a pair"),
    ({"heads": 7}, "Width must be a multiple of heads, got width 768 with 7 heads."),
    ({"heads": 0}, "Heads must be an integer from 1"),
    ({"classes": -1}, "Classes must be an integer from 0"),
    ({"classes": 10**12}, "Classes must be an integer from 0"),
    ({"classes": True}, "Classes must be an integer"),
    ({"classes": 10.0}, "Classes must be an integer"),
    ({"depth": 10**9}, "Depth must be an integer from 1 to 1,000"),
    ({"channels": -3}, "Channels must be"),
    ({"pool": "clss"}, "Pool must be one of cls, gap, map, got 'clss'. Did you mean 'cls'?"),
    ({"position": "learned"}, "Position must be one of none, learned-1d"),
    ({"position": "rope-2d", "heads": 384}, "Width / heads must be a multiple of 4"),
    ({"position": "rope-2d", "position_at": "once"}, "Position at must be every for position rope-2d, got 'once'."),
    ({"position": "relative", "position_at": "once"}, "Position at must be every or shared"),
    ({"position": "sincos-2d", "width": 6, "heads": 2}, "Width must be a multiple of 4 for position sincos-2d, got 6."),
    ({"wrap": True}, "Wrap must go with position relative or rope-2d"),
    ({"wrap": True, "position": "relative", "attention": "strided"}, "Wrap must go with attention global or local"),
    ({"wrap": True, "position": "relative", "padding": 8}, "others are not shift-invariant at the edges"),
    ({"padding": 16}, "Padding must be smaller than the patch (16, 16), got (16, 16)"),
    ({"residual": False, "drop_path": 0.1}, "Drop path must be 0 without residual connections"),
    ({"residual": 1}, "Residual must be"),
    ({"attention_scale": -1}, "Attention scale must be"),
    ({"attention_span": 3}, "Attention span must go with attention local or strided"),
    ({"dropout": 1.0}, "Dropout must be a number of at least 0 and below 1, got 1.0."),
    ({"norm_epsilon": float("nan")}, "Norm epsilon must be a number"),
    ({"qkv_bias": "yes"}, "Qkv bias must be true or false, got 'yes'."),
    ({"widht": 3}, "got 'widht'. Did you mean 'width'?"),
]


def test_wrap_error_lists_the_positions_of_the_registry(monkeypatch):
    monkeypatch.setattr(Learned2D, "can_wrap", True)
    with pytest.raises(
        UsageError, match="Wrap must go with position learned-2d or relative or rope-2d, got position none"
    ):
        create("ViT-B/16", wrap=True, position="none")


@pytest.mark.parametrize(("changes", "message"), INVALID, ids=lambda value: str(value)[:40])
def test_invalid_settings_raise_a_one_line_error(changes, message):
    with pytest.raises(UsageError) as error:
        create("ViT-B/16", **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("vit-b/16", "ViT-B/16"),
        ("ViT-B16", "ViT-B/16"),
        ("google/vit-base-patch16-224", "ViT-B/16"),
        ("ViT-Nan/7", "ViT-Nano/7"),
        ("vit_giant_patch14", "ViT-g/14"),
        ("vit_gigantic_patch14", "ViT-G/14"),
    ],
)
def test_unknown_names_get_a_suggestion(name, suggestion):
    with pytest.raises(UsageError, match=f"Did you mean '{suggestion}'"):
        create(name)


def test_json_round_trip_rejects_unknown_fields():
    config = ViTConfig(resolution=(32, 64), stride=(8, 8), position="rope-2d", layer_scale=0.1)
    fields = config.to_json()
    assert ViTConfig.from_json(fields) == config
    with pytest.raises(UsageError, match="unknown fields: colour"):
        ViTConfig.from_json({**fields, "colour": 1})
    with pytest.raises(UsageError, match="must be a JSON object, got list"):
        ViTConfig.from_json([fields])


def test_pluralise_agrees_with_the_count():
    assert [pluralise(count, "step") for count in (0, 1, 1.0, 0.182, 1200)] == [
        "0 steps",
        "1 step",
        "1 step",
        "0.182 steps",
        "1,200 steps",
    ]
