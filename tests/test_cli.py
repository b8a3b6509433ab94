"""The command line: output, exit codes, one-line errors, and commands that do not import torch."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import vitrail
from tests.paths import FIXTURES
from tests.processes import start_vitrail
from vitrail.api.commands import COMMANDS, Group
from vitrail.cli import _arguments, _busy_share, _flags
from vitrail.core.errors import MissingError
from vitrail.core.other_tools import _SYNONYMS, OTHER_COMMANDS
from vitrail.core.terminal import escape_unprintable, json_text
from vitrail.models.config import INFO_KEYS
from vitrail.models.zoo import MODELS
from vitrail.training.checkpoint import load_newest
from vitrail.training.options import Options
from vitrail.training.recipe import change_recipe, find_recipe, recipe_names, setting_keys

FIXTURE = FIXTURES / "bundle-format-1"


def run(*words, **options):
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert "internal error" not in done.stderr
    return done


def test_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"vitrail {vitrail.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], [], ["info", "--help"], ["models", "--help"], ["demo", "--help"]])
def test_help_goes_to_stdout(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: vitrail")
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["models"], ["info", "ViT-G/14"], ["info", FIXTURE], ["recipes"]])
def test_listing_commands_import_no_torch(arguments):
    script = (
        "import sys\nfrom vitrail.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as leaving:\n    assert not leaving.code, leaving.code\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'PIL', 'safetensors')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_doctor_imports_no_torch():
    script = "import sys\nfrom vitrail.cli import main\nmain(['doctor', 'digits'])\nsys.exit('torch' in sys.modules)\n"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_models_lists_every_model_with_infos_keys(call):
    rows = json.loads(call("models", "--json").stdout)
    assert [row["name"] for row in rows] == list(MODELS)
    assert all(tuple(row) == INFO_KEYS for row in rows)
    table = call("models").stdout
    assert all(name in table for name in MODELS)


@pytest.mark.parametrize(("columns", "left_out"), [(40, "MACs"), (80, "patch"), (120, None)])
def test_names_and_counts_of_models_are_complete_in_narrow_terminals(call, monkeypatch, columns, left_out):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = re.sub(r"\x1b\[\d+m", "", call("models").stdout).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(MODELS)
    assert [line.split()[2] for line in lines[1:]] == [f"{config.parameters:,}" for config in MODELS.values()]
    assert max(map(len, lines)) <= columns
    assert (left_out or "never") not in lines[0]


def test_info_as_json(call):
    row = json.loads(call("info", "ViT-B/16", "--json").stdout)
    assert row == {
        "name": "ViT-B/16",
        "family": "vit",
        "parameters": 86_567_656,
        "macs": 17_563_828_224,
        "tokens": 197,
        "grid": [14, 14],
        "patch": [16, 16],
        "resolution": [224, 224],
        "width": 768,
        "depth": 12,
        "heads": 12,
        "classes": 1000,
        "channels": 3,
    }


def test_info_with_changes(call):
    options = [
        "--resolution",
        "384",
        "--classes",
        "21843",
        "--channels",
        "1",
        "--pool",
        "gap",
        "--representation",
        "tanh",
        "--json",
    ]
    row = json.loads(call("info", "ViT-B/16", *options).stdout)
    assert (row["tokens"], row["classes"], row["channels"]) == (576, 21_843, 1)
    config = MODELS["ViT-B/16"].replace(resolution=384, classes=21_843, channels=1, pool="gap", representation="tanh")
    assert (row["parameters"], row["macs"]) == (config.parameters, config.macs)
    row = json.loads(call("info", "ViT-B/16", "--resolution", "224x384", "--json").stdout)
    assert row["resolution"] == [224, 384]
    assert row["grid"] == [14, 24]


def test_info_of_a_bundle_and_a_name_that_is_also_a_path(tmp_path):
    row = json.loads(run("info", FIXTURE, "--json").stdout)
    assert (row["name"], row["parameters"], row["classes"]) == ("ViT-Pico/2", 2147, 3)
    (tmp_path / "ViT-B").mkdir()
    (tmp_path / "ViT-B" / "16").mkdir()
    assert run("info", "ViT-B/16", cwd=tmp_path).returncode == 0


TRAIN = ["train", "digits", "--model", "ViT-Pico/2", "--output", "x"]
WRONG = [
    (["bogus"], 2, f"Command must be one of {', '.join(COMMANDS)}, got 'bogus'."),
    (["model"], 2, "Did you mean 'models'?"),
    (["info"], 2, "vitrail info needs MODEL|BUNDLE"),
    (["info", "ViT-B/16", "--bogus"], 2, "Flag must be one that --help lists, got --bogus."),
    (["info", "ViT-B/16", "--classes", "many"], 2, "--classes must be an integer, got 'many'"),
    (["demo", "--epochs", "1.5"], 2, "--epochs must be an integer, got '1.5'"),
    (["info", "ViT-B/16", "--res", "384"], 2, "got --res."),
    (["info", "ViT-B/16", "--classes", "-1"], 2, "Classes must be an integer from 0 to 10,000,000, got -1."),
    (["info", "ViT-B/16", "--resolution", "wide"], 2, "Resolution must be a number such as 384"),
    (["info", "ViT-B/16", "--resolution", "225"], 2, "Use 224 or 240."),
    (["info", "ViT-B/16", "--pool", "max"], 2, "Pool must be one of cls, gap, map, got 'max'."),
    (["info", "vit-base-patch16-224"], 2, "Did you mean 'ViT-B/16'?"),
    (["info", "runs/nowhere/bundle"], 2, "a bundle that exists, got 'runs/nowhere/bundle'"),
    (["info", __file__], 2, "Bundle must be a folder, got the file"),
    (["info", "a" * 300], 2, "or a bundle that exists"),
    (["info", ""], 2, "or a bundle that exists, got ''"),
    (["demo", "--output", Path(__file__) / "x"], 2, "Output must be in a folder that can be written"),
    (["demo", "--output", __file__, "--force"], 2, "Output must not exist yet, or must be a run of vitrail"),
    (["demo", "--epochs", "0"], 2, "Epochs must be an integer from 1"),
    (["demo", "--output", FIXTURE], 2, "Choose another path, or move it away."),
    (["convert", "fashion", Path(__file__).parent], 2, "Choose another path, or move it away."),
    (["demo", "--resume", "--force"], 2, "A run must be resumed or overwritten, got both"),
    (
        [*TRAIN, "--steps", "1", "--resume", "--force"],
        2,
        "A run must be resumed or overwritten, got both --resume and --force",
    ),
    (["info", "ViT-B/16", "--resume"], 2, "Flag must be one that --help lists, got --resume."),
    (["train", "digits", "--modle", "ViT-Pico/2", "--output", "x"], 2, "got --modle. Did you mean '--model'?"),
    (["predict", "fashion", "x.png", "--top-k", "0"], 2, "Top k must be an integer from 1"),
    (["--hlep"], 2, "Did you mean '--help'?"),
    (["predict", "fashion", "x.png", "--topk", "3"], 2, "got --topk. Did you mean '--top-k'?"),
    (["evaluate", "fashion", "digits", "--neighbors=3"], 2, "Did you mean '--neighbours'?"),
    (["predict", "fashion", "x.png", "--jpeg", "tiny"], 2, "--jpeg must be one of double, exact, got 'tiny'."),
    ([*TRAIN, "--learning-rate", "3"], 2, "got --learning-rate. Did you mean '--lr'?"),
    ([*TRAIN, "--early-stopping", "3"], 2, "got --early-stopping. Did you mean '--patience'?"),
    (["info", "resnet50"], 2, "Did you mean 'BiT-R50x1'?"),
    (["info", "ResNet-Picco"], 2, "Did you mean 'ResNet-Pico'?"),
    (["info", "vit_base_patch17_224.mae"], 2, "or a bundle that exists, got 'vit_base_patch17_224.mae'."),
    (
        ["finetune", "ViT-Ti/16", "digits", "--output", "x"],
        2,
        "got 'ViT-Ti/16', the name of a model without weights. `vitrail weights` lists public ones, `vitrail convert`",
    ),
    ([*TRAIN, "--weight-decay", "0.1"], 2, "Did you mean '--set weight_decay'?"),
    ([*TRAIN, "--set", "lr=0.1"], 2, "Setting must be a key of a recipe, got 'lr'. Did you mean 'learning_rate'?"),
    ([*TRAIN, "--set", "mixup=0.1"], 2, "Did you mean 'augment.mixup'?"),
    ([*TRAIN, "--set", "pool=gap"], 2, "Did you mean 'model.pool'?"),
    ([*TRAIN, "--set", "token_mlp=3"], 2, "Did you mean 'model.token_mlp'?"),
    ([*TRAIN, "--lr", "fast"], 2, "--lr must be a number, got 'fast'."),
    ([*TRAIN, "--lr", "0"], 2, "Learning rate must be above 0, got 0."),
    ([*TRAIN, "--batch", "1.5"], 2, "--batch must be an integer, got '1.5'."),
    ([*TRAIN, "--lr", "0.1", "--lr", "0.2"], 2, "--lr must be given once, with all of its values, got it 2 times."),
    ([*TRAIN, "--set", "clip=1", "--set", "batch=8"], 2, "--set must be given once, with all of its values"),
    ([*TRAIN, "--set", "clip=1", "clip=2"], 2, "Setting 'clip' must be given once, got it twice."),
    ([*TRAIN, "--lr", "0.1", "--set", "learning_rate=0.1"], 2, "given once, got lr and the setting learning_rate."),
    (
        [*TRAIN, "--objective", "masked", "--set", "objective=classify"],
        2,
        "Objective must be given once, got objective",
    ),
    (
        [*TRAIN, "--resolution", "16", "--set", "model.resolution=8"],
        2,
        "Resolution must be given once, got resolution and the setting model.resolution.",
    ),
    ([*TRAIN, "--batch", "8", "--set", "batch=8"], 2, "Batch must be given once, got batch and the setting batch."),
    (
        ["finetune", FIXTURE, "digits", "--output", "x", "--batch", "8", "--set", "batch=8"],
        2,
        "got batch and the setting",
    ),
    (
        [*TRAIN, "--epochs", "1", "--set", "epochs=2"],
        2,
        "Epochs must be given once, got epochs and the setting epochs.",
    ),
    (["recipes", "smal"], 2, "Did you mean 'small'?"),
    (["recipes", "nowhere.toml"], 2, "or a .toml file that exists, got 'nowhere.toml'"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_use_is_one_line(call, arguments, code, message):
    done = call(*arguments)
    assert done.returncode == code
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("vitrail: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_only_defaults_that_are_values(call, command):
    text = " ".join(call(command, "--help").stdout.replace("│", " ").split())
    assert [mistake for mistake in ("default: None", "default: )", "{None") if mistake in text] == []


def test_help_is_a_command_too(call):
    assert call("help").stdout == call("--help").stdout
    assert call("help", "info").stdout == call("info", "--help").stdout


def test_error_about_a_folder_states_what_it_is(call, tmp_path):
    (tmp_path / "run" / "bundle").mkdir(parents=True)
    (tmp_path / "run" / "bundle" / "config.json").write_text("{}")
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm" / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "inspect.json").write_text("{}")
    for name, message in (
        ("run", f"Did you mean '{tmp_path}/run/bundle'?"),
        ("timm", f"vitrail convert {tmp_path}/timm NEW"),
        ("inside", "which `vitrail inspect` wrote"),
    ):
        done = call("predict", tmp_path / name, __file__)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert message in done.stderr
    assert "Did you mean 'fashion'?" in call("predict", "fashon", __file__).stderr


def test_paths_are_suggested_before_names_of_the_catalogue(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "bundle").mkdir(parents=True)
    (tmp_path / "dinov2-s15.lvd").mkdir()
    for folder in ("run/bundle", "dinov2-s15.lvd"):
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "ruin").mkdir()  # no bundle
    (tmp_path / "weights.safetensors").write_bytes(b"")
    for arguments, near in (
        (["predict", "rnu", __file__], "run/bundle"),
        (["predict", "rnu/bundle", __file__], "run/bundle"),
        (["predict", "run/bundel", __file__], "run/bundle"),
        (["predict", tmp_path / "rum", __file__], f"{tmp_path}/run/bundle"),
        (["info", "dinov2-s1.lvd"], "dinov2-s15.lvd"),
        (["predict", "dinov2-s14.lvd", __file__], "dinov2-s15.lvd"),
        (["predict", "dinov2-s14.lvd142", __file__], "dinov2-s15.lvd"),
        (["convert", "weight.safetensor", "new"], "weights.safetensors"),
        (["convert", "deit-ti16.in1", "new"], "deit-ti16.in1k"),
    ):
        done = call(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.endswith(f" Did you mean '{near}'?\n"), done.stderr
    for arguments in (["predict", "zebra", __file__], ["info", "x" * 300], ["predict", "no/such/run", __file__]):
        assert "Did you mean" not in call(*arguments).stderr


def test_patterns_without_a_star_match_prefixes(call):
    assert call("models", "vit-b").stdout == call("models", "ViT-B*").stdout != ""
    assert call("weights", "dino").stdout == call("weights", "dino*").stdout != ""
    assert call("weights", "vit-b16.in21k").stdout.count("\n") < call("weights", "vit-b16").stdout.count("\n")


# Flags that users of other tools try first, and the suggestion for each.
OF_OTHER_TOOLS = [
    *[
        (["train", "digits", flag, "3"], f"got {flag}. Did you mean '{ours}'?")
        for flag, ours in (
            ("--img-size", "--resolution"), ("--imgsz", "--resolution"), ("--image-size", "--resolution"),
            ("--input-size", "--resolution"), ("--num-epochs", "--epochs"), ("--num-train-epochs", "--epochs"),
            ("-e", "--epochs"), ("-b", "--batch"), ("--batch-size", "--batch"), ("--batchsize", "--batch"),
            ("--per-device-train-batch-size", "--batch"), ("--lr0", "--lr"), ("-lr", "--lr"), ("-o", "--output"),
            ("--save-dir", "--output"), ("--project", "--output"), ("-j", "--workers"), ("--num-workers", "--workers"),
            ("--arch", "--model"), ("--bf16", "--precision"), ("--no-cuda", "--device"), ("--wd", "--set weight_decay"),
            ("--opt", "--set optimiser"), ("--clip-grad", "--set clip"), ("--sched", "--set schedule"),
            ("--drop-path-rate", "--set model.drop_path"), ("--mixup", "--set augment.mixup"),
            ("--model-ema", "--set average"), ("--gradient-accumulation-steps", "--set accumulate"),
        )
    ],
    *[
        (["train", "digits", flag, "photos"], f"got {flag}. Give it without a flag: vitrail train DATA")
        for flag in ("--data", "--data-dir", "--data-path", "--dataset", "--train-dir", "-d")
    ],
    (["train", "digits", "--num-classes", "3"], "The classes are those of the data or of the bundle."),
    (["train", "digits", "--pretrained"], "`vitrail finetune` starts from weights"),
    (["train", "data=photos", "epochs=3"], "got data=photos. Give it without a flag: vitrail train DATA"),
    (["train", "digits", "epochs=3"], "got epochs=3. Did you mean '--epochs'?"),
    (["train", "digits", "--set", "batch_size=3"], "vitrail train needs --model"),
    ([*TRAIN, "--set", "batch_size=3"], "Setting must be a key of a recipe, got 'batch_size'. Did you mean 'batch'?"),
    (["finetune", "--model", "x"], "got --model. Give it without a flag: vitrail finetune BUNDLE DATA"),
    (["predict", "fashion", "--source", "x"], "Give it without a flag: vitrail predict BUNDLE FILE|DIR|GLOB|DATA|-"),
    (["predict", "fashion", "x.png", "--imgsz", "64"], "got --imgsz. The resolution is the bundle's."),
    (["predict", "fashion", "x.png", "-k", "3"], "got -k. Did you mean '--top-k'?"),
    (["predict", "fashion", "x.png", "--conf", "0.5"], "got --conf. Did you mean '--threshold'?"),
    (["info", "ViT-B/16", "--num-classes", "3"], "got --num-classes. Did you mean '--classes'?"),
    (["convert", "fashion", "x", "-o", "y"], "got -o. Give it without a flag: vitrail convert SRC DST"),
    (["faces", "enroll", "--name", "Kim"], "vitrail faces enroll BUNDLE GALLERY NAME IMAGES"),
    (["finetune", "fashion", "x", "--output", "y", "epochs=3"], "with dashes, as --epochs 3, got epochs=3"),
    ([*TRAIN, "--lr", "-inf"], "Learning rate must be a number of at least 0"),
    (["val"], "Did you mean 'evaluate'?"),
    (["faces", "fit"], "Did you mean 'train'?"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), OF_OTHER_TOOLS, ids=lambda value: str(value)[:60])
def test_flags_of_other_tools_get_a_suggestion(call, arguments, message):
    done = call(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_a_file_whose_name_looks_like_a_flag_of_another_tool_is_a_file(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img=1.png").write_bytes(b"")
    assert "'img=1.png' " in call("predict", "fashion", "img=1.png").stderr
    assert "got 'img=*.jpg', which matches none" in call("predict", "fashion", "img=*.jpg").stderr


def test_every_synonym_maps_to_an_existing_name():
    commands = [*COMMANDS.values(), *COMMANDS["faces"].commands.values()]
    commands = [command for command in commands if not isinstance(command, Group)]
    names = {flag[2:].replace("-", "_") for command in commands for flag in _flags(command)}
    names |= {name for command in commands for name in _arguments(command)} | setting_keys().keys()
    assert {name for synonyms in _SYNONYMS for name in synonyms if " " not in name} <= names
    theirs = [name for synonyms in _SYNONYMS.values() for name in synonyms.split()]
    assert len(theirs) == len({*theirs})
    assert {*OTHER_COMMANDS.values()} <= COMMANDS.keys()


def test_edited_bundle_gives_exit_code_1(call, tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "bundle")
    config = tmp_path / "bundle" / "config.json"
    config.write_text(config.read_text().replace('"mlp": 16', '"mlp": 17'))
    assert call("info", tmp_path / "bundle").returncode == 1
    (tmp_path / "bundle" / "manifest.json").unlink()
    done = call("info", tmp_path / "bundle")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("target", ["/dev/full", None])
def test_full_disk_at_stdout_gives_one_line(target):
    redirect = ">&-" if target is None else f"> {target}"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m vitrail models {redirect}"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if target is None else 1)


def test_corrupt_bundle_gives_exit_code_1(call, tmp_path):
    (tmp_path / "config.json").write_text('{"format": ')
    done = call("info", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is corrupt: it is not a JSON document" in done.stderr


def test_pipe_in_place_of_a_file_is_rejected(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "bundle")
    (tmp_path / "bundle" / "config.json").unlink()
    os.mkfifo(tmp_path / "bundle" / "config.json")
    done = run("info", tmp_path / "bundle", timeout=20)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_debug_shows_the_traceback_and_keeps_the_exit_code(call):
    done = call("info", "nothing", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_closed_stdout_is_not_an_error(flag):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "models", *flag], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_demo_gives_one_line_and_an_intact_checkpoint(tmp_path, sent, code):
    process = start_vitrail("demo", "--epochs", "600", "--output", tmp_path / "demo")
    while process.poll() is None and "\n" not in process.read_output()[1]:
        time.sleep(0.01)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert err.startswith("ViT-Pico/2")
    assert process.returncode == code
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("vitrail: stopped by SIG")
    checkpoint, complaints = load_newest(tmp_path / "demo" / "checkpoints")
    assert checkpoint.step > 0
    assert complaints == {}


def test_demo_trains_saves_predicts_and_draws(call, tmp_path):
    done = call("demo", "--epochs", "3", "--no-lab", "--output", tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "of 360; 95 % interval" in done.stdout
    bundle = vitrail.load(tmp_path / "demo" / "bundle")
    assert bundle.labels == tuple("0123456789")
    assert bundle.provenance["epochs"] == 3
    for name in ("attention.png", "fashion-attention.png"):
        with Image.open(tmp_path / "demo" / name) as figure:
            assert figure.width > 400
            assert len(figure.getcolors(1 << 20)) > 50
    assert "of 40 correct" in done.stdout
    assert len(list((tmp_path / "demo" / "images").glob("*.png"))) == 40
    assert call("demo", "--output", tmp_path / "demo").returncode == 2


@pytest.mark.slow
def test_demo_is_reproducible(tmp_path):
    for name in ("one", "other"):
        run("demo", "--epochs", "1", "--output", tmp_path / name)
    weights = [(tmp_path / name / "bundle" / "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] == weights[1]


# Errors that nobody foresaw


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("grid"), "internal error (KeyError): 'grid' (--debug shows where)"),
        (RuntimeError("first\nsecond"), "internal error (RuntimeError): first (--debug shows where)"),
        (AssertionError(), "internal error (AssertionError): AssertionError (--debug shows where)"),
        (OSError("a library's own"), "internal error (OSError): a library's own (--debug shows where)"),
    ],
)
def test_internal_error_gives_one_line(call, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(MODELS["ViT-Pico/2"].__class__, "info", fail)
    done = call("info", "ViT-Pico/2", internal=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"vitrail: {message}\n")
    done = call("info", "ViT-Pico/2", "--debug", internal=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith(f"vitrail: {message}\n")


# Text from outside


HOSTILE = "a\x9b31m\u202e\u2066b\u200b\u2028\u2029\udc80\x1b[2J\r\n\u3164é새"


def test_untrusted_text_is_escaped_and_shortened():
    escaped = "a\\x9b31m\\u202e\\u2066b\\u200b\\u2028\\u2029\\udc80\\x1b[2J\\r\\n\\u3164é새"
    assert escape_unprintable(HOSTILE) == escaped
    assert escape_unprintable("e\u0301 is fine") == "e\u0301 is fine"
    flood = escape_unprintable("e" + "\u0301" * 10_000)
    assert flood.startswith("e\u0301\u0301\u0301\u0301\\u0301\\u0301")
    assert len(flood) <= 1000
    long = escape_unprintable("begins " + "x" * 1_000_000 + " ends")
    assert len(long) <= 1000
    assert long.startswith("begins xxx")
    assert long.endswith("xxx ends")
    assert " ... (1,000,012 characters) ... " in long
    assert escape_unprintable("y" * 1000) == "y" * 1000


def test_json_escapes_unprintable_characters_without_changing_content():
    document = {"file": HOSTILE, "label": "\U000e0041 새 e\u0301" + "\u0301" * 50, "long": "x" * 5000}
    text = json_text(document)
    assert text.isprintable()
    assert "\\u009b31m\\u202e\\u2066b\\u200b\\u2028\\u2029\\udc80" in text
    assert "새" in text
    assert json.loads(text) == document
    assert json_text({"scores": [float("nan"), 1.5]}) == '{"scores": [null, 1.5]}'


def test_error_of_a_megabyte_is_shortened(call):
    done = call("info", "x" * 1_000_000)
    assert done.returncode == 2
    assert done.stderr.startswith("vitrail: Model must be a name that `vitrail models` lists")
    assert 900 < len(done.stderr) <= 1001


def test_tables_show_names_of_classes_as_text(call, tmp_path):
    strange = ("cat\x9b31m", "dog\u202egod", "새\x1b[2J")
    vitrail.save(dataclasses.replace(vitrail.load(FIXTURE), labels=strange), tmp_path / "bundle")
    for index, label in enumerate(strange):
        (tmp_path / "data" / label).mkdir(parents=True)
        Image.new("L", (9, 8), 80 * index).save(tmp_path / "data" / label / "0.png")
    for arguments in (["evaluate", tmp_path / "bundle", tmp_path / "data"], ["predict", tmp_path / "bundle", tmp_path]):
        done = call(*arguments)
        assert done.returncode == 0, done.stderr
        assert all(line.isprintable() for line in done.stdout.splitlines())
        assert "dog\\u202egod" in done.stdout
        done = call(*arguments, "--json")
        assert all(line.isprintable() for line in done.stdout.split("\n"))
        assert "dog\\u202egod" in done.stdout
        assert strange[1] in json.dumps(
            [json.loads(line) for line in done.stdout.split("\n") if line], ensure_ascii=False
        )


# Recipes and their settings


def test_recipes_are_listed_with_their_purpose(call):
    rows = json.loads(call("recipes", "--json").stdout)
    assert [row["name"] for row in rows] == recipe_names()
    assert all(20 < len(row["purpose"]) < 260 and row["purpose"].endswith(".") for row in rows)
    table = call("recipes").stdout
    assert all(row["name"] in table for row in rows)
    assert "DeiT (arXiv 2012.12877, Table 9), for ImageNet-size data" in table


def test_every_setting_of_a_recipe_has_a_value_a_default_and_a_meaning(call, tmp_path):
    document = json.loads(call("recipes", "paper-finetune", "--json").stdout)
    rows = {row["setting"]: row for row in document["settings"]}
    recipe = find_recipe("paper-finetune")
    plain = {name: value for name, value in recipe.to_json().items() if not isinstance(value, dict)}
    assert {name: rows[name]["value"] for name in plain} == plain
    assert {f"augment.{name}" for name in recipe.augment.to_json()} <= rows.keys()
    assert all(len(row["meaning"]) > 10 for row in rows.values())
    assert (rows["clip"]["value"], rows["clip"]["default"]) == (1.0, 0.0)
    assert rows["optimiser"]["meaning"].startswith("adamw, sgd, muon. ")
    assert (rows["preprocess.resize"]["value"], rows["model.resolution"]["value"]) == ("squash", 384)
    assert rows["model.dropout"]["value"] is None
    assert rows["model.token_mlp"]["meaning"].startswith("mixer: ")
    assert rows["model.patch"]["meaning"].startswith("vit, hybrid, mixer, lstm: ")
    assert rows["model.resolution"]["meaning"].startswith("Height and width")  # all families have it
    fields = {field.name for config in MODELS.values() for field in dataclasses.fields(config)}
    assert {f"model.{name}" for name in fields - {"name", "classes", "channels"}} <= rows.keys()
    for name, row in rows.items():  # what is listed can be set
        value = row["value"] if row["value"] is not None else row["default"]
        if value is not None:
            change_recipe(recipe, [f"{name}={json.dumps(value)}"])
    table = call("recipes", "paper-finetune").stdout
    assert all(name in table for name in rows)
    (tmp_path / "mine.toml").write_text("# Mine. And more.\nsteps = 3\n")
    document = json.loads(call("recipes", tmp_path / "mine.toml", "--json").stdout)
    assert document["purpose"] == "Mine."
    assert {row["setting"]: row["value"] for row in document["settings"]}["steps"] == 3


@pytest.mark.parametrize(
    "arguments", [["train", "digits", "--model", "ViT-Pico/2"], ["finetune", FIXTURE, "digits", "--recipe", "small"]]
)
def test_lr_batch_and_bare_resume_are_accepted(call, arguments, tmp_path):
    arguments = [*arguments, "--output", tmp_path / "run", "--steps", "2", "--lr", "0.003", "--batch", "16"]
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (settings["learning_rate"], settings["batch"]) == (0.003, 16)
    assert call(*arguments).returncode == 2
    done = call(*arguments, "--resume")
    assert (done.returncode, "resuming after step 2 of 2" in done.stderr) == (0, True), done.stderr
    done = call(arguments[0], "--resume", *arguments[1:])
    assert (done.returncode, "resuming after step 2 of 2" in done.stderr) == (0, True), done.stderr


# What a run remembers, what others may catch


def test_run_records_its_command_line(call, tmp_path):
    arguments = ["train", "digits", "--model", "ViT-Pico/2", "--output", str(tmp_path / "a run"), "--steps", "1"]
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    command = vitrail.load(tmp_path / "a run" / "bundle").provenance["command"]
    assert command == shlex.join(["vitrail", *arguments])
    assert (tmp_path / "a run" / "config.toml").read_text().startswith(f"# {command}\n")


def test_all_errors_are_subclasses_of_vitrail_error(monkeypatch):
    with pytest.raises(vitrail.VitrailError):
        vitrail.load("nowhere")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingError, match="needs the 'onnx' extra"):
        vitrail.Classifier(FIXTURE, engine="onnx")
    assert issubclass(MissingError, vitrail.VitrailError)
    assert issubclass(MissingError, ImportError)


@pytest.mark.parametrize("flag", [field.name.replace("_", "-") for field in dataclasses.fields(Options)])
def test_flag_without_its_last_letter_gets_a_suggestion(call, flag):
    done = call("train", "digits", "--model", "ViT-Pico/2", "--output", "run", f"--{flag[:-1]}", "1")
    assert done.returncode == 2
    assert f"Did you mean '--{flag}'?" in done.stderr


@pytest.mark.parametrize(
    ("user_policy", "busy", "expected"), [(None, 0.9, "passive"), (None, 0.1, None), ("active", 0.9, "active")]
)
def test_omp_threads_wait_passively_on_a_busy_machine(call, monkeypatch, user_policy, busy, expected):
    monkeypatch.setattr("vitrail.cli._busy_share", lambda: busy)
    monkeypatch.setenv("OMP_WAIT_POLICY", user_policy or "x")
    if user_policy is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    call("train", "nowhere", "--model", "ViT-Pico/2", "--output", "run")
    assert os.environ.pop("OMP_WAIT_POLICY", None) == expected
    assert 0 <= _busy_share(0.01) <= 1
