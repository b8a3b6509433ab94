"""The command line. Data goes to stdout, words about it to stderr; heavy imports wait until a command needs them."""

import contextlib
import functools
import io
import json
import os
import re
import shlex
import signal
import sys
import traceback
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import arg

from vitrail import __version__
from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.configs.bundle import EMBEDDED, check_folder, read_config
from vitrail.errors import UsageError, VitrailError, did_you_mean

DESCRIPTION = """The Vision Transformer, whole: define it, train it, look inside it, ship it.

Errors are one line; add --debug for the traceback. --version prints the version."""

Json = Annotated[bool, arg(help="Print one JSON document instead of a table.")]


BundlePath = Annotated[
    str,
    tyro.conf.Positional,
    arg(metavar="BUNDLE", help="A folder that train or save wrote, or fashion, the embedded one."),
]
Data = Annotated[
    str,
    tyro.conf.Positional,
    arg(
        metavar="DATA",
        help="A folder of class folders (perhaps in train, val, test), an idx folder, a .npz, a .csv, digits,"
        " fashion-40 or fashion-mnist.",
    ),
]


def models(*, json: Json = False) -> None:
    """List every model by its name, with parameters, multiply-accumulates and shapes."""
    rows = [config.info() for config in zoo.MODELS.values()]
    if json:
        return _print_json(rows)
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    return _print_table(headers, [[_cell(key, row[key]) for key in keys] for row in rows])


def info(
    model: Annotated[
        str, tyro.conf.Positional, arg(metavar="MODEL|BUNDLE", help="A name of `vitrail models`, or a bundle.")
    ],
    *,
    resolution: Annotated[str | None, arg(metavar="R", help="Input size: 384, or 224x384 for height x width.")] = None,
    classes: Annotated[int | None, arg(metavar="K", help="Number of classes.")] = None,
    channels: Annotated[int | None, arg(metavar="C", help="Input channels.")] = None,
    pool: Annotated[str | None, arg(metavar="P", help="What the head reads: cls, gap or map.")] = None,
    representation: Annotated[
        str | None, arg(metavar="W", help="Hidden layer of the head, for pre-training: none, tanh or gelu.")
    ] = None,
    json: Json = False,
) -> None:
    """What a model is and costs, by arithmetic alone: no weights are loaded."""
    config = _find_config(model)
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else _parse_resolution(resolution),
        "classes": classes, "channels": channels, "pool": pool, "representation": representation,
    }  # fmt: skip
    row = config.replace(**{key: value for key, value in changes.items() if value is not None}).info()
    if json:
        return _print_json(row)
    return _print_table(None, [[key, _cell(key, value)] for key, value in row.items()])


def doctor(
    data: Data,
    *,
    json: Json = False,
) -> None:
    """Look for what would spoil training: unreadable files, duplicates across splits, classes that do not fit.

    Exit code 1 if something would break training, 0 if there are warnings or nothing.
    """
    from vitrail.data.doctor import examine
    from vitrail.data.sources import open_data

    dataset = open_data(data)
    findings = examine(dataset)
    if json:
        _print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        _print_table(None, [["data", data], ["pictures", counts], ["classes", f"{len(dataset.labels):,}"]])
        for finding in findings:
            files = [os.path.relpath(file, dataset.root) if dataset.root else file for file in finding.files]
            rest = [f"... and {len(files) - 10:,} more (all with --json)"] if len(files) > 10 else []
            lines = [f"{finding.severity}  {finding.kind}: {finding.message}", *files[:10], *rest]
            sys.stdout.write("\n" + "\n    ".join(_printable(line) for line in lines) + "\n")
        if not findings:
            sys.stdout.write("\nnothing to complain about\n")
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)


def train(
    data: Data,
    *,
    model: Annotated[str, arg(metavar="NAME", help="A name of `vitrail models`.")],
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    recipe: Annotated[str, arg(metavar="R", help="A recipe of the package, or a .toml file.")] = "small",
    epochs: Annotated[int | None, arg(metavar="N", help="How often to see every training picture.")] = None,
    steps: Annotated[int | None, arg(metavar="N", help="Number of updates.")] = None,
    minutes: Annotated[
        float | None, arg(metavar="N", help="Time to spend; fixes a number of steps at the start.")
    ] = None,
    seed: Annotated[int, arg(metavar="S", help="Same seed, machine and threads: same weights.")] = 0,
    objective: Annotated[
        Literal["classify", "masked", "next-pixel"] | None,
        arg(help="Classes; the paper's masked patches (ViT); the next pixel (iGPT)."),
    ] = None,
    set: Annotated[
        tuple[str, ...],
        arg(metavar="KEY=VALUE", help="Any setting of the recipe: batch=64 augment.mixup=0.2 model.dropout=0.1 ..."),
    ] = (),
    resume: Annotated[
        Literal["auto"] | None, arg(help="Go on from the newest whole checkpoint of RUN, or begin if there is none.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite RUN if it is a run.")] = False,
    workers: Annotated[int, arg(metavar="N", help="Threads that prepare pictures.")] = 2,
    threads: Annotated[int | None, arg(metavar="N", help="Threads that compute.")] = None,
    device: Annotated[str, arg(metavar="D", help="cpu, cuda, ...; auto takes a GPU if there is one.")] = "auto",
    amp: Annotated[bool, arg(help="Compute in bfloat16 where that is safe (GPUs).")] = False,
    compile: Annotated[bool, arg(help="Compile the model first.")] = False,
    cache: Annotated[
        Path | None, arg(metavar="DIR", help="Keep decoded pictures there: later epochs need no JPEG work.")
    ] = None,
    cache_gigabytes: Annotated[float, arg(metavar="N", help="How large the cache may grow.")] = 10.0,
    checkpoint_seconds: Annotated[
        float, arg(metavar="N", help="A checkpoint after so many seconds, or at an epoch's end if that comes first.")
    ] = 30.0,
    keep: Annotated[int, arg(metavar="N", help="Checkpoints that stay, besides the best.")] = 2,
) -> None:
    """Train a model on your pictures. Kill it whenever you like: --resume auto ends with the same bits.

    Channels, classes and (small presets) resolution come from DATA. With torchrun, many processes share the work.
    """
    from vitrail.configs.recipe import change_recipe, find_recipe
    from vitrail.training.loop import Options
    from vitrail.training.run import train as run

    chosen = change_recipe(find_recipe(recipe), set)
    if objective is not None:
        chosen = chosen.replace(objective=objective)
    options = Options(
        seed=seed, workers=workers, threads=threads, device=device, amp=amp, compile=compile,
        cache=None if cache is None else str(cache), cache_gigabytes=cache_gigabytes,
        checkpoint_seconds=checkpoint_seconds, keep=keep,
    )  # fmt: skip
    zoo.find(model)
    run(
        data, model, output, chosen.with_length(epochs=epochs, steps=steps, minutes=minutes), options,
        resumes=resume == "auto", force=force, command=shlex.join(["vitrail", *sys.argv[1:]]),
    )  # fmt: skip


def evaluate(
    bundle: BundlePath,
    data: Data,
    *,
    split: Annotated[str | None, arg(metavar="S", help="train, val or test; else test, val or everything.")] = None,
    protocol: Annotated[
        Literal["classify", "knn", "probe", "fewshot"],
        arg(
            help="Classify: the bundle's own answers. The others learn DATA's classes from the frozen model's features"
            " of the train split: knn, a vote of the nearest; probe, logistic regression; fewshot, the paper's least"
            " squares from a few pictures of each class."
        ),
    ] = "classify",
    layer: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Features that leave this layer, from 0 or from the end (-1), [CLS] or the mean; else what the head"
            " reads.",
        ),
    ] = None,
    neighbours: Annotated[int | None, arg(metavar="K", help="knn: how many vote (20).")] = None,
    temperature: Annotated[
        float | None, arg(metavar="T", help="knn: a vote counts exp(similarity / T) (0.07); 0: all count the same.")
    ] = None,
    shots: Annotated[
        tuple[int, ...] | None, arg(metavar="K", help="fewshot: pictures of each class (1 5 10 25); then all.")
    ] = None,
    seeds: Annotated[int | None, arg(metavar="N", help="fewshot: draws of pictures for each number (5).")] = None,
    penalty: Annotated[
        float | None,
        arg(
            metavar="L", help="probe, fewshot: pull of weights to 0; else chosen on held-out pictures, by leaving out."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        arg(metavar="S", help="What is held out of data without splits, and drawn by probe and fewshot (0)."),
    ] = None,
    cache: Annotated[
        Path | None, arg(metavar="DIR", help="Where features are kept (~/.cache/vitrail/features); delete it at will.")
    ] = None,
    workers: Annotated[int, arg(metavar="N", help="Threads that prepare pictures.")] = 2,
    json: Json = False,
) -> None:
    """How good a bundle is on data: accuracy with its interval, top 5, calibration, each class, confusion."""
    from vitrail.evaluation.protocols import evaluate as judge

    scores = judge(
        bundle, data, split, protocol=protocol, workers=workers, layer=layer, neighbours=neighbours,
        temperature=temperature, shots=shots, seeds=seeds, penalty=penalty, seed=seed, cache=cache,
    )  # fmt: skip
    return _print_json(scores) if json else _print_scores(scores)


def _print_scores(scores: dict[str, Any]) -> None:
    """What people want of a protocol's scores, the worst classes first."""
    matched = f"; classes matched {scores['labels_matched']}" if "labels_matched" in scores else ""
    rows = [["data", f"{scores['data']} ({scores['split']}, {scores['count']:,} pictures{matched})"]]
    if "features" in scores:
        place = "what the head reads" if scores["layer"] is None else f"layer {scores['layer']}, {scores['pooling']}"
        again = "; remembered" if scores["cached"] else ""
        rows.append(
            ["learned from", f"{scores['train_count']:,} pictures, {scores['features']} features ({place}{again})"]
        )
    if scores.get("penalty") is not None:
        rows.append(["penalty", f"{scores['penalty']:.3g}"])
    low, high = scores["accuracy_interval"]
    rows += [
        ["accuracy", f"{scores['accuracy']:.2%} (95 % interval {low:.2%} to {high:.2%})"],
        ["top 5", f"{scores['top5']:.2%}"],
    ]
    if scores["ece"] is not None:
        rows.append(["calibration error", f"{scores['ece']:.3f}"])
    _print_table(None, rows)
    for note in scores.get("notes", ()):
        sys.stderr.write(f"note: {_printable(note)}\n")
    if "shots" in scores:
        sys.stdout.write("\n")
        rows = [[f"{row['shots']}", f"{row['train_count']:,}", *_mean_cells(row)] for row in scores["shots"]]
        rows.append(
            ["all", f"{scores['train_count']:,}", f"{scores['accuracy']:.2%}", f"{low:.2%} to {high:.2%} (Wilson)"]
        )
        _print_table(("of each class", "pictures", "accuracy", f"95 % interval ({scores['seeds']} draws)"), rows)
    sys.stdout.write("\n")
    worst = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["accuracy"])
    rows = [[row["label"], f"{row['right']:,}", f"{row['count']:,}", f"{row['accuracy']:.1%}"] for row in worst[:20]]
    _print_table(("class (worst first)", "right", "of", "accuracy"), rows)


def _mean_cells(row: dict[str, Any]) -> list[str]:
    interval = row["accuracy_interval"]
    return [f"{row['accuracy']:.2%}", "-" if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"]


def predict(
    bundle: BundlePath,
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(
            metavar="FILE|DIR|GLOB|-",
            help="Pictures, folders of them, quoted patterns such as 'photos/**/*.jpg', or - for names from stdin,"
            " one a line.",
        ),
    ],
    *,
    top_k: Annotated[int, arg(metavar="K", help="How many classes to name for each picture.")] = 5,
    engine: Annotated[
        Literal["torch", "onnx", "auto"],
        arg(
            help="What computes. Onnx starts several times faster: it runs a file that is made on first request,"
            " checked against torch and kept beside BUNDLE. Auto: the faster of both, measured once."
        ),
    ] = "torch",
    threads: Annotated[int | None, arg(metavar="N", help="Threads that decode and compute; else every core.")] = None,
    jpeg: Annotated[
        Literal["exact", "double"] | None,
        arg(help="Decode JPEG files exactly, or large ones at a reduced scale, much faster; else as BUNDLE says."),
    ] = None,
    features: Annotated[
        Path | None, arg(metavar="OUT.npz", help="Also write what the head reads: arrays `files` and `features`.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite OUT.npz.")] = False,
    json: Annotated[bool, arg(help="Print a JSON line for each picture instead of a table.")] = False,
) -> None:
    """Name what is on pictures. A file that cannot be read is named, the others are answered; then exit code 1."""
    from vitrail.classifier import Classifier, check_features_file, write_features
    from vitrail.data.sources import find_pictures
    from vitrail.engines.base import cores
    from vitrail.engines.choose import faster

    if features is not None:
        check_features_file(features, force=force)
    paths = find_pictures(files, (os.fsdecode(line).rstrip("\r\n") for line in getattr(sys.stdin, "buffer", ())))
    chosen = faster(bundle, len(paths), threads or cores()) if engine == "auto" else engine
    classifier = Classifier(bundle, engine=chosen, threads=threads, jpeg=jpeg)
    show = _print_json if json else _prediction_table(paths, classifier.labels)
    found, is_damaged = [], False
    for answer in classifier.stream(paths, top_k=top_k, features=features is not None):
        if "features" in answer:
            found.append((answer["file"], answer.pop("features")))
        is_damaged |= "error" in answer
        show(answer)
        sys.stdout.flush()
    if features is not None:
        write_features(features, found, force=force)
    if is_damaged:
        sys.exit(1)


def demo(
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write.")] = Path("demo"),
    epochs: Annotated[int, arg(metavar="N", help="How often to go through the training digits.")] = 100,
    seed: Annotated[int, arg(metavar="S", help="Same seed, same machine, same model.")] = 0,
    force: Annotated[bool, arg(help="Overwrite the output if it is a run.")] = False,
    open: Annotated[bool, arg(help="Open the report in a browser.")] = False,
) -> None:
    """Train a small Vision Transformer on 1,437 embedded digits, test it on 360 others, and look where it looks."""
    from vitrail.demo import run

    run(output, epochs=epochs, seed=seed, force=force, opens=open)


COMMANDS: dict[str, Callable[..., None]] = {
    "models": models, "info": info, "doctor": doctor, "train": train,
    "evaluate": evaluate, "predict": predict, "demo": demo,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with the contract's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    _prepare_streams()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if words[0] == "--version":
            sys.stdout.write(f"vitrail {__version__}\n")
        else:
            _parse(words)()
        sys.stdout.flush()
    except VitrailError as error:
        if debug:
            traceback.print_exc()
        _leave(str(error), error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BrokenPipeError:
        # The reader has left (`| head`): nothing more to say.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - what is buffered must not be flushed at exit
        sys.exit(0)
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        if debug:
            traceback.print_exc()
        _leave(f"{error.filename or 'Standard output'} cannot be used ({error.strerror}).", 1)


def _prepare_streams() -> None:
    """Closed streams swallow what is written; a terminal that lacks a character shows a substitute."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _parse(words: list[str]) -> Callable[[], None]:
    """Turn words into a call. tyro explains mistakes in a box; we say them in one line."""
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        _leave(f"Command must be one of {known}, got {words[0]!r}.{did_you_mean(words[0], COMMANDS)}", 2)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                {name: _delayed(command) for name, command in COMMANDS.items()},
                prog="vitrail", description=DESCRIPTION, args=words, sort_subcommands=False,
            )  # fmt: skip
    except SystemExit as leaving:
        if leaving.code != 2:
            raise
        _leave(_in_one_line(complaint.getvalue()), 2)


def _delayed(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The same signature, but the call comes later: what the command prints must not be caught as a complaint."""

    @functools.wraps(command)
    def parsed(*positional: Any, **named: Any) -> Callable[[], None]:
        return functools.partial(command, *positional, **named)

    parsed.__annotations__ = {**command.__annotations__, "return": Callable[[], None]}
    return parsed


def _in_one_line(box: str) -> str:
    """The message inside one of tyro's boxes, without frame, rules and pointers to the help."""
    inside = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in box.splitlines()]
    words = " ".join(line for line in inside if line and not re.search(r"─{3,}", line))
    words = re.split(r"For full helptext|Argument helptext|Arguments similar to|Perhaps you meant", words)[0]
    if wrong := re.match(r"Error parsing (\S+): .*?(?:instantiated from \[|base 10: )(.+?)\]?(?:\. |\s*$)", words):
        words = f"{wrong[1]} must be a whole number, got {wrong[2]}"
    elif missing := re.match(r"Missing from (.+?): (\S+)", words):
        words = f"{missing[1]} needs {missing[2]}"
    return re.sub(r"\s+", " ", words).strip().rstrip(".:") + ". See --help."


def _find_config(model: str) -> ModelConfig:
    """The configuration behind a name, or else of the bundle at a path."""
    if model in zoo.MODELS:
        return zoo.MODELS[model]
    try:
        exists = model in EMBEDDED or (bool(model) and Path(model).exists())
    except (OSError, ValueError):  # no file can have such a name
        exists = False
    if exists:
        return read_config(check_folder(model))
    raise UsageError(
        f"Model must be a name that `vitrail models` lists, or a bundle that exists, got {model!r}."
        f"{did_you_mean(model, zoo.MODELS)}"
    )


def _parse_resolution(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def _print_table(headers: Sequence[str] | None, rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*(headers or ()), box=None, pad_edge=False, show_header=headers is not None)
    for row in rows:
        table.add_row(*map(Text, row))  # names are text, not markup
    # Piped output has no width of its own: never cut it.
    console = Console(width=None if sys.stdout.isatty() else 200)
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write(captured.get())


def _prediction_table(paths: Sequence[str], labels: Sequence[str]) -> Callable[[dict[str, Any]], None]:
    """A function that prints a line of the table. Widths are known before the first answer is."""
    first = max(_columns(_printable(path)) for path in paths)
    second = min(max(map(_columns, labels)), 40) + len(" 0.123")

    def show(answer: dict[str, Any]) -> None:
        words = [f"{one['label']} {one['score']:.3f}" for one in answer.get("predictions", ())]
        cells = [f"error: {answer['error']}", ""] if "error" in answer else [words[0], ", ".join(words[1:])]
        file, best, rest = map(_printable, (answer["file"], *cells))
        gaps = [" " * max(wide - _columns(text), 0) for wide, text in ((first, file), (second, best))]
        sys.stdout.write(f"{file}{gaps[0]}  {best}{gaps[1]}  {rest}".rstrip() + "\n")

    return show


def _columns(text: str) -> int:
    """How wide a text is on a terminal."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def _printable(text: str) -> str:
    """Names of files may hold line breaks and worse."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _cell(key: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case [height, width]:
            return f"{height}x{width}"
        case int():
            return f"{value:,}"
    return str(value)


def _leave(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"vitrail: {message}\n")
    sys.exit(code)
