"""Training of face embeddings: margins, splits by person, alignment, whitening, and resumed runs."""

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
from vitrail.faces.align import SIDE, TEMPLATE, align, estimate_similarity, read_landmarks
from vitrail.faces.embed import Aligner
from vitrail.faces.face_training import train_faces
from vitrail.faces.people import split_people
from vitrail.faces.recognition import evaluate
from vitrail.faces.whitening import mean_embeddings, set_embedding, whiten_within
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
    """Return the cosine with a margin by the formulas of the papers, in double precision."""
    angle = np.arccos(np.clip(cosine, -1, 1))
    shifted = margin.factor * angle + margin.angle
    if margin.factor == 1:
        arcface = cosine - margin.angle * math.sin(margin.angle)
        return np.where(shifted <= math.pi, np.cos(shifted), arcface) - margin.cosine
    logit = np.cos(shifted)
    for half in range(1, 6):  # SphereFace: (-1)^k cos - 2 k in the k-th half turn
        logit = np.where(shifted > half * math.pi, (-1) ** half * np.cos(shifted) - 2 * half, logit)
    return logit - margin.cosine


@pytest.mark.parametrize("name", MARGINS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_margins_equal_their_formulas(name, dtype, tolerance):
    margin = MARGINS[name]
    cosine = torch.linspace(-1, 1, 4001, dtype=dtype)
    cosine = torch.cat([cosine, torch.tensor([1 - 1e-6, -1 + 1e-6, 1 - 3e-7], dtype=dtype)])
    plain = cosine.double().numpy()
    half_turns = (margin.factor * np.arccos(plain) + margin.angle) / math.pi
    # At multiples of half a turn, ArcFace is discontinuous, as published, and the others have a corner.
    is_smooth = np.abs(half_turns - half_turns.round()) > 1e-5
    difference = np.abs(with_margin(cosine, margin).double().numpy() - reference(plain, margin))
    assert is_smooth.sum() > 3990
    assert difference[is_smooth].max() < tolerance
    # The logit decreases with the angle to the person.
    logits = with_margin(torch.cos(torch.linspace(0, math.pi, 2001, dtype=torch.float64)), margin)
    assert logits.diff().max() < (0.2 if name == "arcface" else 1e-12)


@pytest.mark.parametrize("name", MARGINS)
def test_gradients_are_finite_at_angles_of_zero_and_half_a_turn(name):
    cosine = torch.tensor([1.0, -1.0, 0.3, 1 - 1e-7, -1 + 1e-7], requires_grad=True)
    with_margin(cosine, MARGINS[name]).sum().backward()
    assert cosine.grad.isfinite().all()
    assert cosine.grad[2] > 0


def test_margin_and_scale_increase_during_warm_up():
    cosine, labels = torch.full((2, 5), 0.5), torch.tensor([1, 3])
    margin = MarginSettings(cosine=0.4, scale=64, warmup=0.5)
    initial_scale = adacos_scale(5)
    assert initial_scale == pytest.approx(math.sqrt(2) * math.log(4))
    for progress, share in ((0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (1.0, 1.0)):
        logits = margin_logits(cosine, labels, margin, torch.tensor(progress))
        scale = initial_scale + (64 - initial_scale) * share
        assert logits[0, 0].item() == pytest.approx(0.5 * scale, rel=1e-6)
        assert logits[0, 1].item() == pytest.approx((0.5 - 0.4 * share) * scale, rel=1e-6)
    assert margin_logits(cosine, labels, MarginSettings(warmup=0), torch.tensor(0.0))[0, 1].item() < 0.5 * initial_scale


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
    assert (images.grad.abs().sum(dim=(0, 1)) > 0).all()  # every pixel has an influence
    for stride, patch, padding in ((8, 12, 4), (9, 9, 0)):  # the published settings, which ignore pixels at the border
        with pytest.raises(UsageError, match="whole patches"):
            vitrail.create(name, stride=stride, patch=patch, padding=padding)


FAMILIES = ["ViT-Nano/7", "ResNet-Nano", "Mixer-Nano/7", "LSTM-Nano/7", "MLP-Nano", "Hybrid-Nano"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_supports_an_embedding_head(name, tmp_path):
    model = vitrail.create(name, classes=0, embedding=24)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters
    images = torch.randn(4, 1, 28, 28)
    for _ in range(3):
        assert model(images).shape == (4, 24)  # updates the running statistics
    assert model(images[:1]).isfinite().all()  # one image in training mode
    model.eval()
    preprocess = vitrail.Preprocess(resolution=28, crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    vitrail.save(vitrail.Bundle(model=model, preprocess=preprocess), tmp_path / "bundle")
    assert torch.equal(vitrail.load(tmp_path / "bundle").model(images), model(images))
    pixels = [np.random.default_rng(n).integers(0, 255, (28, 28), np.uint8) for n in range(3)]
    if name == "ViT-Nano/7":  # the ONNX engine accepts batches of any size
        with ENGINES["onnx"].open(tmp_path / "bundle", None).running(None) as run:
            for count in (1, 3):
                logits = run(np.stack(pixels[:count])[..., None]).logits
                expected = model(preprocess(pixels[:count])).detach().numpy()
                assert np.abs(logits - expected).max() < 1e-4
    model.reset_classifier(3)
    assert (model.config.classes, model.config.embedding, model(images).shape) == (3, 0, (4, 3))
    with pytest.raises(UsageError, match="classes 0"):
        vitrail.create(name, embedding=24)


# People


def write_people(root, people=8, images=4, size=(112, 112), seed=0):
    """Write folders of images: a random pattern for each person, with noise. Return `root`."""
    rng = np.random.default_rng(seed)
    for person in range(people):
        folder = root / f"person-{person:02d}"
        folder.mkdir(parents=True)
        pattern = rng.integers(0, 256, (7, 7))
        for number in range(images):
            pixels = np.kron(pattern, np.ones((16, 16))) + rng.normal(0, 12, (112, 112))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).resize(size).save(folder / f"{number}.png")
    return root


def test_nobody_is_in_two_splits(tmp_path):
    root = write_people(tmp_path / "faces", people=10, images=2)
    dataset, held_out, notes = split_people(root, people=None, test_share=0.3, validation_share=0.3, seed=1)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 10, "val": 4, "test": 6}
    assert notes == ["people: 5 for training, 2 held out, 3 for the test; nobody is in two splits"]
    folders = {name: {path.split("/")[-2] for path in split.images} for name, split in dataset.splits.items()}
    assert folders["val"] == set(held_out)
    assert not folders["train"] & folders["val"]
    assert not folders["train"] & folders["test"]
    assert not folders["val"] & folders["test"]
    assert sorted(folders["train"]) == list(dataset.labels)
    labels = [set(split.labels.tolist()) for split in dataset.splits.values()]
    assert labels == [{0, 1, 2, 3, 4}, {5, 6}, {7, 8, 9}]
    same_seed, *_ = split_people(root, people=None, test_share=0.3, validation_share=0.3, seed=1)
    assert same_seed.fingerprint() == dataset.fingerprint()
    other_seed, *_ = split_people(root, people=None, test_share=0.3, validation_share=0.3, seed=2)
    assert other_seed.fingerprint() != dataset.fingerprint()


def test_folders_with_a_name_in_nfc_and_nfd_are_one_person(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=2)
    for folder, form in (("person-00", "NFC"), ("person-01", "NFD")):
        (root / folder).rename(root / unicodedata.normalize(form, "김한글"))
    for seed in range(6):
        dataset, _, notes = split_people(root, people=None, test_share=0.4, validation_share=0, seed=seed)
        folders = {
            name: {unicodedata.normalize("NFC", path.split("/")[-2]) for path in split.images}
            for name, split in dataset.splits.items()
        }
        assert not folders["train"] & folders["test"]
        assert notes == ["people: 4 for training, 0 held out, 3 for the test; nobody is in two splits"]
        assert "names merged with an equal name in another Unicode form: 1 of 8" in dataset.notes
    (tmp_path / "people.txt").write_text("김한글\nperson-02\n", encoding="utf-8")
    dataset, *_ = split_people(root, people=tmp_path / "people.txt", test_share=0, validation_share=0, seed=0)
    assert dataset.labels == ("person-02", "김한글")
    assert np.bincount(dataset.splits["train"].labels).tolist() == [2, 4]


def test_a_file_names_the_people_for_training(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=2)
    file = tmp_path / "people.txt"
    file.write_text("person-01\nperson-04\nperson-05\n")
    dataset, *_ = split_people(root, people=file, test_share=0.5, validation_share=0, seed=0)
    assert dataset.labels == ("person-01", "person-04", "person-05")
    assert {path.split("/")[-2] for path in dataset.splits["test"].images} == {"person-00", "person-02", "person-03"}
    for text, message in (
        ("person-01\nperson-9\n", "got 'person-9'"),
        ("person-01\nperson-01\n", "twice"),
        ("person-01\n", "at least 2, got 1 of 6"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            split_people(root, people=file, test_share=0.5, validation_share=0, seed=0)
    for share in (math.nan, math.inf, -0.5):
        with pytest.raises(UsageError, match="Test must be a number from 0"):
            split_people(root, people=None, test_share=share, validation_share=0, seed=0)
    with pytest.raises(UsageError, match="file that exists"):
        split_people(root, people=tmp_path / "none.txt", test_share=0.5, validation_share=0, seed=0)


# Alignment


def test_estimate_similarity_maps_landmarks_to_the_template_by_least_squares():
    turn, shift, size = 0.4, np.array([31.0, -12.0]), 1.7
    rotation = size * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    points = (TEMPLATE - TEMPLATE.mean(0)) @ rotation.T + TEMPLATE.mean(0) + shift
    matrix = estimate_similarity(points)
    np.testing.assert_allclose(points @ matrix[:, :2].T + matrix[:, 2], TEMPLATE, atol=1e-9)
    # With noise, no other similarity transform has a smaller error.
    noisy = points + np.random.default_rng(0).normal(0, 2, points.shape)
    fitted = estimate_similarity(noisy)
    error = ((noisy @ fitted[:, :2].T + fitted[:, 2] - TEMPLATE) ** 2).sum()
    for number in range(20):
        change = np.random.default_rng(number).normal(0, 0.01, 4)
        other = fitted + np.array([[change[0], -change[1], change[2]], [change[1], change[0], change[3]]])
        assert ((noisy @ other[:, :2].T + other[:, 2] - TEMPLATE) ** 2).sum() > error
    with pytest.raises(UsageError, match="same point"):
        estimate_similarity(np.ones((5, 2)))
    # A profile is accepted. Exchanged left and right, or eyes below the mouth, are rejected.
    profile = TEMPLATE * [0.1, 1] + [[0, 0], [0, 0], [15, 0], [0, 0], [0, 0]]
    assert estimate_similarity(profile).shape == (2, 3)
    for order in ([1, 0, 2, 4, 3], [3, 4, 2, 0, 1]):
        with pytest.raises(UsageError, match="not a face in this order"):
            estimate_similarity(points[order])


@pytest.mark.parametrize("size", [1.0, 3.0])
def test_landmarks_of_an_aligned_face_are_at_the_template(size):
    """Checked with five dots at rotated and scaled landmarks."""
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
        centre = [(columns * near).sum() / near.sum(), (rows * near).sum() / near.sum()]
        np.testing.assert_allclose(centre, [px, py], atol=0.1)


def test_landmarks_are_read_from_csv_and_json_and_invalid_files_are_rejected(tmp_path):
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
    with pytest.raises(UsageError, match=r"got none for 'c/a\.png'"):  # paths are case-sensitive
        aligner(image, str(tmp_path / "c" / "a.png"))
    for text, message in (
        (header + "a/b" + ",1" * 10 + "\n./a/b" + ",1" * 10 + "\n", "has './a/b' twice"),
        ("file,x\n", "header"),
        (header + "a,1,2\n", "five points"),
        (header + "a" + ",nan" * 10 + "\n", "finite"),
        (header + 2 * ("a" + ",1" * 10 + "\n"), "twice"),
    ):
        table.write_text(text)
        with pytest.raises(vitrail.core.errors.VitrailError, match=message):
            read_landmarks(table)


# Whitening


def spread_people(people=12, images=30, width=8, seed=0):
    """Return features and people: people differ in two dimensions, images of one person much more in a third."""
    rng = np.random.default_rng(seed)
    centres = np.zeros((people, width))
    centres[:, :2] = rng.normal(0, 1, (people, 2))
    noise = rng.normal(0, 0.1, (people, images, width))
    noise[:, :, 2] *= 10
    return (3 + centres[:, None] + noise).reshape(-1, width), np.repeat(np.arange(people), images)


@pytest.mark.parametrize("width", [5, 8, 32])
def test_whitening_equalises_variances_within_people_and_keeps_differences_between_people(width):
    features, people = spread_people()
    mean, matrix = whiten_within(features, people, width, seed=0)
    assert matrix.shape == (8, width)
    white = (features - mean) @ matrix
    means = np.stack([white[people == person].mean(axis=0) for person in range(12)])
    within = white - means[people]
    # Before whitening, the variance within people is 100 times larger in one direction than in the others.
    if width >= 8:
        values = np.linalg.eigvalsh(within.T @ within / len(within))[-8:]
        assert values.max() < 1.5
        # A wider embedding is a rotation, which keeps cosines.
        narrow = (features - mean) @ whiten_within(features, people, 8, seed=1).matrix
        assert np.abs(white @ white.T - narrow @ narrow.T).max() < 1e-6 * np.abs(narrow @ narrow.T).max()
    raw = np.stack([(features - mean)[people == person].mean(axis=0) for person in range(12)])
    assert (means**2).sum() / (within**2).sum() > 3 * (raw**2).sum() / ((features - mean - raw[people]) ** 2).sum()


def test_set_embedding_makes_the_head_equal_to_the_whitening():
    model = vitrail.create("ViT-Nano/7", classes=0, embedding=96).eval()
    rng = np.random.default_rng(0)
    features, people = rng.normal(size=(60, 64)).astype(np.float32), np.arange(60) % 4
    set_embedding(model, features, people, seed=0)
    mean, matrix = whiten_within(features, people, 96, seed=0)
    with torch.no_grad():
        embeddings = model.head(torch.from_numpy(features)).numpy()
        in_training = model.train().head(torch.from_numpy(features)).numpy()
    np.testing.assert_allclose(embeddings, (features - mean) @ matrix, atol=2e-5)
    np.testing.assert_allclose(
        in_training, embeddings, atol=2e-4
    )  # the batch has all images, so its statistics are equal
    weights = mean_embeddings(model.eval(), features, people, 5)
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    for person in range(4):
        total = unit[people == person].sum(axis=0)
        np.testing.assert_allclose(weights[person].numpy(), total / np.linalg.norm(total), atol=1e-5)
    assert weights[4].norm().item() == pytest.approx(1, abs=1e-5)  # random, because person 4 has no images


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
def test_mean_pooling_keeps_the_patch_tokens_of_the_original_model(settings):
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


def test_a_model_with_positions_in_every_layer_keeps_its_class_token():
    model = vitrail.create("ViT-Nano/7", position_at="every")
    assert surgery_of(model).with_mean_pooling() == (model, None)


# Training


TINY = [
    *("steps=24", "learning_rate=0.002", "batch=16", "average=0", "holdout=0.2", "augment.crop=none"),
    *("augment.flip=none", "model.depth=2", "model.resolution=56", "model.patch=8", "model.padding=0"),
    *("model.embedding=32",),
]


def stop_at(step):
    """Return a callback that interrupts training after a step."""

    def stop(event):
        if event.step == step:
            raise KeyboardInterrupt

    return stop


def test_training_separates_unseen_people_and_resuming_gives_identical_weights(tmp_path):
    root = write_people(tmp_path / "faces", people=12, images=4)
    recipe, options = change_recipe(find_recipe("faces"), TINY), Options(seed=3, workers=0, threads=1)
    settings = {"model": "FaceViT-Nano", "test": 0.25, "quiet": True}
    uninterrupted = train_faces(root, tmp_path / "uninterrupted", recipe, options, **settings)
    assert uninterrupted.bundle.model.config.embedding == 32
    assert uninterrupted.bundle.labels is None
    assert uninterrupted.bundle.provenance["faces"] == {"alignment": "none", "people": 7}
    assert len((tmp_path / "uninterrupted" / "people.txt").read_text().splitlines()) == 9  # 7 trained on, 2 held out
    scores = [line["verified"] for line in uninterrupted.history if line["event"] == "evaluate"]
    losses = [line["loss"] for line in uninterrupted.history if line["event"] == "step"]
    assert scores[-1] > 0.9, scores
    assert losses[-1] < 0.7 * losses[0], losses

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(10), **settings)
    resumed = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **settings)
    assert any(line["event"] == "resume" for line in resumed.history)
    for name, tensor in uninterrupted.bundle.model.state_dict().items():
        assert torch.equal(resumed.bundle.model.state_dict()[name], tensor), name


def test_resuming_a_run_that_started_from_whitening_gives_identical_weights(tmp_path, monkeypatch):
    root = write_people(tmp_path / "faces", people=8, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=6", "batch=9"])
    options, settings = Options(seed=2, workers=0, threads=1), {"source": "fashion", "test": 0.25, "quiet": True}
    fitted = []
    monkeypatch.setattr(
        face_training, "set_embedding", lambda *arguments: (fitted.append(1), set_embedding(*arguments))
    )
    uninterrupted = train_faces(root, tmp_path / "uninterrupted", recipe, options, **settings)

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(3), **settings)
    resumed = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **settings)
    assert [line["step"] for line in resumed.history if line["event"] == "resume"] == [2]
    assert len(fitted) == 2  # the resumed run reads its weights from the checkpoint
    assert resumed.bundle.provenance["finetuned_from"] == uninterrupted.bundle.provenance["finetuned_from"]
    assert resumed.scores == uninterrupted.scores
    for name, tensor in uninterrupted.bundle.model.state_dict().items():
        assert torch.equal(resumed.bundle.model.state_dict()[name], tensor), name
    # Killed during the computation of features: without a checkpoint, the run starts again with whitening.
    monkeypatch.setattr(face_training, "set_embedding", stop_at_once)
    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "early", recipe, options, **settings)
    monkeypatch.setattr(face_training, "set_embedding", set_embedding)
    early = train_faces(root, tmp_path / "early", recipe, options, resumes=True, **settings)
    assert torch.equal(early.bundle.model.head[0].weight, uninterrupted.bundle.model.head[0].weight)


def stop_at_once(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["ResNet-Nano", "MLP-Nano", "Mixer-Nano/7"])
def test_the_recipe_works_for_every_family(name, tmp_path, capsys):
    """From random weights and from a bundle, also for families whose layers are not one sequence of blocks."""
    root = write_people(tmp_path / "faces", people=6, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=2", "batch=6"])
    result = train_faces(root, tmp_path / "run", recipe, Options(workers=0), model=name, test=0.34)
    tuned = train_faces(root, tmp_path / "tuned", recipe, Options(workers=0), source=result.bundle, test=0.34)
    assert tuned.steps == 2
    notes = [line for line in capsys.readouterr().err.splitlines() if "layer_decay is 1 instead of 0.75" in line]
    is_ordered = name == "Mixer-Nano/7"
    assert len(notes) == (0 if is_ordered else 2)
    assert f"layer_decay = {0.75 if is_ordered else 1.0}\n" in (tmp_path / "run" / "config.toml").read_text()


def test_bfloat16_losses_are_near_float32_and_resuming_is_exact(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=3)
    full_margin = ["margin.scale=30", "margin.warmup=0", "margin.angle=0.3", "warmup=0"]
    recipe = change_recipe(find_recipe("faces"), [*TINY, *full_margin]).replace(
        steps=6, holdout=0, batch=9, learning_rate=1e-4
    )
    settings = {"model": "FaceViT-Nano", "test": 0.25, "quiet": True}

    def losses(result):
        return [line["loss"] for line in result.history if line["event"] == "step"]

    single = train_faces(root, tmp_path / "single", recipe, Options(workers=0, threads=1), **settings)
    options = Options(workers=0, threads=1, amp=True)
    half = train_faces(root, tmp_path / "half", recipe, options, **settings)
    assert losses(half) != losses(single)
    np.testing.assert_allclose(losses(half), losses(single), rtol=0.02)
    assert {parameter.dtype for parameter in half.bundle.model.parameters()} == {torch.float32}

    with pytest.raises(KeyboardInterrupt):
        train_faces(root, tmp_path / "cut", recipe, options, callback=stop_at(3), **settings)
    resumed = train_faces(root, tmp_path / "cut", recipe, options, resumes=True, **settings)
    for name, tensor in half.bundle.model.state_dict().items():
        assert tensor.isfinite().all()
        assert torch.equal(resumed.bundle.model.state_dict()[name], tensor), name


def test_training_from_a_bundle_replaces_the_head_by_an_embedding(tmp_path):
    root = write_people(tmp_path / "faces", people=8, images=3, size=(28, 28))
    recipe = change_recipe(find_recipe("faces"), ["steps=3", "holdout=0", "average=0"])
    settings = {"source": "fashion", "test": 0.25, "quiet": True}
    result = train_faces(root, tmp_path / "run", recipe, Options(workers=0), **settings)
    config = result.bundle.model.config
    assert (config.classes, config.embedding, config.resolution, config.width) == (0, 512, (28, 28), 96)
    changes = result.bundle.provenance["finetuned_from"]["changes"]
    assert any(change.startswith("an embedding of 512 in place of the head") for change in changes)
    assert "the embedding begins with the frozen model's features, whitened within people" in changes
    before = train_faces(root, tmp_path / "before", recipe.replace(steps=0), Options(workers=0), **settings)
    _, norm = before.bundle.model.head.parts
    assert (norm.running_var - 1).abs().max() > 0.1  # a random head has a variance of 1
    torch.testing.assert_close(norm.weight**2, norm.running_var + norm.eps)  # the norm keeps the whitened values
    at_random = train_faces(root, tmp_path / "random", recipe.replace(head="zero"), Options(workers=0), **settings)
    assert before.scores["eer"] <= result.scores["eer"] + 0.1 <= at_random.scores["eer"] + 0.2
    from_run = {**settings, "source": tmp_path / "run" / "bundle"}
    more = train_faces(root, tmp_path / "more", recipe, Options(workers=0), **from_run)
    assert "its embedding of 512 stays" in more.bundle.provenance["finetuned_from"]["changes"]
    with pytest.raises(UsageError, match=r"Pool must stay gap for this bundle, got 'cls'"):
        train_faces(root, tmp_path / "no", change_recipe(recipe, ["model.pool=cls"]), Options(workers=0), **from_run)
    cls_recipe = change_recipe(recipe, ["model.pool=cls"])
    cls_result = train_faces(root, tmp_path / "cls", cls_recipe, Options(workers=0), **settings)
    assert (config.pool, cls_result.bundle.model.config.pool) == ("gap", "cls")
    with pytest.raises(UsageError, match=r"must be gap, or cls if the model has \[CLS\], got 'map'"):
        train_faces(root, tmp_path / "no", change_recipe(recipe, ["model.pool=map"]), Options(workers=0), **settings)
    with pytest.raises(UsageError, match=r"got an embedding of 512\. Use `vitrail faces`"):
        vitrail.predict(result.bundle, [np.zeros((28, 28), np.uint8)])
    for model, source, message in ((None, None, "got none"), ("FaceViT-Nano", "fashion", "got both")):
        with pytest.raises(UsageError, match=message):
            train_faces(root, tmp_path / "no", recipe, Options(), model=model, source=source)
    with pytest.raises(UsageError, match=r"learns an embedding \(margin\), got classify"):
        train_faces(root, tmp_path / "no", recipe.replace(objective="classify"), Options(), source="fashion")


def test_the_last_evaluation_of_a_run_equals_the_evaluation_of_its_bundle(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=6)
    recipe = change_recipe(find_recipe("faces"), TINY).replace(steps=1, holdout=0)
    settings = {"model": "FaceViT-Nano", "test": 0.67, "quiet": True}
    result = train_faces(root, tmp_path / "run", recipe, Options(workers=0), **settings)
    report = evaluate(str(tmp_path / "run" / "bundle"), str(root), without=tmp_path / "run" / "people.txt").report
    assert result.scores["eer"] == pytest.approx(report["eer"], abs=1e-9)
    assert result.scores["tar"][0]["threshold"] == pytest.approx(report["tar"][0]["threshold"], abs=1e-5)


def test_training_with_landmarks_aligns_faces_and_records_it_in_the_bundle(tmp_path):
    root = write_people(tmp_path / "faces", people=6, images=2)
    names = [f"{path.parent.name}/{path.name}" for path in sorted(root.glob("*/*.png"))]
    marks = tmp_path / "marks.json"
    marks.write_text(json.dumps({name: (TEMPLATE / 2 + 20).tolist() for name in names}))
    recipe = change_recipe(find_recipe("faces"), TINY).replace(steps=2, holdout=0)
    settings = {"model": "FaceViT-Nano", "test": 0.34, "landmarks": marks, "quiet": True}
    result = train_faces(root, tmp_path / "run", recipe, Options(workers=0), **settings)
    assert result.bundle.provenance["faces"] == {"alignment": "five landmarks", "people": 4}
    settings = {**settings, "model": None, "source": tmp_path / "run" / "bundle"}
    tuned = train_faces(root, tmp_path / "tuned", recipe.replace(model={}), Options(workers=0), **settings)
    assert tuned.bundle.preprocess.crop_fraction == 1.0  # aligned faces are already cropped
    marks.write_text(json.dumps({name: (TEMPLATE + 5000).tolist() for name in names}))
    with pytest.raises(UsageError, match=r"Landmarks must be pixels on the face.*in the landmarks of 'person-"):
        train_faces(root, tmp_path / "other", recipe, Options(workers=0), **settings)
    marks.write_text(json.dumps({name: TEMPLATE.tolist() for name in names[1:]}))
    with pytest.raises(UsageError, match=r"got none for 'person-00/0\.png'"):
        train_faces(root, tmp_path / "other", recipe, Options(workers=0), **settings)
