"""`vitrail.train`, `finetune`, `evaluate`, `predict`: the commands as functions."""

import copy
import dataclasses
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.api import predictions
from vitrail.api.commands import COMMANDS
from vitrail.cli import _arguments, _flags
from vitrail.core.errors import UsageError
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.training.options import Options, RunOptions
from vitrail.training.recipe import Recipe

QUICK = {"steps": 2, "batch": 16, "workers": 0}


@pytest.fixture(scope="module")
def digits():
    """Return eighty digits: pixels (80, 8, 8, 1) and their classes."""
    split = open_data("digits").splits["test"].select(np.arange(80))
    return split.images, split.labels


@pytest.fixture(scope="module")
def trained(digits):
    return vitrail.train(digits, "ViT-Pico/2", **QUICK)


def weights(bundle):
    return {name: tensor.clone() for name, tensor in bundle.model.state_dict().items()}


def test_public_functions_are_available_without_torch():
    script = "import sys, vitrail; vitrail.train; vitrail.predict; import vitrail.training, vitrail.evaluation"
    script += "; sys.exit(bool({'torch', 'numpy', 'tyro'} & sys.modules.keys()) or not callable(vitrail.train))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert {"train", "finetune", "evaluate", "predict", "inspect"} <= set(vitrail.__all__)
    for name in {"train", "finetune", "evaluate", "predict", "inspect"}:  # a module of this name would take its place
        assert importlib.util.find_spec(f"vitrail.{name}") is None
    assert vitrail.evaluate is predictions.evaluate


def test_every_parameter_is_declared_once_for_python_and_the_command_line():
    """Only the listed parameters exist in one of the two."""
    every = {**COMMANDS, **{f"faces {name}": command for name, command in COMMANDS["faces"].commands.items()}}
    del every["faces"]
    python_only = {}
    for name, command in every.items():
        parameters = command.parameters
        assert [*inspect.signature(command.function).parameters] == [parameter.name for parameter in parameters]
        python_only[name] = {parameter.name for parameter in parameters if not parameter.flag.in_cli}
        flags = {flag[2:] for flag in _flags(command) if " " not in flag} | {*_arguments(command)}
        of_the_terminal = {word for word in ("json", "open") if getattr(command, word) is not None}
        assert len(flags - of_the_terminal) == len(parameters) - len(python_only[name])
        for parameter in parameters:
            assert parameter.flag.help in " ".join(command.function.__doc__.split())
    for name in ("train", "finetune", "faces train"):
        assert python_only.pop(name) == {"callback", "quiet", "command"}
    assert {name: texts for name, texts in python_only.items() if texts} == {
        "predict": {"receiver"},
        "faces identify": {"receiver"},
        "faces evaluate": {"command"},
        "runs": {"command"},
        "compare": {"command"},
    }


def test_an_option_of_a_run_is_declared_in_one_place():
    """A key of `RunOptions` is a field of `Options`, a flag and a keyword of everything that trains."""
    names = [*RunOptions.__annotations__]
    assert [field.name for field in dataclasses.fields(Options)] == names
    for command in (COMMANDS["train"], COMMANDS["finetune"], COMMANDS["faces"].commands["train"]):
        assert {f"--{name.replace('_', '-')}" for name in names} <= {*_flags(command)}
        defaults = {
            name: parameter.default for name, parameter in inspect.signature(command.function).parameters.items()
        }
        assert Options().to_json() == {name: defaults[name] for name in names}


def test_function_and_command_give_identical_weights(call, digits, tmp_path):
    data = tmp_path / "data.npz"
    np.savez(data, images=digits[0], labels=digits[1])
    options = ("--steps", 3, "--lr", 0.01, "--per-class", 5, "--seed", 4, "--set", "clip=1", "model.dropout=0.1")
    done = call("train", data, "--model", "ViT-Pico/2", *options, "--output", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    settings = {"clip": 1, "model.dropout": 0.1}
    result = vitrail.train(data, "ViT-Pico/2", steps=3, lr=0.01, per_class=5, seed=4, settings=settings)
    written = vitrail.load(tmp_path / "run" / "bundle")
    assert weights(written).keys() == weights(result.bundle).keys()
    for name, tensor in weights(written).items():
        torch.testing.assert_close(tensor, weights(result.bundle)[name], rtol=0, atol=0)
    assert result.scores == written.provenance["scores"]
    assert result.sentence + "\n" == done.stdout.splitlines(keepends=True)[0]
    done = call("evaluate", tmp_path / "run" / "bundle", data, "--json")
    evaluation = vitrail.evaluate(tmp_path / "run" / "bundle", data)
    assert json.loads(done.stdout) == evaluation.scores
    assert (evaluation.count, evaluation.accuracy, evaluation.split) == (10, result.accuracy, "held-out")
    evaluation = vitrail.evaluate(tmp_path / "run" / "bundle", data, "all")
    assert (evaluation.count, evaluation.accuracy, evaluation.split) == (80, evaluation.right / 80, "all")
    assert repr(evaluation).startswith(
        f"Evaluation(all accuracy {evaluation.accuracy:.1%}, {evaluation.right} of 80, 95 % interval "
    )
    assert evaluation.accuracy == vitrail.evaluate(result.bundle, digits, "all").accuracy


def test_train_without_output_returns_the_result_and_keeps_no_files(digits, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = vitrail.train(digits, "ViT-Pico/2", patience=1, **(QUICK | {"steps": None, "epochs": 9}))
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")  # nobody watches
    assert result.folder is None
    assert result.scores["count"] == 10
    assert result.accuracy == result.scores["accuracy"]
    assert (result.total, result.stopped) == (45, "patience")
    assert [event["step"] for event in result.history if event["event"] == "evaluate"][-1] == result.steps < 45
    assert repr(result).startswith("Result(held-out accuracy ")
    assert f"; {result.steps} steps in " in repr(result)
    assert repr(result).endswith("stopped by patience before the last of 45)")
    with pytest.raises(ZeroDivisionError):
        vitrail.train(digits, "ViT-Pico/2", callback=lambda step: 1 / 0, **QUICK)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.steps = 3


def test_train_with_output_can_be_resumed(digits, tmp_path):
    output = tmp_path / "run"

    def fail(step):
        raise LookupError(step.step)

    with pytest.raises(LookupError, match="1"):
        vitrail.train(digits, "ViT-Pico/2", output=output, callback=fail, **QUICK)
    with pytest.raises(UsageError, match=r"Output must not exist yet.*in Python: resume=True, force=True"):
        vitrail.train(digits, "ViT-Pico/2", output=output, **QUICK)
    result = vitrail.train(digits, "ViT-Pico/2", output=output, resume=True, **QUICK)
    assert (result.folder, result.steps) == (output, 2)
    assert [event["step"] for event in result.history if event["event"] == "resume"] == [1]
    assert repr(result).endswith(f"; {output})")
    call = f"vitrail.train(<tuple>, 'ViT-Pico/2', steps=2, batch=16, output={str(output)!r}"
    config = (output / "config.toml").read_text().splitlines()[0]
    assert config == f"# vitrail {call}, callback=<fail>, workers=0)"
    assert result.bundle.provenance["command"] == f"{call}, resume=True, workers=0)"


def test_data_in_every_form(digits, tmp_path, trained):
    images, labels = digits
    names = np.array(["dark", "light"])[labels % 2]
    files = []
    for number, image in enumerate(images):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(image[..., 0]).save(files[-1])
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    forms = [
        (images, labels),
        [images[..., 0], labels.tolist()],
        (list(images), labels),
        (torch.from_numpy(images), torch.from_numpy(labels)),
        {"images": images, "labels": labels},
        tmp_path / "data.npz",
        str(tmp_path / "data.npz"),
        open_data((images, labels)),
        (files, labels),
        (np.array(list(map(str, files))), list(map(str, labels))),
    ]
    accuracies = [vitrail.evaluate(trained.bundle, data, "all").accuracy for data in forms]
    assert accuracies == [accuracies[0]] * len(forms)
    split = {"train_images": images[:60], "train_labels": labels[:60], "test_images": images[60:]}
    assert vitrail.evaluate(trained.bundle, split | {"test_labels": labels[60:]}).count == 20
    objects = names.astype(object)  # as a column of a table has them
    two = vitrail.finetune(trained.bundle, (files, objects), recipe="frozen", workers=0)
    assert two.bundle.labels == ("dark", "light")
    again = vitrail.finetune(trained.bundle, (files, objects), recipe="frozen", workers=0, output=tmp_path / "run")
    assert again.scores == two.scores


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "Data must be a path, a pair \\(images, labels\\), a mapping of arrays or a Dataset, got int"),
        ((1, 2, 3), "got tuple"),
        ((np.zeros((4, 8, 8)), [0, 1, 0, 1]), "images must be uint8"),
        ((np.zeros((4, 8, 8), np.uint8), [0, 1, 0]), "labels must have an integer or a name for each image"),
        ((np.zeros((4, 8, 8), np.uint8), [0.5, 1, 0, 1]), "labels must have an integer or a name for each image"),
        (([np.zeros((4, 8)), np.zeros((8, 8))], [0, 1]), "images must be one array"),
        ((["no.png", "no.jpg"], [0, 1]), "Images must be files that exist, got 'no.png'"),
        ((["no.png", "no.jpg"], [0]), "labels must have an integer or a name for each image"),
        ({"pixels": [1]}, "Arrays must be called images and labels"),
        ("nowhere", "Data must be"),
    ],
)
def test_invalid_data_is_rejected(data, message):
    for run in (lambda: vitrail.train(data, "ViT-Pico/2", steps=1), lambda: vitrail.evaluate("fashion", data)):
        with pytest.raises(UsageError, match=message):
            run()


def test_invalid_keywords_of_evaluate_and_predict_are_rejected():
    with pytest.raises(UsageError, match=r"Keyword of evaluate .*, got 'neighbors'\. Did you mean 'neighbours'\?"):
        vitrail.evaluate("fashion", "fashion-40", neighbors=3)
    with pytest.raises(UsageError, match=r"^Split must be one of test, got 'tests'\. Did you mean 'test'\?$"):
        vitrail.evaluate("fashion", "fashion-40", "tests")
    with pytest.raises(UsageError, match=r"Keyword of predict .*, got 'topk'\. Did you mean 'top_k'\?"):
        vitrail.predict("fashion", np.zeros((1, 28, 28), np.uint8), topk=3)
    with pytest.raises(UsageError, match=r"got 'batch'\.$"):  # a setting of recipes, which predict has not
        vitrail.predict("fashion", np.zeros((1, 28, 28), np.uint8), batch=3)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"epoch": 3}, "got 'epoch'. Did you mean 'epochs'"),
        ({"learning_rate": 1}, "Did you mean 'lr'"),
        ({"num_workers": 1}, "Did you mean 'workers'"),
        ({"bs": 8}, "got 'bs'. Did you mean 'batch'"),
        ({"num_train_epochs": 3}, "Did you mean 'epochs'"),
        ({"img_size": 8}, "Did you mean 'resolution'"),
        ({"optimizer": "sgd"}, r"got 'optimizer'. It is a setting of recipes: settings=\{'optimiser': 'sgd'\}"),
        ({"early_stopping": 3}, "got 'early_stopping'. Did you mean 'patience'"),
        ({"weight_decay": 0.1}, r"got 'weight_decay'. It is a setting of recipes: settings=\{'weight_decay': 0.1\}"),
        ({"wd": 0.1}, r"got 'wd'. It is a setting of recipes: settings=\{'weight_decay': 0.1\}"),
        ({"clip": 1.0}, r"settings=\{'clip': 1.0\}"),
        ({"lr": 0.1, "settings": {"learning_rate": 1}}, "must be given once, got lr and the setting learning_rate."),
        ({"settings": {"clop": 1}}, "Setting must be a key of a recipe, got 'clop'"),
        ({"settings": "clip"}, "Setting must be KEY=VALUE"),
        ({"steps": 1, "epochs": 2}, "Length must be one of epochs, steps and minutes, got"),
        ({"recipe": Recipe()}, "Length must be given: epochs, steps or minutes."),
        ({"recipe": "large"}, "Recipe must be one of"),
        ({"steps": 1, "resolution": "8x8"}, "Resolution must be an integer or a pair"),
        ({"steps": 1, "resume": True}, "Resume must be used with an output"),
        ({"steps": 1, "snapshots": 3}, "Snapshots must be used with an output"),
        ({"steps": 1, "patience": 0}, "Patience must be an integer from 1"),
        ({"steps": 1, "threads": 0}, "Threads must be an integer"),
        ({"steps": 1, "callback": 3}, "Callback must be a function of one argument, the Step, got 3."),
        (
            {"steps": 1, "callback": lambda: None},
            r"Callback must be a function of one argument, the Step, got <lambda>\(\)",
        ),
    ],
)
def test_invalid_keywords_of_train_and_finetune_are_rejected(digits, keywords, message):
    for run in (
        lambda: vitrail.train(digits, "ViT-Pico/2", **keywords),
        lambda: vitrail.finetune("fashion", digits, **keywords),
    ):
        with pytest.raises(UsageError, match=message):
            run()


def test_train_rejects_an_existing_model_and_names_finetune(digits):
    with pytest.raises(UsageError, match=r"got ViT. To train an existing model, use vitrail.finetune\(") as raised:
        vitrail.train(digits, vitrail.create("ViT-Pico/2"), steps=1)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"protocol": "kn"}, "Protocol must be one of classify, knn, probe, fewshot, got 'kn'. Did you mean 'knn'"),
        ({"protocol": None}, "Protocol must be one of .* got None"),
        ({"shots": [5]}, "Shots must be used with protocol fewshot, got classify."),
    ],
)
def test_invalid_protocols_of_evaluate_are_rejected(digits, keywords, message):
    with pytest.raises(UsageError, match=message):
        vitrail.evaluate("fashion", digits, **keywords)


@pytest.mark.parametrize(
    "head", [torch.nn.Linear(47, 10), torch.nn.Sequential(torch.nn.Linear(48, 10), torch.nn.Flatten())]
)
@pytest.mark.parametrize("classes", [10, 2])
def test_finetune_rejects_a_head_that_bundles_cannot_store(digits, trained, head, classes):
    model = copy.deepcopy(trained.bundle.model)
    bundle = dataclasses.replace(trained.bundle, model=model)
    model.head = head
    with pytest.raises(UsageError, match=r"Head must be layers of torch\.nn"):
        vitrail.finetune(bundle, (digits[0], digits[1] % classes), **QUICK)


def test_values_that_are_not_bundles_are_rejected(digits):
    for run in (
        lambda: vitrail.finetune(3, digits),
        lambda: vitrail.evaluate(None, digits),
        lambda: vitrail.predict(digits, digits[0]),
    ):
        with pytest.raises(UsageError, match=r"Bundle must be a path, a name or a vitrail\.Bundle, got"):
            run()


def test_bundle_in_memory_is_unchanged_and_equals_its_folder(digits, tmp_path, trained):
    before = weights(trained.bundle)
    tuned = vitrail.finetune(trained.bundle, digits, lr=0.1, **QUICK)
    assert any((tensor != before[name]).any() for name, tensor in weights(tuned.bundle).items())
    for name, tensor in weights(trained.bundle).items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert tuned.bundle.provenance["finetuned_from"]["bundle"] == "in memory"
    vitrail.save(trained.bundle, tmp_path / "bundle")
    for data in (digits, open_data(digits)):
        in_memory, on_disk = (
            vitrail.evaluate(bundle, data, protocol="knn") for bundle in (trained.bundle, tmp_path / "bundle")
        )
        assert in_memory.scores["confusion"] == on_disk.scores["confusion"]
        assert in_memory.ece == pytest.approx(on_disk.ece)
    changed = dataclasses.replace(trained.bundle, labels=tuple("abcdefghij"))
    assert len({bundle.fingerprint() for bundle in (trained.bundle, changed, tuned.bundle)}) == 3
    assert vitrail.load(tmp_path / "bundle").fingerprint() == trained.bundle.fingerprint()
    # A run can be resumed only with the bundle that it started from.
    frozen = {"recipe": "frozen", "output": tmp_path / "run", "workers": 0, "steps": 1}
    vitrail.finetune(trained.bundle, digits, **frozen)
    vitrail.finetune(trained.bundle, digits, resume=True, **frozen)
    with pytest.raises(UsageError, match="Resumed run must have the bundle that it started with"):
        vitrail.finetune(tuned.bundle, digits, resume=True, **frozen)


@pytest.mark.parametrize("function", [vitrail.predict, vitrail.evaluate])
def test_functions_restore_the_training_mode_of_every_module(digits, trained, function):
    model = copy.deepcopy(trained.bundle.model).train()
    model.norm.eval()  # frozen by hand
    bundle = dataclasses.replace(trained.bundle, model=model)
    data = digits[0] if function is vitrail.predict else digits
    modes = [module.training for module in model.modules()]
    seen = []
    model.blocks[0].register_forward_hook(lambda block, *_: seen.append(block.training))
    function(bundle, data)
    assert [module.training for module in model.modules()] == modes
    assert seen
    assert not any(seen)

    def fail(*_):
        raise RuntimeError("a batch that fails")

    model.blocks[0].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a batch that fails"):
        function(bundle, data)
    assert [module.training for module in model.modules()] == modes


def test_numpy_integers_are_accepted(digits, tmp_path, trained):
    three = np.int64(3)
    model = vitrail.create("ViT-Pico/2", classes=three, resolution=(np.int32(8), np.uint8(12)), channels=np.int64(1))
    assert (model.config.classes, model.config.resolution) == (3, (8, 12))
    json.dumps(model.config.to_document())
    model.reset_classifier(np.int64(2))
    assert type(model.config.classes) is int
    model.head = torch.nn.Linear(model.head_width, three)
    assert (model.config.classes, type(model.config.classes)) == (3, int)
    assert vitrail.Preprocess(resolution=np.int64(8)).resolution == (8, 8)
    assert vitrail.create("ResNet-Pico", layers=np.array([1, 1, 1]).tolist(), classes=three).config.classes == 3
    keywords = {"steps": np.int64(2), "batch": np.int64(16), "workers": np.int64(0), "seed": np.int64(4)}
    keywords |= {"resolution": np.int64(8), "settings": {"model.depth": np.int64(2), "per_class": np.int32(5)}}
    result = vitrail.train(digits, "ViT-Pico/2", output=tmp_path / "run", **keywords)
    assert (result.steps, result.bundle.model.config.depth) == (2, 2)
    plain = {"steps": 2, "batch": 16, "workers": 0, "seed": 4, "settings": {"model.depth": 2, "per_class": 5}}
    same = vitrail.train(digits, "ViT-Pico/2", **plain)
    assert all(torch.equal(value, expected) for value, expected in zip(*map(_values, (result, same)), strict=True))
    evaluation = vitrail.evaluate(
        trained.bundle,
        digits,
        "val",
        protocol="fewshot",
        shots=np.array([1, 2]),
        seeds=np.int64(2),
        cache=tmp_path,
        layer=np.int64(-1),
    )
    json.dumps(evaluation.scores)
    assert [row["shots"] for row in evaluation.scores["shots"]] == [1, 2]
    evaluation = vitrail.evaluate(trained.bundle, digits, protocol="knn", neighbours=np.int64(3), cache=tmp_path)
    assert json.loads(json.dumps(evaluation.scores))["neighbours"] == 3
    assert len(vitrail.predict(trained.bundle, digits[0][:1], top_k=np.int64(2))[0].classes) == 2
    for wrong in (True, np.True_, 3.0, np.float64(3), "3", None):
        with pytest.raises(UsageError, match="Classes must be an integer"):
            vitrail.create("ViT-Pico/2", classes=wrong)


def _values(result):
    return weights(result.bundle).values()


def test_train_restores_torch_seed_and_threads(digits, tmp_path):
    before = torch.get_num_threads()
    state = torch.get_rng_state()
    vitrail.train(digits, "ViT-Pico/2", output=tmp_path / "run", threads=before + 1, **QUICK)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)
    vitrail.train(digits, "ViT-Pico/2", output=tmp_path / "run", resume=True, **QUICK)  # with the threads it began with
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="no more"):
        vitrail.train(digits, "ViT-Pico/2", threads=before + 1, callback=_fail, **QUICK)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def _fail(_):
    raise RuntimeError("no more")


def test_predict_function_equals_predict_command(call, digits, tmp_path, trained):
    vitrail.save(trained.bundle, tmp_path / "bundle")
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        Image.fromarray(digits[0][number, ..., 0]).save(folder / f"{number}.png")
    (folder / "3.png").write_bytes(b"no image")
    done = call("predict", tmp_path / "bundle", folder, "--json", "--top-k", 2)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    predictions = vitrail.predict(tmp_path / "bundle", folder, top_k=2)
    assert [prediction.file for prediction in predictions] == [line["file"] for line in lines]
    for prediction, line in zip(predictions[:3], lines[:3], strict=True):
        assert prediction.classes == tuple((entry["label"], entry["score"]) for entry in line["predictions"])
        assert (prediction.label, prediction.score, prediction.error, len(prediction.classes)) == (
            *prediction.classes[0],
            None,
            2,
        )
    assert (predictions[3].label, predictions[3].score, predictions[3].error) == (None, None, lines[3]["error"])
    (alone,) = vitrail.predict(trained.bundle, [folder / "1.png"], top_k=2, engine="auto")
    arrays = vitrail.predict(trained.bundle, digits[0][:3], top_k=2)
    for prediction, other in zip(
        [alone, *arrays], [predictions[1], *predictions[:3]], strict=True
    ):  # other batches, other last bits
        assert [label for label, _ in prediction.classes] == [label for label, _ in other.classes]
        assert [score for _, score in prediction.classes] == pytest.approx(
            [score for _, score in other.classes], rel=1e-5
        )
    assert alone.file == str(folder / "1.png")
    assert [prediction.file for prediction in arrays] == ["image 0", "image 1", "image 2"]
    mixed = [folder / "0.png", digits[0][1], Image.open(folder / "2.png"), (folder / "0.png").read_bytes()]
    assert [prediction.label for prediction in vitrail.predict(trained.bundle, mixed)] == [
        predictions[n].label for n in (0, 1, 2, 0)
    ]
    assert repr(arrays[0]).startswith("Prediction(file='image 0', label=")
    paths = [str(folder / f"{number}.png") for number in range(3)]
    for images_of_paths in (np.array(paths), np.array([*map(Path, paths)], object)):
        assert [prediction.label for prediction in vitrail.predict(trained.bundle, images_of_paths)] == [
            prediction.label for prediction in predictions[:3]
        ]
    assert vitrail.predict(trained.bundle, torch.from_numpy(digits[0][:3]), top_k=2) == arrays
    assert vitrail.predict(trained.bundle, digits[0][:3, ..., 0], top_k=2) == arrays
    for images, message in (
        *((digits[0].astype(kind), f"uint8 .* got {kind} ") for kind in ("float32", "int64", "bool", "uint16")),
        (torch.from_numpy(digits[0]).float(), "images must be uint8 .* got float32 of shape \\(80, 8, 8, 1\\)"),
        (np.zeros((2, 3, 8, 8), np.uint8), "images must have channels last, got shape \\(2, 3, 8, 8\\)"),
        (np.zeros((2, 3, 8, 12), np.uint8), "uint8 of shape .* got uint8 of shape \\(3, 8, 12\\)"),
        ([], "Images must be given"),
        (digits[0][0], "got one array of shape \\(8, 8, 1\\). Put it in brackets"),
        ("nowhere.png", "Image must be a file or folder that exists"),
    ):
        with pytest.raises(UsageError, match=message):
            vitrail.predict(trained.bundle, images)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_drawn_in_a_terminal_and_on_request(digits, monkeypatch, capfd):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    vitrail.train(digits, "ViT-Pico/2", **QUICK)
    assert "2/2" in terminal.getvalue()
    assert "━" in terminal.getvalue()
    monkeypatch.setattr("sys.stderr", quiet := Terminal())
    vitrail.train(digits, "ViT-Pico/2", quiet=True, **QUICK)
    assert quiet.getvalue() == ""
    monkeypatch.setattr("sys.stderr", pipe := io.StringIO())
    vitrail.train(digits, "ViT-Pico/2", quiet=False, **QUICK)
    assert "step 2/2  loss " in pipe.getvalue()
    assert capfd.readouterr() == ("", "")


class Shown:
    """A stand-in for the display of a notebook, which records its contents."""

    def __init__(self):
        self.states = []

    def display(self, content, *, raw, display_id):
        assert (raw, display_id) == (True, True)
        self.states.append([content])
        return types.SimpleNamespace(update=lambda content, raw: self.states[-1].append(content))


def test_progress_is_one_line_in_a_notebook(digits, monkeypatch, capfd):
    notebook = Shown()
    shell = types.SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=notebook.display))
    monkeypatch.setattr("vitrail.training.progress_line._NOTEBOOK_SECONDS", 0)
    vitrail.train(digits, "ViT-Pico/2", **(QUICK | {"steps": None, "epochs": 2}))
    (states,) = notebook.states
    assert [state["text/plain"].split("  ")[0] for state in states] == ["step 5/10", "step 10/10"]
    assert "held-out accuracy " in states[-1]["text/plain"]
    assert states[0]["text/html"].startswith('<progress value="0.5000"')
    out, err = capfd.readouterr()
    assert "70 images of 10 classes, 10 held out" in out  # stderr looks like an error there
    assert not err
    # An interactive shell in a terminal is a terminal; a display that fails ends nothing.
    shell.config = {}
    vitrail.train(digits, "ViT-Pico/2", **QUICK)
    assert (len(notebook.states), *capfd.readouterr()) == (1, "", "")
    shell.config = {"IPKernelApp": {}}
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace())
    vitrail.train(digits, "ViT-Pico/2", **QUICK)


def test_dataset_object_is_accepted_as_data(digits):
    dataset = open_data(digits)
    assert isinstance(dataset, Dataset)
    assert (dataset.name, dataset.labels, [*dataset.splits]) == ("arrays", tuple("0123456789"), ["all"])
    assert Path(open_data(([__file__] * 2, ["b", "a"])).root) == Path(__file__).parent


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vitrail.train("digits", "ViT-Pico/2", steps=1, output=5), "Output must be a path, got 5."),
        (lambda: vitrail.train("digits", "ViT-Pico/2", steps=1, quiet="no"), "Quiet must be True or False, got 'no'."),
        (
            lambda: vitrail.train("digits", "ViT-Pico/2", steps=1, settings=[1]),
            "Settings must have strings as keys, got 1.",
        ),
        (lambda: vitrail.train("digits", "ViT-Pico/2", steps=1, settings={1: 2}), "Settings must have strings as keys"),
        (lambda: vitrail.predict("fashion", "fashion-40", page=5), "Page must be a path, got 5."),
        (
            lambda: vitrail.predict("fashion", "fashion-40", sort="x"),
            "Sort must be one of uncertain, confident, got 'x'.",
        ),
        (lambda: vitrail.compare("digits", output="lab", budget=-1), "Budget must be a text, got -1."),
        (lambda: vitrail.convert(3, "out"), "Source must be a path, got 3."),
        (lambda: vitrail.runs(3), "Runs must be paths, got 3."),
        (lambda: vitrail.weights(3), "Pattern must be a text, got 3."),
        (lambda: vitrail.faces.enroll("fashion", "people.gallery", 3, "a.png"), "Name must be a text, got 3."),
    ],
)
def test_arguments_of_wrong_type_give_one_line(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        call()
    assert list(tmp_path.iterdir()) == []
