"""The commands of `vitrail`. Large packages are imported only by the commands that need them."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from vitrail import tasks
from vitrail.answers.formats import endings
from vitrail.configs import zoo
from vitrail.configs.base import INFO_KEYS, model_settings
from vitrail.configs.bundle import check_folder, find_config, read_config
from vitrail.configs.catalogue import list_published
from vitrail.configs.engines import PRECISIONS, TARGETS
from vitrail.configs.formats import FORMATS, written_formats
from vitrail.configs.lab import FAMILIES as COMPARED
from vitrail.configs.lab import QUESTIONS
from vitrail.configs.recipe import OBJECTIVES, find_recipe, purpose, recipe_names, recipe_text
from vitrail.console import (
    cell,
    prediction_table,
    print_bench,
    print_conversion,
    print_json,
    print_run,
    print_runs,
    print_scores,
    print_table,
    printable,
    say,
    setting_cell,
)
from vitrail.data.files import find_images
from vitrail.data.sources import find_split, open_data
from vitrail.errors import DamagedError, DamagedImageError, UsageError, did_you_mean
from vitrail.faces.commands import FACES
from vitrail.flags import (
    AS_USUAL,
    BundlePath,
    Data,
    Device,
    EngineName,
    Flags,
    Group,
    Json,
    Precision,
    Resume,
    Tolerance,
    arg,
    given_command,
)
from vitrail.settings import check_integer

if TYPE_CHECKING:
    from vitrail.lab.profile import Number
    from vitrail.training.run import Result


def models(
    pattern: Annotated[
        str, tyro.conf.Positional, arg(metavar="[PATTERN]", help="Only names like this one: 'ViT*', '*/16'.")
    ] = "*",
    *,
    json: Json = False,
) -> None:
    """List all models, or those that match a pattern, with their parameters, multiply-accumulates and shapes."""
    names = zoo.list_models(pattern)
    if not names:
        starts = bool(zoo.list_models(f"{pattern}*"))
        near = f" Did you mean {pattern + '*'!r}?" if starts else did_you_mean(pattern, zoo.list_models())
        raise UsageError(f"Pattern must match the name of a model, got {pattern!r}.{near}")
    # Families of other packages are named without importing them; `info` knows the rest.
    others = {name: dict.fromkeys(INFO_KEYS) | {"name": name, "family": name} for name in zoo.FAMILIES.added}
    rows = [zoo.MODELS[name].info() if name in zoo.MODELS else others[name] for name in names]
    if json:
        return print_json(rows)
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    shape = ("heads", "patch", "width", "depth", "resolution", "tokens", "MACs", "family")
    return print_table(headers, [[cell(row[key]) for key in keys] for row in rows], droppable=shape)


def info(
    model: Annotated[
        str,
        tyro.conf.Positional,
        arg(metavar="MODEL|BUNDLE", help="A name of `vitrail models` or `vitrail weights`, or a bundle."),
    ],
    *,
    resolution: Annotated[str | None, arg(metavar="R", help="Input size: 384, or 224x384 for height x width.")] = None,
    classes: Annotated[int | None, arg(metavar="K", help="Number of classes.")] = None,
    channels: Annotated[int | None, arg(metavar="C", help="Input channels.")] = None,
    pool: Annotated[str | None, arg(metavar="P", help="Pooling before the head: cls, gap or map.")] = None,
    representation: Annotated[
        str | None, arg(metavar="W", help="Hidden layer of the head, for pre-training: none, tanh or gelu.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the size and cost of a model. No weights are loaded."""
    config = find_config(model)
    for note in zoo.alias_notes(model):
        say(f"note: {note}")
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else _parse_resolution(resolution),
        "classes": classes,
        "channels": channels,
        "pool": pool,
        "representation": representation,
    }
    row = config.replace(**{key: value for key, value in changes.items() if value is not None}).info()
    if json:
        return print_json(row)
    return print_table(None, [[key, cell(value)] for key, value in row.items()])


def recipes(
    name: Annotated[
        str | None,
        tyro.conf.Positional,
        arg(metavar="[NAME]", help="A recipe, or a .toml file; default: list all recipes."),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """List the recipes, or all settings of one with value, default and meaning."""
    if name is not None:
        return _show_recipe(name, json=json)
    rows = [{"name": known, "purpose": purpose(recipe_text(known))} for known in recipe_names()]
    if json:
        return print_json(rows)
    return print_table(None, [[row["name"], row["purpose"]] for row in rows])


def _show_recipe(name: str, *, json: bool) -> None:
    from vitrail.images.preprocess import Preprocess

    recipe, about = find_recipe(name), purpose(recipe_text(name))
    rows = [row for row in recipe.describe() if row["setting"] not in ("augment", "margin", "preprocess", "model")]
    for table, settings in (("margin", recipe.margin), ("augment", recipe.augment)):
        rows += [row | {"setting": f"{table}.{row['setting']}"} for row in settings.describe()]
    # The defaults of these depend on the model and on DATA.
    for table, given, meanings in (
        ("preprocess", recipe.preprocess, Preprocess.meanings()),
        ("model", recipe.model, model_settings()),
    ):
        rows += [
            {"setting": f"{table}.{key}", "value": given.get(key), "default": None, "meaning": meaning}
            for key, meaning in (dict.fromkeys(given, "") | meanings).items()
            if key not in ("name", "classes", "channels")
        ]
    if json:
        return print_json({"name": name, "purpose": about, "settings": rows})
    sys.stdout.write(f"{printable(about)}\n\n")
    cells = [[row["setting"], *map(setting_cell, (row["value"], row["default"])), row["meaning"]] for row in rows]
    return print_table(("setting", "value", "default", "meaning"), cells)


def doctor(
    data: Data,
    *,
    people: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Classes are people: who is trained on, a name a line, as for `faces train`; all others are the test.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a data set: unreadable files, duplicates across splits, class imbalance, and more.

    Exit code 1 if there are errors, which would stop training; 0 if there are only warnings or none.
    """
    from vitrail.data.doctor import examine, summarise

    if people is None:
        dataset = open_data(data)
    else:
        from vitrail.faces.people import name_splits

        dataset = name_splits(data, people)
    for note in dataset.notes:
        say(f"note: {note}")
    findings = examine(dataset, people=people is not None)
    if json:
        print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        print_table(None, [["data", data], ["images", counts], ["classes", f"{len(dataset.labels):,}"]])
        for lines in summarise(findings, dataset.root):
            sys.stdout.write("\n" + "\n    ".join(printable(line) for line in lines) + "\n")
        if not findings:
            sys.stdout.write("\nno problems found\n")
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)


def train(
    data: Data,
    *,
    model: Annotated[str, arg(metavar="NAME", help="A name of `vitrail models`.")],
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    recipe: Annotated[str, arg(metavar="R", help="A recipe of the package, or a .toml file.")] = "small",
    objective: Annotated[
        str | None,
        arg(
            metavar="NAME",
            help=f"Training objective: {', '.join(OBJECTIVES)}. multilabel needs DATA with several labels an image,"
            " masked a ViT, next-pixel an iGPT; margin is for `faces train`.",
        ),
    ] = None,
    resolution: Annotated[
        str | None,
        arg(metavar="R", help="Input size, 224 or 224x384; default: the model's own, or that of small images."),
    ] = None,
    running: Flags = AS_USUAL,
) -> None:
    """Train a model. It may be killed at any time: --resume auto continues and ends with the same weights.

    Channels, classes and, for small presets, the resolution come from DATA. Use torchrun for several processes.
    """
    size = None if resolution is None else _parse_resolution(resolution)
    words = running.keywords
    _print_result(
        lambda: tasks.train(data, model, output=output, recipe=recipe, objective=objective, resolution=size, **words)
    )


def finetune(
    bundle: BundlePath,
    data: Data,
    *,
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    resolution: Annotated[
        str | None,
        arg(
            metavar="R",
            help="Input size, 384 or 224x384; default: as the recipe or the bundle. Positions are interpolated.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        arg(
            metavar="R",
            help="auto: fit the head by least squares on the frozen model's features, then train all layers if the time"
            " allows (--minutes, 5). frozen: only that head. paper-finetune: as in the paper. Or another recipe, or a"
            " .toml file.",
        ),
    ] = "auto",
    running: Flags = AS_USUAL,
) -> None:
    """Fine-tune a bundle on the classes of DATA, at its resolution or another one.

    The head is kept if the classes are those of the bundle. Changes to the model are printed. It may be killed at any
    time: --resume auto continues.
    """
    size = None if resolution is None else _parse_resolution(resolution)
    words = running.keywords
    _print_result(lambda: tasks.finetune(bundle, data, output=output, recipe=recipe, resolution=size, **words))


def _print_result(run: Callable[[], "Result"]) -> None:
    try:
        result = run()
    except DamagedImageError as error:
        advice = "`vitrail doctor` finds all such images; `--set on_damage=skip` trains without them."
        raise DamagedError(f"{error} {advice}", path=error.path) from None
    if result.is_first and result.folder is not None:
        print_run(result.sentence, result.folder)


def evaluate(
    bundle: BundlePath,
    data: Data,
    *,
    split: Annotated[
        str | None, arg(metavar="S", help="train, val or test; default: test, otherwise val, otherwise all images.")
    ] = None,
    protocol: Annotated[
        Literal["classify", "knn", "probe", "fewshot"],
        arg(
            help="classify: the bundle's own predictions. The others fit a classifier of DATA's classes on the frozen"
            " model's features of the train split: knn, nearest neighbours; probe, logistic regression; fewshot, the"
            " paper's least squares from a few images of each class."
        ),
    ] = "classify",
    layer: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Use the output of this layer as features, from 0 or from the end (-1): [CLS] or the mean. Default:"
            " the input of the head.",
        ),
    ] = None,
    neighbours: Annotated[int | None, arg(metavar="K", help="knn: number of neighbours (20).")] = None,
    temperature: Annotated[
        float | None, arg(metavar="T", help="knn: weight of a vote exp(similarity / T) (0.07); 0: equal weights.")
    ] = None,
    shots: Annotated[
        tuple[int, ...] | None, arg(metavar="K", help="fewshot: numbers of images per class (1 5 10 25); then all.")
    ] = None,
    seeds: Annotated[
        int | None, arg(metavar="N", help="fewshot: random choices of images for each number (5).")
    ] = None,
    penalty: Annotated[
        float | None,
        arg(metavar="L", help="probe, fewshot: L2 penalty; default: chosen on held-out images or by leave-one-out."),
    ] = None,
    seed: Annotated[
        int | None,
        arg(metavar="S", help="Seed of the held-out share of data without splits, of probe and of fewshot (0)."),
    ] = None,
    cache: Annotated[
        Path | None,
        arg(metavar="DIR", help="Cache of features (~/.cache/vitrail/features); it can be deleted at any time."),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    workers: Annotated[int, arg(metavar="N", help="Number of threads that decode and prepare images.")] = 2,
    device: Device = "cpu",
    output: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help=f"Also write each image's label and answers: a file that ends in {', '.join(endings())}; or .npz, to"
            " compare them later, as in a run.",
        ),
    ] = None,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Also write pages of all mistakes; labels that are likely wrong first.")
    ] = None,
    against: Annotated[
        str | None,
        arg(metavar="BUNDLE|NPZ", help="Another bundle, or answers of one: which is better, by a paired test?"),
    ] = None,
    force: Annotated[bool, arg(help="Overwrite FILE and DIR.")] = False,
    json: Json = False,
) -> None:
    """Evaluate a bundle on data: accuracy with its interval, top 5, calibration, each class; of several labels, mAP."""
    settings: dict[str, Any] = {
        "layer": layer,
        "neighbours": neighbours,
        "temperature": temperature,
        "shots": shots,
        "seeds": seeds,
        "penalty": penalty,
        "seed": seed,
        "cache": cache,
    }
    running: dict[str, Any] = {"workers": workers, "device": device}
    way: dict[str, Any] = {"engine": engine, "precision": precision, "tolerance": tolerance}
    outputs: dict[str, Any] = {"output": output, "page": page, "against": against}
    if asked := [name for name, value in outputs.items() if value is not None]:
        if protocol != "classify":
            raise UsageError(f"--{asked[0]} must come with --protocol classify, got {protocol}.")
        from vitrail.engines.choose import Wish
        from vitrail.evaluation.outputs import evaluate_each
        from vitrail.evaluation.protocols import check_settings

        check_settings(protocol, settings)
        scores = evaluate_each(bundle, data, split, force=force, wish=Wish(**way), **outputs, **running)
    else:
        scores = tasks.evaluate(bundle, data, split, protocol=protocol, **settings, **running, **way).scores
    for note in scores["notes"]:
        say(f"note: {note}")
    if json:
        return print_json(scores)
    print_scores(scores)
    written = [
        [name, str(path)] for name, path in (("answers", output), ("page", page and page / "index.html")) if path
    ]
    if written:
        sys.stdout.write("\n")
        print_table(None, written)
    return None


def runs(
    folders: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(metavar="RUN|DIR", help="Folders that train or finetune wrote, or folders of such."),
    ],
    *,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Also write a page with the curves over steps and over seconds.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Compare runs: scores with intervals, settings that differ, and a paired test on the same test images."""
    if not folders:
        raise UsageError("Runs must be given: folders that train or finetune wrote, got none.")
    if page is not None:
        from vitrail.storage import check_output

        check_output(page, force=force)
    from vitrail.runs.compare import side_by_side

    found = side_by_side(folders)
    if page is not None:
        from vitrail.runs.page import write_page

        write_page(found, page, command=given_command(), force=force)
    for note in found.notes:
        say(f"note: {note}")
    if json:
        return print_json(found.to_json())
    print_runs(found.to_json())
    return print_table(None, [["page", str(page / "index.html")]]) if page is not None else None


def predict(
    bundle: BundlePath,
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(
            metavar="FILE|DIR|GLOB|DATA|-",
            help="Images, folders of them, quoted patterns such as 'photos/**/*.jpg', a data set alone (.npz, .csv,"
            " digits, ...), or - for names from stdin, one per line.",
        ),
    ],
    *,
    top_k: Annotated[
        int | None,
        arg(metavar="K", help="Number of classes to show for each image (5); of several labels, the most to show."),
    ] = None,
    threshold: Annotated[
        float | None,
        arg(
            metavar="T",
            help="For a bundle that answers with several labels: show those with at least this probability; default:"
            " each label's own, stored in BUNDLE.",
        ),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    threads: Annotated[
        int | None, arg(metavar="N", help="Number of threads that decode and compute; default: every core.")
    ] = None,
    device: Device = "cpu",
    jpeg: Annotated[
        Literal["exact", "double"] | None,
        arg(
            metavar="{exact,double}",
            help="Decode JPEG files exactly, or (double) large ones at a reduced scale, faster; default: as in BUNDLE.",
        ),
    ] = None,
    features: Annotated[
        Path | None,
        arg(metavar="OUT.npz", help="Also write features, the input of the head: arrays `files` and `features`."),
    ] = None,
    output: Annotated[
        Path | None,
        arg(metavar="FILE", help=f"Write the answers to a file that ends in {', '.join(endings())}, a row an image."),
    ] = None,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Write a contact sheet: pages of all images by their answer.")
    ] = None,
    sort: Annotated[
        Literal["uncertain", "confident"] | None,
        arg(metavar="{uncertain,confident}", help="Order of the answers, when all are known; default: as given."),
    ] = None,
    split: Annotated[
        str | None, arg(metavar="S", help="Of a data set: train, val or test; default: as in evaluate.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite OUT.npz, FILE and DIR.")] = False,
    json: Annotated[bool, arg(help="Print a JSON line for each image instead of a table.")] = False,
) -> None:
    """Classify images. Files that cannot be read are reported, the others classified; the exit code is then 1.

    With --output or --page, the answers go there instead of to the terminal.
    """
    if top_k is not None:
        check_integer("top_k", top_k, low=1, high=10_000_000)
    from vitrail.answers.outputs import Outputs
    from vitrail.classifier import Classifier
    from vitrail.engines.choose import Wish, choose_way
    from vitrail.weights.parts import read_parts

    outputs = Outputs(table=output, page=page, features=features, sort=sort, force=force)
    outputs.check()
    data = find_split(files, split)
    names = find_images(files, _lines_of_stdin()) if data is None else list(map(data.name_of, range(len(data))))
    images = names if data is None else data.images
    wish = Wish(engine, precision, tolerance)
    wish.check()
    parts = read_parts(bundle, weights=False)
    parts.answer.check_threshold(threshold)
    if features is None or outputs.need_classes:
        parts.check_classifies()
    if outputs.need_classes:
        parts.check_one_class("--output, --page and --sort")
    way = choose_way(wish, bundle, images=images, threads=threads, device=device)
    classifier = Classifier(bundle, **way._asdict(), threads=threads, jpeg=jpeg, device=device)
    show, is_shown = None, json or (output is None and page is None)
    if is_shown:
        goes_on = any((features, output, page))
        show = _printing(json, names, classifier.labels, parts.answer.nothing, goes_on=goes_on)
    asked = {"features": features is not None, "thumbnails": page is not None}
    answers = classifier.stream(images, names=names, top_k=top_k, threshold=threshold, **asked)
    errors = outputs.take(answers, model=bundle, best=min(top_k or 5, len(classifier.labels)), show=show)
    written = {"answers": output, "page": page and page / "index.html"}
    if not classifier.labels or not is_shown:
        written["features"] = features
    if not json and (lines := [[name, str(path)] for name, path in written.items() if path is not None]):
        print_table(None, lines)
    if errors and is_shown and sys.stdout.isatty():  # each of them has just been seen
        sys.exit(1)
    if errors:
        raise DamagedError(f"{len(errors):,} of {len(names):,} images could not be classified; the first: {errors[0]}")


def _printing(
    json: bool, names: Sequence[str], labels: Sequence[str], blank: str, *, goes_on: bool
) -> Callable[[dict[str, Any]], None]:
    """What prints an answer as soon as it is known. If its reader leaves (`| head`), other outputs may still be due."""
    show = print_json if json else prediction_table(names, labels, blank=blank)

    def receive(answer: dict[str, Any]) -> None:
        try:
            show(answer)
            sys.stdout.flush()
        except BrokenPipeError:
            if not goes_on:
                raise
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115

    return receive


def inspect(
    bundle: Annotated[
        str,
        tyro.conf.Positional,
        arg(
            metavar="BUNDLE",
            help="A folder written by train, finetune or convert, or the embedded bundle fashion; a run, whose"
            " snapshots (train --snapshots N) show what grows over training; or the name of a model, untrained.",
        ),
    ],
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(metavar="IMAGE", help="Images to inspect, folders of them, or - for names from stdin, one a line."),
    ],
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write: index.html, figures, inspect.json.")],
    evidence: Annotated[
        bool, arg(help="Also remove parts of the image and run the model again: hundreds of forward passes.")
    ] = False,
    data: Annotated[
        str | None,
        arg(metavar="DATA", help="More images (up to 64) for results that need many; any folder of images will do."),
    ] = None,
    against: Annotated[str | None, arg(metavar="BUNDLE", help="Another bundle to compare layers with.")] = None,
    patch: Annotated[
        tuple[int, int] | None,
        arg(metavar="ROW COLUMN", help="The patch to follow through the model, from 0; by default the centre."),
    ] = None,
    inside: Annotated[
        tuple[int, ...],
        arg(metavar="L", help="Show these layers step by step, from 0 or from the end (-1); by default three."),
    ] = (),
    layers: Annotated[
        tuple[int, ...], arg(metavar="L", help="Show only the attention of these layers, from 0 or from the end (-1).")
    ] = (),
    heads: Annotated[tuple[int, ...], arg(metavar="H", help="Show only the attention of these heads, from 0.")] = (),
    full: Annotated[
        bool,
        arg(help="Keep the attention of every head and patch, however large the page becomes, and write arrays.npz."),
    ] = False,
    device: Device = "cpu",
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
    json: Annotated[bool, arg(help="Print the content of inspect.json.")] = False,
) -> None:
    """Show what happens inside a model, on one page: every step, attention, position embeddings, and more."""
    from vitrail.storage import check_output

    check_output(output, force=force)
    made = tasks.inspect(
        bundle,
        find_images(files, _lines_of_stdin()),
        output=output,
        evidence=evidence,
        data=data,
        against=against,
        patch=patch,
        inside=inside or None,
        layers=layers or None,
        heads=heads or None,
        full=full,
        device=device,
        force=force,
    )
    from vitrail.inspection.page import LIMIT

    if (size := (output / "index.html").stat().st_size) > LIMIT and not full:
        say(f"note: the page has {size / 1e6:.1f} MB; fewer images or layers would make it smaller")
    for note in made.notes:
        say(f"note: {note}")
    if not made.found.is_trained:
        say("note: nothing says that this model was trained; maps of random weights mean nothing")
    return print_json(made.numbers) if json else print_table(None, [["page", str(output / "index.html")]])


def explain(
    bundle: BundlePath,
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(
            metavar="[IMAGE]",
            help="Up to 40 images, folders of them, or - for names from stdin; else embedded ones, if they fit BUNDLE.",
        ),
    ] = (),
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write: index.html, with the weights inside.")],
    open: Annotated[bool, arg(help="Open the page in a browser.")] = False,
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
) -> None:
    """Write a page that runs a small ViT in the browser and walks through every step of it: draw, mask, shuffle, switch
    parts off, and see the answer change."""
    from vitrail.storage import check_output

    check_output(output, force=force)
    read_config(check_folder(bundle)).check_in_page()
    paths = find_images(files, _lines_of_stdin()) if files else []

    from vitrail.explain.page import explain as write
    from vitrail.weights.bundle import load

    page = write(load(bundle), paths, output, force=force)
    print_table(None, [["page", str(page)]])
    if open:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def convert(
    source: Annotated[
        str,
        tyro.conf.Positional,
        arg(
            metavar="SRC",
            help=f"A checkpoint ({', '.join(FORMATS)}) or a bundle: a path, hf:owner/repository[@revision] of the"
            " Hugging Face Hub, the https:// address of a file, or a name of `vitrail weights`.",
        ),
    ],
    destination: Annotated[Path, tyro.conf.Positional, arg(metavar="DST", help="Folder to write.")],
    *,
    to: Annotated[str, arg(metavar="FORMAT", help=f"Format to write: {', '.join(written_formats())}.")] = "vitrail",
    model: Annotated[
        str | None, arg(metavar="NAME", help="The model of SRC, if its files do not state it (the number of heads).")
    ] = None,
    resolution: Annotated[
        str | None, arg(metavar="R", help="Its input size, if the grid is not square; with --model.")
    ] = None,
    preprocess: Annotated[
        tuple[str, ...],
        arg(metavar="KEY=VALUE", help="Preprocessing, if SRC does not state it: mean=0.5 std=0.5 resize=squash"),
    ] = (),
    labels: Annotated[Path | None, arg(metavar="FILE", help="Class names: a JSON list, or one name per line.")] = None,
    images: Annotated[
        str | None, arg(metavar="DIR", help="Images to compare both models on; default: embedded ones.")
    ] = None,
    verify: Annotated[bool, arg(help="Compare with the library's own model, if it can be imported.")] = True,
    sha256: Annotated[str | None, arg(metavar="HEX", help="Refuse a file of weights that has another SHA-256.")] = None,
    force: Annotated[bool, arg(help="Overwrite DST if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Convert weights of other libraries to a bundle, or a bundle to their formats, and verify the result."""
    from vitrail.weights.convert import Told, read_labels
    from vitrail.weights.convert import convert as run

    size = None if resolution is None else _parse_resolution(resolution)
    told = Told(model, size, preprocess, None if labels is None else read_labels(labels))
    shown = (
        open_data("fashion-40").splits["test"].images if images is None else find_images([images], _lines_of_stdin())
    )
    report = run(source, destination, to, told=told, verifies=verify, images=list(shown), force=force, sha256=sha256)
    for note in report["notes"]:
        say(f"note: {note}")
    return print_json(report) if json else print_conversion(report)


def weights(
    pattern: Annotated[
        str,
        tyro.conf.Positional,
        arg(metavar="[PATTERN]", help="Only names, models or repositories like this one: 'vit-b16*', 'dino*', 'BiT*'."),
    ] = "*",
    *,
    json: Json = False,
) -> None:
    """List public checkpoints that `vitrail convert NAME DST` fetches and reads. Nothing is fetched here."""
    found = list_published(pattern)
    if json:
        return print_json([one.to_json() for one in found])
    rows = []
    for one in found:
        linear = "" if one.linear is None else f"{one.linear:.1f} linear"
        score = linear if one.accuracy is None else f"{one.accuracy:.1f}"
        shape = [one.model, f"{one.config.parameters:,}", f"{one.pixels}", f"{one.classes:,}" if one.classes else "-"]
        rows.append([one.name, *shape, score or "-", one.source or "-", one.licence, one.address])
    headers = ("name", "model", "parameters", "pixels", "classes", "accuracy %", "source", "licence", "where")
    return print_table(headers, rows, droppable=("where", "source", "classes", "licence", "model"))


def export(
    bundle: BundlePath,
    output: Annotated[Path, tyro.conf.Positional, arg(metavar="OUT", help="Folder to write.")],
    *,
    to: Annotated[str, arg(metavar="TARGET", help=f"What to write: {', '.join(TARGETS)}.")],
    precision: Annotated[
        str, arg(metavar="P", help=f"Precision: {', '.join(PRECISIONS)}, where the target has it.")
    ] = "float32",
    batch: Annotated[str, arg(metavar="N|any", help="Number of images that the model takes at a time.")] = "any",
    merge: Annotated[
        str | None,
        arg(metavar="R|auto", help="Merge so many tokens in front of each layer (ViT); auto searches, on --data."),
    ] = None,
    data: Annotated[
        str | None, arg(metavar="DATA", help="With --merge: images whose answers are compared; no labels are needed.")
    ] = None,
    tolerance: Annotated[
        float, arg(metavar="T", help="With --merge auto: largest share of answers that may change.")
    ] = 0.02,
    force: Annotated[bool, arg(help="Overwrite OUT if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Write a model in the format of another runtime, with labels, preprocessing, the proof that it answers as torch
    does, and a README whose program runs it without vitrail."""
    proof = _export(bundle, output, to, merge, data, tolerance, precision=precision, batch=batch, force=force)
    if json:
        return print_json(proof)
    same = f"{proof['same_answers']} of {proof['pictures']} answers as torch's"
    rows = [["model", ", ".join(proof["files"])], ["to", f"{to}, {output}"]]
    return print_table(None, [*rows, ["proof", f"{same}, logits at most {proof['max_logit_difference']:.1e} apart"]])


def _export(
    bundle: str, output: Path, to: str, merge: str | None, data: str | None, tolerance: float, **how: Any
) -> dict[str, Any]:
    from vitrail.engines.targets.base import check_export, export

    check_export(bundle, output, to, **how)
    if merge is None:
        if data is not None:
            raise UsageError(f"Data must be given with --merge, got {data!r} without it.")
        return export(bundle, output, to, **how)
    from vitrail.evaluation.merged import merged_bundle

    with merged_bundle(bundle, merge, data, tolerance) as (merged, about):
        return export(merged, output, to, **how, about={"merging": about})


def bench(
    bundle: BundlePath,
    *,
    data: Annotated[
        str | None, arg(metavar="DATA", help="Images to compare answers on; with labels also the accuracy.")
    ] = None,
    split: Annotated[
        str | None, arg(metavar="S", help="train, val or test; default: test, otherwise val, otherwise all images.")
    ] = None,
    threads: Annotated[int | None, arg(metavar="N", help="Number of computing threads; default: every core.")] = None,
    json: Json = False,
) -> None:
    """Measure every engine in every precision on this machine: speed, start, memory, size, answers and accuracy. What
    it finds is kept; --engine auto and --precision auto read it."""
    from vitrail.evaluation.bench import bench as run

    found = run(bundle, data, split=split, threads=threads)
    for one in found["left_out"]:
        say(f"note: {one['engine']} {one['precision']} is left out: {one['reason']}")
    for note in found["notes"]:
        say(f"note: {note}")
    return print_json(found) if json else print_bench(found)


def compare(
    data: Data,
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write; one that compare wrote is gone on with.")],
    questions: Annotated[
        tuple[str, ...], arg(metavar="NAME", help=f"What to ask: {', '.join(QUESTIONS)}; else all of it.")
    ] = (),
    families: Annotated[
        tuple[str, ...], arg(metavar="NAME", help=f"Which to compare; else {', '.join(COMPARED)}.")
    ] = (),
    sizes: Annotated[tuple[int, ...], arg(metavar="N", help="Numbers of training images; else chosen from DATA.")] = (),
    seeds: Annotated[int, arg(metavar="N", help="How often everything is trained, one less above 10,000 images.")] = 3,
    budget: Annotated[
        str | None, arg(metavar="TIME", help="20m, 90s, 2h: what does not fit is dropped, and named.")
    ] = None,
    jobs: Annotated[int | None, arg(metavar="N", help="Processes side by side; else as many as cores.")] = None,
    backend: Annotated[
        str, arg(metavar="B", help="loky (this machine), dask, or another that is registered with joblib.")
    ] = "loky",
    bundles: Annotated[
        tuple[str, ...],
        arg(metavar="BUNDLE", help="Instead of training, measure the biases of these on DATA: shifts, order, reach."),
    ] = (),
    json: Json = False,
) -> None:
    """The bias lab: measure what each architecture assumes of images, on yours, and judge the claims about it.

    Kill it whenever you like: the same command goes on. More questions, sizes or seeds extend it.
    """
    command = given_command()
    if bundles:
        if questions or families or sizes:
            raise UsageError("--bundles must come without --questions, --families and --sizes: nothing is trained.")
        return _profile(data, output, bundles, budget=budget, command=command, json=json)

    from vitrail.lab.compare import compare as run

    found = run(
        data,
        output,
        questions=questions,
        families=families,
        sizes=sizes,
        seeds=seeds,
        budget=budget,
        jobs=jobs,
        backend=backend,
        command=command,
        tell=say,
    )
    if json:
        return print_json(found)
    rows = [[one["id"], one["verdict"], one["question"], one["rule"]] for one in found["claims"]]
    print_table(("claim", "verdict", "question", "decided by"), rows)
    sys.stdout.write(f"report  {printable(str(output / 'index.html'))}\n")
    return None


def _profile(
    data: str, output: Path, bundles: tuple[str, ...], *, budget: str | None, command: str, json: bool
) -> None:
    for bundle in bundles:
        check_folder(bundle)
    from vitrail.lab.profile import profile
    from vitrail.lab.profile_page import check_profile_output, write_profile

    check_profile_output(output)
    found, pairs, split = profile(data, bundles, budget=budget, tell=say)
    written = write_profile(output, found, pairs, data=data, split=split, command=command)
    if json:
        return print_json(written)
    names = list(dict.fromkeys(name for one in found for name in one.numbers))
    rows = [[name, *(_measured(one.numbers.get(name)) for one in found)] for name in names]
    print_table(("measure", *(one.name for one in found)), rows)
    sys.stdout.write(f"report  {printable(str(output / 'index.html'))}\n")
    return None


def _measured(number: "Number | None") -> str:
    if number is None:
        return "-"
    low, high = number.interval
    reference = "" if number.reference is None else f"  [{number.reference:.3f}]"
    return f"{number.estimate.value:.3f} ({low:.3f} to {high:.3f}){reference}"


def demo(
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write.")] = Path("demo"),
    epochs: Annotated[int, arg(metavar="N", help="Number of passes over the training digits.")] = 100,
    seed: Annotated[int, arg(metavar="S", help="The same seed and machine give the same model.")] = 0,
    resume: Resume = None,
    force: Annotated[bool, arg(help="Overwrite the output if it is a run of vitrail.")] = False,
    lab: Annotated[bool, arg(help="End with a minute of the bias lab (extra `lab`).")] = True,
    open: Annotated[bool, arg(help="Open the report in a browser.")] = False,
) -> None:
    """Train a small Vision Transformer on 1,437 embedded digits, test it on 360 others, and plot its attention."""
    from vitrail.demo import run

    run(output, epochs=epochs, seed=seed, resumes=resume == "auto", force=force, opens=open, lab=lab)


def _lines_of_stdin() -> Iterator[str]:
    """The names that - stands for; stdin is read only if they are asked for."""
    return (os.fsdecode(line).rstrip("\r\n") for line in getattr(sys.stdin, "buffer", ()))


def _parse_resolution(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])


COMMANDS: dict[str, Callable[..., None] | Group] = {
    "models": models,
    "info": info,
    "recipes": recipes,
    "doctor": doctor,
    "train": train,
    "finetune": finetune,
    "evaluate": evaluate,
    "runs": runs,
    "predict": predict,
    "inspect": inspect,
    "explain": explain,
    "weights": weights,
    "convert": convert,
    "bench": bench,
    "export": export,
    "compare": compare,
    "faces": FACES,
    "demo": demo,
}
