"""Faces: embeddings, margins against a reference in double precision, people who are strangers, alignment, training."""

import json
import math
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.core.errors import UsageError
from vitrail.faces import face_training
from vitrail.faces.align import SIDE, TEMPLATE, align, read_landmarks, similarity
from vitrail.faces.embed import Aligner
from vitrail.faces.face_training import train_faces
from vitrail.faces.people import split_people
from vitrail.faces.probe import mean_embeddings, set_embedding, whiten_within
from vitrail.faces.recognition import evaluate
from vitrail.inference.registry import ENGINES
from vitrail.models.surgery import surgery_of
from vitrail.models.zoo import find
from vitrail.training.margin_settings import MarginSettings, adacos_scale
from vitrail.training.objectives.margin import margin_logits, with_margin
from vitrail.training.options import Options
from vitrail.training.recipe import change_recipe, find_recipe

MARGINS = {
    "cosface": MarginSettings(cosine=0.35),
    "arcface": MarginSettings(cosine=0, angle=0.5),
    "combined": MarginSettings(cosine=0.1, angle=0.3, factor=1.2),
    "sphereface": MarginSettings(cosine=0, factor=4),
    "far": MarginSettings(cosine=0, angle=1.5, factor=1.9),
}


def reference(cosine, margin):
    """The formulas as papers write them, in double precision."""
    angle = np.arccos(np.clip(cosine, -1, 1))
    turned = margin.factor * angle + margin.angle
    if margin.factor == 1:
        arcface = cosine - margin.angle * math.sin(margin.angle)
        return np.where(turned <= math.pi, np.cos(turned), arcface) - margin.cosine
    found = np.cos(turned)
    for half in range(1, 6):  # SphereFace: (-1)^k cos - 2 k in the k-th half turn
        found = np.where(turned > half * math.pi, (-1) ** half * np.cos(turned) - 2 * half, found)
    return found - margin.cosine


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_margins_equal_their_formulas(name, dtype, tolerance):
    margin = MARGINS[name]
    cosine = torch.linspace(-1, 1, 4001, dtype=dtype)
    cosine = torch.cat([cosine, torch.tensor([1 - 1e-6, -1 + 1e-6, 1 - 3e-7], dtype=dtype)])
    plain = cosine.double().numpy()
    turned = margin.factor * np.arccos(plain) + margin.angle
    # At half a turn ArcFace jumps, as published; others have a corner there.
    is_clear = np.abs(turned / math.pi - (turned / math.pi).round()) > 1e-5
    difference = np.abs(with_margin(cosine, margin).double().numpy() - reference(plain, margin))
    assert is_clear.sum() > 3990
    assert difference[is_clear].max() < tolerance
    # The nearer an image is to its person, the larger the logit.
    falling = with_margin(torch.cos(torch.linspace(0, math.pi, 2001, dtype=torch.float64)), margin)
    assert falling.diff().max() < (0.2 if name == "arcface" else 1e-12)


@pytest.mark.parametrize("name", MARGINS)
def test_gradients_are_finite_where_the_angle_is_zero_or_half_a_turn(name):
    cosine = torch.tensor([1.0, -1.0, 0.3, 1 - 1e-7, -1 + 1e-7], requires_grad=True)
    with_margin(cosine, MARGINS[name]).sum().backward()
    assert cosine.grad.isfinite().all()
    assert cosine.grad[2] > 0


def test_margin_and_scale_rise_over_the_warm_up():
    cosine, labels = torch.full((2, 5), 0.5), torch.tensor([1, 3])
    margin = MarginSettings(cosine=0.4, scale=64, warmup=0.5)
    first = adacos_scale(5)
    assert first == pytest.approx(math.sqrt(2) * math.log(4))
    for progress, share in ((0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (1.0, 1.0)):
        logits = margin_logits(cosine, labels, margin, torch.tensor(progress))
        scale = first + (64 - first) * share
        assert logits[0, 0].item() == pytest.approx(0.5 * scale, rel=1e-6)
        assert logits[0, 1].item() == pytest.approx((0.5 - 0.4 * share) * scale, rel=1e-6)
    assert margin_logits(cosine, labels, MarginSettings(warmup=0), torch.tensor(0.0))[0, 1].item() < 0.5 * first


def test_face_models_cover_every_pixel_and_have_an_embedding():
    for name, width, parameters in (("FaceViT-Nano", 96, None), ("FaceViT-Ti", 192, None)):
        config = find(name)
        assert (config.grid, config.tokens, config.embedding, config.width) == ((14, 14), 197, 512, width)
        model = vitrail.create(name)
        assert sum(parameter.numel() for parameter in model.parameters()) == config.parameters
        assert parameters is None or config.parameters == parameters
    images = torch.zeros(2, 3, 112, 112, requires_grad=True)
    model.eval()(images).square().sum().backward()
    assert model(images).shape == (2, 512)
    assert (images.grad.abs().sum(dim=(0, 1)) > 0).all()  # every pixel counts
    for stride, patch, padding in ((8, 12, 4), (9, 9, 0)):  # as published, pixels are lost
        with pytest.raises(UsageError, match="whole patches"):
            vitrail.create(name, stride=stride, patch=patch, padding=padding)


FAMILIES = ["ViT-Nano/7", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "MLP-Nano", "Hybrid-Nano"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_may_have_an_embedding(name, tmp_path):
    model = vitrail.create(name, classes=0, embedding=24)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters
    images = torch.randn(4, 1, 28, 28)
    for _ in range(3):
        assert model(images).shape == (4, 24)  # moves the running statistics
    assert model(images[:1]).isfinite().all()  # one image in training mode
    model.eval()
    preprocess = vitrail.Preprocess(resolution=28, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bundle")
    assert torch.equal(vitrail.load(tmp_path / "bundle").model(images), model(images))
    pixels = [np.random.default_rng(n).integers(0, 255, (28, 28), np.uint8) for n in range(3)]
    if name == "ViT-Nano/7":  # batches of any size on the other engine
        with ENGINES["onnx"].open(tmp_path / "bundle", None).running(None) as run:
            for count in (1, 3):
                found = run(np.stack(pixels[:count])[..., None]).logits
                expected = model(preprocess(pixels[:count])).detach().numpy()
                assert np.abs(found - expected).max() < 1e-4
    model.reset_classifier(3)
    assert (model.config.classes, model.config.embedding, model(images).shape) == (3, 0, (4, 3))
    with pytest.raises(UsageError, match="classes 0"):
        vitrail.create(name, embedding=24)


# People


def write_people(root, people=8, images=4, size=(112, 112), seed=0):
    """Faces of a kind: each person is a pattern of their own, each image a noisy copy."""
    rng = np.random.default_rng(seed)
    for person in range(people):
        folder = root / f"person-{person:02d}"
        folder.mkdir(parents=True)
        pattern = rng.integers(0, 256, (7, 7))
        for number in range(images):
            pixels = np.kron(pattern, np.ones((16, 16))) + rng.normal(0, 12, (112, 112))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize(size).save(folder / f"{number}.png")
    return root


def test_people_of_two_splits_are_strangers(tmp_path):
    root = write_people(tmp_path / "faces", people=10, images=2)
    dataset, held_out, notes = split_people(root, people=None, test=0.3, validation=0.3, seed=1)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 10, "val": 4, "test": 6}
    assert notes == ["people: 5 to train on, 2 held out, 3 for the test; none is in two"]
    folders = {name: {path.split("/")[-2] for path in split.images} for name, split in dataset.splits.items()}
    assert folders["val"] == set(held_out)
    assert not folders["train"] & folders["val"]
    assert not folders["train"] & folders["test"]
    assert not folders["val"] & folders["test"]
    assert sorted(folders["train"]) == list(dataset.labels)
    labels = [set(split.labels.tolist()) for split in dataset.splits.values()]
    assert labels == [{0, 1, 2, 3, 4}, {5, 6}, {7, 8, 9}]
    again, *_ = split_people(root, people=None, test=0.3, validation=0.3, seed=1)
    assert again.fingerprint() == dataset.fingerprint()
    other, *_ = split_people(root, people=None, test=0.3, validation=0.3, seed=2)
    assert other.fingerprint() != dataset.fingerprint()


def test_a_person_in_two_spellings_of_unicode_is_one(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=2)
    for folder, form in (("person-00", "NFC"), ("person-01", "NFD")):
        (root / folder).rename(root / unicodedata.normalize(form, "김한글"))
    for seed in range(6):  # in no draw on both sides
        dataset, _, notes = split_people(root, people=None, test=0.4, validation=0, seed=seed)
        folders = {
            name: {unicodedata.normalize("NFC", path.split("/")[-2]) for path in split.images}
            for name, split in dataset.splits.items()
        }
        assert not folders["train"] & folders["test"]
        assert notes == ["people: 4 to train on, 0 held out, 3 for the test; none is in two"]
        assert "names that are another one in a second spelling of Unicode: 1 of 8" in dataset.notes
    (tmp_path / "people.txt").write_text("김한글\nperson-02\n", encoding="utf-8")
    dataset, *_ = split_people(root, people=tmp_path / "people.txt", test=0, validation=0, seed=0)
    assert dataset.labels == ("person-02", "김한글")
    assert np.bincount(dataset.splits["train"].labels).tolist() == [2, 4]


def test_a_file_may_name_the_people_to_train_on(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=2)
    file = tmp_path / "people.txt"
    file.write_text("person-01\nperson-04\nperson-05\n")
    dataset, *_ = split_people(root, people=file, test=0.5, validation=0, seed=0)
    assert dataset.labels == ("person-01", "person-04", "person-05")
    assert {path.split("/")[-2] for path in dataset.splits["test"].images} == {"person-00", "person-02", "person-03"}
    for text, words in (
        ("person-01\nperson-9\n", "got 'person-9'"),
        ("person-01\nperson-01\n", "twice"),
        ("person-01\n", "at least 2, got 1 of 6"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            split_people(root, people=file, test=0.5, validation=0, seed=0)
    for share in (math.nan, math.inf, -0.5):
        with pytest.raises(UsageError, match="Test must be a number from 0"):
            split_people(root, people=None, test=share, validation=0, seed=0)
    with pytest.raises(UsageError, match="file that exists"):
        split_people(root, people=tmp_path / "none.txt", test=0.5, validation=0, seed=0)


# Alignment


def test_five_points_find_their_way_to_the_template():
    turn, shift, size = 0.4, np.array([31.0, -12.0]), 1.7
    rotation = size * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = (TEMPLATE - TEMPLATE.mean(0)) @ rotation.T + TEMPLATE.mean(0) + shift
    matrix = similarity(points)
    np.testing.assert_allclose(points @ matrix[:, :2].T + matrix[:, 2], TEMPLATE, atol=1e-9)
    # Least squares: with noise no other similarity is nearer.
    noisy = points + np.random.default_rng(0).normal(0, 2, points.shape)
    best = similarity(noisy)
    error = ((noisy @ best[:, :2].T + best[:, 2] - TEMPLATE) ** 2).sum()
    for number in range(20):
        change = np.random.default_rng(number).normal(0, 0.01, 4)
        other = best + np.array([[change[0], -change[1], change[2]], [change[1], change[0], change[3]]])
        assert ((noisy @ other[:, :2].T + other[:, 2] - TEMPLATE) ** 2).sum() > error
    with pytest.raises(UsageError, match="same point"):
        similarity(np.ones((5, 2)))
    # A face from the side fits; left and right as the person has them, or eyes below the mouth, do not.
    profile = TEMPLATE * [0.1, 1] + [[0, 0], [0, 0], [15, 0], [0, 0], [0, 0]]
    assert similarity(profile).shape == (2, 3)
    for order in ([1, 0, 2, 4, 3], [3, 4, 2, 0, 1]):
        with pytest.raises(UsageError, match="no face in this order"):
            similarity(points[order])


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_an_aligned_face_has_its_marks_at_the_template(size):
    """Five dots at turned and scaled landmarks end at the template's places."""
    turn = -0.3
    rotation = size * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = (TEMPLATE - 56) @ rotation.T + 300
    y, x = np.mgrid[:600, :600]
    dots = sum(np.exp(-((x - px) ** 2 + (y - py) ** 2) / (2 * (2 * size) ** 2)) for px, py in points)
    face = np.asarray(align(Image.fromarray((255 * dots).clip(0, 255).astype(np.uint8)), points), float)
    assert face.shape == (SIDE, SIDE)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for px, py in TEMPLATE:
        near = np.where((columns - px) ** 2 + (rows - py) ** 2 < 36, face, 0)
        found = [(columns * near).sum() / near.sum(), (rows * near).sum() / near.sum()]
        np.testing.assert_allclose(found, [px, py], atol=0.1)


def test_landmarks_are_read_from_csv_and_json_and_refused_in_one_line(tmp_path):
    header = "file,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5\n"
    table, document = tmp_path / "marks.csv", tmp_path / "marks.json"
    table.write_text(header + "a/1.png," + ",".join(map(str, TEMPLATE.ravel())) + "\n")
    document.write_text(json.dumps({"a/1.png": TEMPLATE.tolist()}))
    for path in (table, document):
        np.testing.assert_array_equal(read_landmarks(path)["a/1.png"], TEMPLATE)
    marks = dict.fromkeys(("./b//1.png", unicodedata.normalize("NFD", "한/é.png"), "c/x/../A.png"), TEMPLATE.tolist())
    document.write_text(json.dumps(marks))
    assert list(read_landmarks(document)) == ["b/1.png", unicodedata.normalize("NFC", "한/é.png"), "c/A.png"]
    aligner, image = Aligner(document, [str(tmp_path)]), Image.new("L", (112, 112))
    for name in ("b/1.png", "한/é.png", "./c/A.png"):
        aligner(image, str(tmp_path / unicodedata.normalize("NFD", name)))
    with pytest.raises(UsageError, match=r"got none for 'c/a\.png'"):  # capitals are told apart
        aligner(image, str(tmp_path / "c" / "a.png"))
    for text, words in (
        (header + "a/b" + ",1" * 10 + "\n./a/b" + ",1" * 10 + "\n", "has './a/b' twice"),
        ("file,x\n", "header"),
        (header + "a,1,2\n", "five points"),
        (header + "a" + ",nan" * 10 + "\n", "finite"),
        (header + 2 * ("a" + ",1" * 10 + "\n"), "twice"),
    ):
        table.write_text(text)
        with pytest.raises(vitrail.core.errors.VitrailError, match=words):
            read_landmarks(table)


# The embedding before training


def spread_people(people=12, images=30, width=8, seed=0):
    """Features of people who differ in two directions, and whose images differ much more in a third."""
    rng = np.random.default_rng(seed)
    centres = np.zeros((people, width))
    centres[:, :2] = rng.normal(0, 1, (people, 2))
    noise = rng.normal(0, 0.1, (people, images, width))
    noise[:, :, 2] *= 10
    return (3 + centres[:, None] + noise).reshape(-1, width), np.repeat(np.arange(people), images)


@pytest.mark.parametrize("width", [5, 8, 32])
def test_whitening_makes_differences_within_people_equal_and_keeps_those_between_them(width):
    features, people = spread_people()
    mean, matrix = whiten_within(features, people, width, seed=0)
    assert matrix.shape == (8, width)
    white = (features - mean) @ matrix
    means = np.stack([white[people == person].mean(axis=0) for person in range(12)])
    within = white - means[people]
    # The direction in which images of one person differ 100 times more (in variance) counts no more than others.
    if width >= 8:
        values = np.linalg.eigvalsh(within.T @ within / len(within))[-8:]
        assert values.max() < 1.5
        # Any wider embedding is a rotation: cosines are the same.
        narrow = (features - mean) @ whiten_within(features, people, 8, seed=1).matrix
        assert np.abs(white @ white.T - narrow @ narrow.T).max() < 1e-6 * np.abs(narrow @ narrow.T).max()
    raw = np.stack([(features - mean)[people == person].mean(axis=0) for person in range(12)])
    assert (means**2).sum() / (within**2).sum() > 3 * (raw**2).sum() / ((features - mean - raw[people]) ** 2).sum()


def test_an_embedding_can_begin_as_the_whitening_of_frozen_features():
    model = vitrail.create("ViT-Nano/7", classes=0, embedding=96).eval()
    rng = np.random.default_rng(0)
    features, people = rng.normal(size=(60, 64)).astype(np.float32), np.arange(60) % 4
    set_embedding(model, features, people, seed=0)
    mean, matrix = whiten_within(features, people, 96, seed=0)
    with torch.no_grad():
        found = model.head(torch.from_numpy(features)).numpy()
        in_training = model.train().head(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(found, (features - mean) @ matrix, atol=2e-5)
    np.testing.assert_allclose(in_training, found, atol=2e-4)  # with the statistics of all images in one batch
    weights = mean_embeddings(model.eval(), features, people, 5)
    unit = found / np.linalg.norm(found, axis=1, keepdims=True)
    for person in range(4):
        own = unit[people == person].sum(axis=0)
        np.testing.assert_allclose(weights[person].numpy(), own / np.linalg.norm(own), atol=1e-5)
    assert weights[4].norm().item() == pytest.approx(1, abs=1e-5)  # nobody's images: random


POSITIONS = [
    {},
    {"registers": 2},
    {"position": "learned-2d"},
    {"position": "sincos-2d"},
    {"position": "rope-2d"},
    {"position": "relative"},
    {"class_position": False},
]


@pytest.mark.parametrize("settings", POSITIONS)
def test_the_mean_of_patches_is_read_from_the_same_values(settings):
    model = vitrail.create("ViT-Nano/7", **settings).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    images = torch.randn(2, 1, 28, 28)
    pooled, note = surgery_of(model).with_mean_pooling()
    assert "in place of [CLS]" in note
    tokens = model.layer_tokens(images)[0]
    assert torch.equal(pooled.eval().layer_tokens(images)[0], tokens)
    assert torch.equal(pooled.features(images), tokens[:, model.config.prefix :].mean(dim=1))
    assert sum(parameter.numel() for parameter in pooled.parameters()) == pooled.config.parameters
    assert surgery_of(pooled).with_mean_pooling() == (pooled, None)


def test_positions_of_every_layer_leave_the_class_token_as_it_is():
    model = vitrail.create("ViT-Nano/7", position_at="every")
    assert surgery_of(model).with_mean_pooling() == (model, None)


# Training


TINY = [
    *("steps=24", "learning_rate=0.002", "batch=16", "average=0", "holdout=0.2", "augment.crop=none"),
    *("augment.flip=none", "model.depth=2", "model.resolution=56", "model.patch=8", "model.padding=0"),
    *("model.embedding=32",),
]


def stop_at(step):
    """A callback that interrupts training after a step."""

    def stop(seen):
        if seen.step == step:
            raise KeyboardInterrupt

    return stop


def test_training_tells_strangers_apart_and_a_resumed_run_ends_with_the_same_bits(tmp_path):
    root = write_people(tmp_path / "faces", people=12, images=4)
    recipe, options = change_recipe(find_recipe("faces"), TINY), Options(seed=3, workers=0, threads=1)
    known = {"model": "FaceViT-Nano", "test": 0.25, "quiet": True}
    whole = train_faces(root, tmp_path / "whole", recipe, options, **known)
    assert whole.bundle.model.config.embedding == 32
    assert whole.bundle.labels is None
    assert whole.bundle.provenance["faces"] == {"alignment": "none", "people": 7}
    assert len((tmp_path / "whole" / "people.txt").read_text().splitlines()) == 9  # 7 trained on, 2 held out
    scores = [line["verified"] for line in whole.history if line["event"] == "evaluate"]
    losses = [line["loss"] for line in whole.history if line["event"] == "step"]
    assert scores[-1] > 0.9, scores
    assert losses[-1] < 0.7 * losses[0], losses

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(10), **known)
    again = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **known)
    assert any(line["event"] == "resume" for line in again.history)
    for name, tensor in whole.bundle.model.state_dict().items():
        assert torch.equal(again.bundle.model.state_dict()[name], tensor), name


def test_a_run_that_begins_with_the_whitening_resumes_with_the_same_bits(tmp_path, monkeypatch):
    root = write_people(tmp_path / "faces", people=8, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=6", "batch=9"])
    options, known = Options(seed=2, workers=0, threads=1), {"source": "fashion", "test": 0.25, "quiet": True}
    fitted = []
    monkeypatch.setattr(face_training, "set_embedding", lambda *given: (fitted.append(1), set_embedding(*given)))
    whole = train_faces(root, tmp_path / "whole", recipe, options, **known)

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(3), **known)
    again = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **known)
    assert [line["step"] for line in again.history if line["event"] == "resume"] == [2]
    assert len(fitted) == 2  # what is resumed is in the checkpoint: nothing is whitened again
    assert again.bundle.provenance["finetuned_from"] == whole.bundle.provenance["finetuned_from"]
    assert again.scores == whole.scores
    for name, tensor in whole.bundle.model.state_dict().items():
        assert torch.equal(again.bundle.model.state_dict()[name], tensor), name
    # Killed while features were computed: there is no checkpoint, and the run begins anew with the whitening.
    monkeypatch.setattr(face_training, "set_embedding", stop_at_once)
    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "early", recipe, options, **known)
    monkeypatch.setattr(face_training, "set_embedding", set_embedding)
    early = train_faces(root, tmp_path / "early", recipe, options, resumes=True, **known)
    assert torch.equal(early.bundle.model.head[0].weight, whole.bundle.model.head[0].weight)


def stop_at_once(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["ResNet-Nano", "MLP-Nano", "Mixer-Nano/7"])
def test_the_recipe_works_for_every_family(name, tmp_path, capsys):
    """Also for those whose layers are not one sequence of blocks, from the first weights and from a bundle."""
    root = write_people(tmp_path / "faces", people=6, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=2", "batch=6"])
    made = train_faces(root, tmp_path / "run", recipe, Options(workers=0), model=name, test=0.34)
    tuned = train_faces(root, tmp_path / "tuned", recipe, Options(workers=0), source=made.bundle, test=0.34)
    assert tuned.steps == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "layer_decay is 1 instead of 0.75" in line]
    is_ordered = name == "Mixer-Nano/7"
    assert len(said) == (0 if is_ordered else 2)
    assert f"layer_decay = {0.75 if is_ordered else 1.0}\n" in (tmp_path / "run" / "config.toml").read_text()


def test_bfloat16_is_near_single_precision_and_resumes_exactly(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=3)
    hard = ["margin.scale=30", "margin.warmup=0", "margin.angle=0.3", "warmup=0"]
    recipe = change_recipe(find_recipe("faces"), [*TINY, *hard]).replace(
        steps=6, holdout=0, batch=9, learning_rate=1e-4
    )
    known = {"model": "FaceViT-Nano", "test": 0.25, "quiet": True}

    def losses(result):
        return [line["loss"] for line in result.history if line["event"] == "step"]

    single = train_faces(root, tmp_path / "single", recipe, Options(workers=0, threads=1), **known)
    options = Options(workers=0, threads=1, amp=True)
    half = train_faces(root, tmp_path / "half", recipe, options, **known)
    assert losses(half) != losses(single)
    np.testing.assert_allclose(losses(half), losses(single), rtol=0.02)
    assert {parameter.dtype for parameter in half.bundle.model.parameters()} == {torch.float32}

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(3), **known)
    again = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **known)
    for name, tensor in half.bundle.model.state_dict().items():
        assert tensor.isfinite().all()
        assert torch.equal(again.bundle.model.state_dict()[name], tensor), name


def test_an_embedding_on_the_weights_of_a_bundle(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=3", "holdout=0", "average=0"])
    known = {"source": "fashion", "test": 0.25, "quiet": True}
    made = train_faces(root, tmp_path / "run", recipe, Options(workers=0), **known)
    config = made.bundle.model.config
    assert (config.classes, config.embedding, config.resolution, config.width) == (0, 512, (28, 28), 96)
    changes = made.bundle.provenance["finetuned_from"]["changes"]
    assert any(change.startswith("an embedding of 512 in place of the head") for change in changes)
    assert "the embedding begins with the frozen model's features, whitened within people" in changes
    before = train_faces(root, tmp_path / "before", recipe.replace(steps=0), Options(workers=0), **known)
    _, norm = before.bundle.model.head.parts
    assert (norm.running_var - 1).abs().max() > 0.1  # as it is at random
    torch.testing.assert_close(norm.weight**2, norm.running_var + norm.eps)  # what is whitened stays so
    at_random = train_faces(root, tmp_path / "random", recipe.replace(head="zero"), Options(workers=0), **known)
    assert before.scores["eer"] <= made.scores["eer"] + 0.1 <= at_random.scores["eer"] + 0.2
    again = {**known, "source": tmp_path / "run" / "bundle"}
    more = train_faces(root, tmp_path / "more", recipe, Options(workers=0), **again)
    assert "its embedding of 512 stays" in more.bundle.provenance["finetuned_from"]["changes"]
    with pytest.raises(UsageError, match=r"Pool must stay gap for this bundle, got 'cls'"):
        train_faces(root, tmp_path / "no", change_recipe(recipe, ["model.pool=cls"]), Options(workers=0), **again)
    kept = train_faces(root, tmp_path / "cls", change_recipe(recipe, ["model.pool=cls"]), Options(workers=0), **known)
    assert (config.pool, kept.bundle.model.config.pool) == ("gap", "cls")
    with pytest.raises(UsageError, match=r"must be gap, or cls if it has that, got 'map'"):
        train_faces(root, tmp_path / "no", change_recipe(recipe, ["model.pool=map"]), Options(workers=0), **known)
    with pytest.raises(UsageError, match=r"got an embedding of 512\. Use `vitrail faces`"):
        vitrail.predict(made.bundle, [np.zeros((28, 28), np.uint8)])
    for model, source, words in ((None, None, "got none"), ("FaceViT-Nano", "fashion", "got both")):
        with pytest.raises(UsageError, match=words):
            train_faces(root, tmp_path / "no", recipe, Options(), model=model, source=source)
    with pytest.raises(UsageError, match=r"learns an embedding \(margin\), got classify"):
        train_faces(root, tmp_path / "no", recipe.replace(objective="classify"), Options(), source="fashion")


def test_the_last_evaluation_of_a_run_is_that_of_its_bundle(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=6)
    recipe = change_recipe(find_recipe("faces"), TINY).replace(steps=1, holdout=0)
    made = train_faces(root, tmp_path / "run", recipe, Options(workers=0), model="FaceViT-Nano", test=0.67, quiet=True)
    found = evaluate(str(tmp_path / "run" / "bundle"), str(root), without=tmp_path / "run" / "people.txt").report
    assert made.scores["eer"] == pytest.approx(found["eer"], abs=1e-9)
    assert made.scores["tar"][0]["threshold"] == pytest.approx(found["tar"][0]["threshold"], abs=1e-5)


def test_faces_with_landmarks_are_aligned_and_the_bundle_says_so(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=2)
    names = [f"{path.parent.name}/{path.name}" for path in sorted(root.glob("*/*.png"))]
    marks = tmp_path / "marks.json"
    marks.write_text(json.dumps({name: (TEMPLATE / 2 + 20).tolist() for name in names}))
    recipe = change_recipe(find_recipe("faces"), TINY).replace(steps=2, holdout=0)
    known = {"model": "FaceViT-Nano", "test": 0.34, "landmarks": marks, "quiet": True}
    made = train_faces(root, tmp_path / "run", recipe, Options(workers=0), **known)
    assert made.bundle.provenance["faces"] == {"alignment": "five landmarks", "people": 4}
    known = {**known, "model": None, "source": tmp_path / "run" / "bundle"}
    tuned = train_faces(root, tmp_path / "tuned", recipe.replace(model={}), Options(workers=0), **known)
    assert tuned.bundle.preprocess.crop_fraction == 1.0  # aligned faces are cropped already
    marks.write_text(json.dumps({name: (TEMPLATE + 5000).tolist() for name in names}))
    with pytest.raises(UsageError, match=r"Landmarks must be pixels on the face.*in the landmarks of 'person-"):
        train_faces(root, tmp_path / "other", recipe, Options(workers=0), **known)
    marks.write_text(json.dumps({name: TEMPLATE.tolist() for name in names[1:]}))
    with pytest.raises(UsageError, match=r"got none for 'person-00/0\.png'"):
        train_faces(root, tmp_path / "other", recipe, Options(workers=0), **known)
