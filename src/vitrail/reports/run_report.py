"""Write `report.html`: the curves and the scores of a training run, in one file.

The first rank rewrites the report after evaluations and checkpoints. A browser reloads it until the run ends.
"""

import contextlib
import datetime
import platform
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.bundles.bundle import Bundle
from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.files import replace_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.core.settings import pluralise
from vitrail.core.terminal import format_duration, format_setting
from vitrail.data.dataset import Dataset, Split
from vitrail.evaluation.history import Events, is_number, keeps_linear_head, read_events, select_events
from vitrail.reports.curves import draw_curves, training_curve, with_axis_choice
from vitrail.reports.objectives import registry
from vitrail.reports.page_kit import bilingual_page, figure, headline_numbers, image, table
from vitrail.reports.translations import translator, with_korean
from vitrail.training.objectives.illustration import IllustrationArrays
from vitrail.training.observer import FinishedRun, Observer, RunInfo, RunProgress
from vitrail.training.stop import Interrupted

MESSAGES = load_messages(__file__)
_REFRESH_SECONDS = 10  # interval at which a browser reloads the report during training
_MIN_PAUSE = 5.0  # seconds between two reports during training
_MAX_TIME_SHARE = 0.01  # share of the training time that writing reports may take
_MAX_DOTS = 40  # evaluations up to which the chart marks each one
_IMAGE, _IMAGE_FOLDER = "photo.jpg", "other-photos"  # placeholders in the commands of the report

t = translator(MESSAGES)
"""Return a message of the report in both languages."""


class RunReport(Observer):
    """Observer of a training run that writes its report.

    `update` writes it during training, `finish` at the end, and `fail` after an interruption or an error.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._next_time, self._has_warned = 0.0, False

    def update(self, position: RunProgress) -> None:
        """Write the report of the unfinished run, unless it was written a moment ago. Print a warning on failure."""
        start = time.monotonic()
        if start >= self._next_time:
            self._write_unfinished(position, None)
            end = time.monotonic()
            self._next_time = end + max(_MIN_PAUSE, (end - start) / _MAX_TIME_SHARE)

    def fail(self, position: RunProgress, error: BaseException) -> None:
        """Write the report of a run that `error` ended, with the command that resumes it."""
        self._write_unfinished(position, error)

    def finish(self, outcome: FinishedRun) -> None:
        """Write the report of the finished run. Raise VitrailError on failure."""
        info, events, bundle, judgement = self._info, self._events(), outcome.bundle, outcome.judgement
        scores = [] if judgement is None else registry.summary(judgement)
        parts = [
            _notes(events, bundle.provenance),
            _final_numbers(bundle.provenance, scores, events),
            _curves(events, info, is_finished=True) if bundle.provenance["steps"] else "",
            _illustration(outcome.illustrate(), info.korean),
            "" if judgement is None else registry.sections(judgement),
            f"<h2>{t('next')}</h2>{_next_steps(info.folder, info.data, info.dataset, outcome.split, bundle)}",
            f"<h2>{t('again')}</h2>{_provenance_table(bundle.provenance)}",
        ]
        try:
            self._write(t("finished", time=_time_text()), "\n".join(parts))
        except OSError as error:
            raise VitrailError(f"Writing {str(info.folder / 'report.html')!r} failed ({error.strerror}).") from None

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self._info.folder / "metrics.jsonl")

    def _write_unfinished(self, position: RunProgress, error: BaseException | None) -> None:
        """Write the report of a run that still trains, or that `error` ended. Print a warning on failure."""
        try:
            events, info = self._events(), self._info
            fields = {"step": position.step, "total": position.total, "time": _time_text()}
            if error is None:
                remaining = _remaining_time(events, position.total)
                state = t("training", "p", remaining=remaining, seconds=_REFRESH_SECONDS, **fields)
                notice = f'<div class="news" role="status">{state}</div>'
            else:
                # The message `interrupted` is enough after a signal. The terminal shows details of internal errors.
                reason = str(error) if isinstance(error, VitrailError) else type(error).__name__
                reason = "" if isinstance(error, Interrupted) else f"<p>{escape(reason)}</p>"
                command = f"<pre>{escape(_resume_command(info.command))}</pre>"
                notice = f'<div class="warn">{t("interrupted", "p", **fields)}{reason}{command}</div>'
            curves = _curves(events, info, is_finished=False)
            parts = [notice, _current_numbers(events, info, position), curves]
            parts.append(f"<h2>{t('again')}</h2><pre>{escape(info.command or 'Python')}</pre>")
            refresh = _REFRESH_SECONDS if error is None else 0
            self._write(t("in-training" if error is None else "not-finished"), "\n".join(parts), refresh=refresh)
        except Exception as failure:  # no error of the report may end the training
            if not self._has_warned:
                self._has_warned = True
                reason = getattr(failure, "strerror", None) or str(failure)
                self._info.say(f"warning: report.html cannot be written ({reason}). Training continues.")

    def _write(self, state: str, body: str, *, refresh: int = 0) -> None:
        """Write `report.html` atomically. `state` ends the subtitle."""
        config = self._info.model
        title = t("title", model=config.name or config.family, data=self._info.dataset.name)
        subtitle = Html(f"{t('size', parameters=config.parameters, macs=config.macs)} · {state}")
        document = bilingual_page(title, subtitle, body, refresh=refresh)
        replace_text(self._info.folder / "report.html", document)


def _time_text() -> str:
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _resume_command(command: str) -> str:
    """Return the command that resumes an interrupted run, or the argument for a run started in Python."""
    if not command.startswith("vitrail "):  # empty, or a Python call
        return "resume=True"
    arguments = [word for word in shlex.split(command) if word != "--force"]  # --force would start from scratch
    has_resume = any(word.partition("=")[0] == "--resume" for word in arguments)
    return shlex.join(arguments if has_resume else [*arguments, "--resume", "auto"])


# The parts of the page


def _remaining_time(events: Events, total: int) -> str:
    """Return the remaining time at the speed since the run last started. "?" before the second step."""
    start = max((index for index, event in enumerate(events) if event["event"] == "resume"), default=0)
    timed = [event for event in select_events(events[start:], "step") if is_number(event.get("seconds"))]
    if len(timed) < 2 or timed[-1]["step"] == timed[0]["step"]:
        return "?"
    steps, seconds = (timed[-1][key] - timed[0][key] for key in ("step", "seconds"))
    return format_duration(max(seconds / steps * (total - timed[-1]["step"]), 0))


def _current_numbers(events: Events, info: RunInfo, position: RunProgress) -> str:
    """Return the headline numbers of an unfinished run: latest metric and loss, steps, epochs, time."""
    steps, evaluations = select_events(events, "step"), select_events(events, "evaluate")
    pairs = []
    if evaluations and is_number(evaluations[-1].get(info.watched)):
        name = with_korean(info.watched_name, info.korean)
        last = evaluations[-1]
        pairs.append((t("held-out-now", metric=name, count=last["count"]), f"{last[info.watched]:.1%}"))
    if steps and steps[-1]["loss"] is not None:
        pairs.append((t("training-loss"), f"{steps[-1]['loss']:.3f}"))
    pairs += [
        (t("steps-of", total=position.total), f"{position.step:,}"),
        (t("epochs"), _epochs_text(position.step / info.steps_per_epoch)),
        (t("time"), format_duration(position.seconds)),
    ]
    return headline_numbers(pairs)


def _epochs_text(epochs: float) -> str:
    """Format a number of epochs with one decimal, or with two significant digits below one."""
    return f"{epochs:.2g}" if epochs < 1 else f"{epochs:,.1f}".removesuffix(".0")


def _final_numbers(provenance: dict[str, Any], scores: list[tuple[str, str]], events: Events) -> str:
    """Return the headline numbers of a finished run. `scores` are the captions and numbers of its final evaluation."""
    pairs = list(scores)
    training_accuracy = provenance.get("scores", {}).get("training_accuracy")
    if training_accuracy is not None:
        pairs.append((t("training-accuracy"), f"{training_accuracy:.1%}"))
    pairs += [
        (t("probe", count=event["count"]), f"{event['accuracy']:.1%}") for event in select_events(events, "probe")
    ]
    pairs += [
        (t("steps"), f"{provenance['steps']:,}"),
        (t("epochs"), _epochs_text(provenance["epochs"])),
        (t("time"), format_duration(provenance["seconds"])),
    ]
    return headline_numbers(pairs)


def _notes(events: Events, provenance: dict[str, Any]) -> str:
    """Return remarks about the scores: which weights were kept, interruptions, images that could not be read."""
    notes = ""
    if choices := select_events(events, "choice"):
        notes += t("start-kept" if keeps_linear_head(events) else "tuned-kept", "p", reason=choices[-1]["reason"])
        if provenance.get("scores", {}).get("split") in ("val", "held-out"):
            notes += t("same-images-chose", "p")
    elif keeps_linear_head(events):
        notes += t("linear-head", "p")
    if resumed := select_events(events, "resume"):
        is_exact = all(event.get("exact") for event in resumed)
        notes += t(
            "resumed" if is_exact else "resumed-otherwise", "p", times=pluralise(len(resumed), "time"), n=len(resumed)
        )
    if "stopped" in provenance:
        notes += t("stopped", "p", how=provenance["stopped"], weights=provenance["weights"])
    if "damaged" in provenance:
        files = provenance["damaged"]["files"]
        items = "".join(f"<li>{escape(reason)}</li>" for reason in list(files.values())[:50])
        notes += t(
            "damaged", "p", n=len(files), images=pluralise(len(files), "image"), policy=provenance["damaged"]["policy"]
        )
        notes += f"<ul>{items}</ul>"
    return notes


def _curves(events: Events, info: RunInfo, *, is_finished: bool) -> str:
    """Return charts of loss, held-out metric, learning rate and speed, over steps and over time.

    A metric that was recorded only once has no chart. Its value is in the title of the figure.
    """
    training, held_out = t("in-training-images", "tspan"), t("held-out", "tspan")
    loss = training_curve(events, "step", "loss", training, 0)
    held_out_loss = training_curve(events, "evaluate", "loss", held_out, 1)
    if not loss.steps and not held_out_loss.steps:
        return t("no-steps-yet", "p")
    last_values = {
        name: f"{curve.values[-1]:.3f}" if curve.values else "-"
        for name, curve in (("loss", loss), ("held", held_out_loss))
    }
    title = t("loss-both" if held_out_loss.values else "loss-at-end", **last_values)
    has_several_points = len({*loss.steps, *held_out_loss.steps}) > 1
    loss_curves = [loss, held_out_loss] if held_out_loss.values else [loss]
    chart = draw_curves(loss_curves, t("loss", "tspan")) if has_several_points else ""
    figures = [figure(title, t("loss-note"), chart)]
    watched = training_curve(events, "evaluate", info.watched, held_out, 1, factor=100)
    if watched.values:
        name = with_korean(info.watched_name, info.korean)
        label = t("percent", "tspan", metric=with_korean(info.watched_name, info.korean, "tspan"))
        best_index = int(np.argmax(watched.values))
        count = select_events(events, "evaluate")[-1]["count"]
        note = t("watched-note", count=count, best=f"{watched.values[best_index]:.1f}%", step=watched.steps[best_index])
        dots = len(watched.values) < _MAX_DOTS
        chart = draw_curves([watched], label, dots=dots) if len(watched.values) > 1 else ""
        title = "watched-title" if is_finished else "watched-so-far"
        figures.append(figure(t(title, metric=name, value=f"{watched.values[-1]:.1f}%"), note, chart))
    rate = training_curve(events, "step", "learning_rate", "", 7)
    speed = training_curve(events, "step", "images_per_second", "", 2)
    if len(rate.values) > 1:
        note = t("rate-note", peak=f"{info.peak_learning_rate:.3g}")
        figures.append(figure(t("rate-title"), note, draw_curves([rate], t("rate", "tspan"))))
    if speed.values:
        title = t("speed-title", speed=f"{statistics.median(speed.values):,.0f}")
        chart = draw_curves([speed], t("speed", "tspan")) if len(speed.values) > 1 else ""
        figures.append(figure(title, t("speed-note"), chart))
    return with_axis_choice(f'<div class="panes">{"".join(figures)}</div>')


def _illustration(illustration: IllustrationArrays | None, korean: Mapping[str, str]) -> str:
    """Return the illustration of the objective, for instance masked and reconstructed images, row by row."""
    if illustration is None:
        return ""
    rows = []
    for caption, pixels_BHWC in illustration.rows:
        tiles = "".join(f"<figure>{image(tile, caption)}</figure>" for tile in pixels_BHWC)
        rows.append(f'<p class="quiet">{with_korean(caption, korean)}</p><div class="images">{tiles}</div>')
    return f"<h2>{with_korean(illustration.title, korean)}</h2>{''.join(rows)}"


def _next_steps(folder: Path, data: tuple[str, ...], dataset: Dataset, split: Split, bundle: Bundle) -> str:
    """Return commands that use the trained model, with the paths of this run."""
    commands = list(_commands(folder, data, dataset, split, bundle))
    items = "".join(f"{t(name, 'p')}<pre>{escape(_shell_command(arguments))}</pre>" for name, arguments in commands)
    placeholders = [name for name in (_IMAGE, _IMAGE_FOLDER) if any(name in arguments for _, arguments in commands)]
    notes = "".join(t(f"placeholder-{name}", "p") for name in placeholders)
    return f'<div class="next">{items}</div><div class="quiet">{t("where", "p")}{notes}</div>'


def _commands(
    folder: Path, data: tuple[str, ...], dataset: Dataset, split: Split, bundle: Bundle
) -> Iterator[tuple[str, list[str]]]:
    """Yield the arguments of each command, after the name of the message that introduces it."""
    model, output = str(folder / "bundle"), str(folder)
    image_path = _IMAGE if split.in_memory is not None or not len(split) else str(split.images[0])
    inspect = ["inspect", model, image_path, "--output", f"{output}-inspect"]
    if bundle.info.classifies:
        yield "do-predict", ["predict", model, image_path]
        # Without a split for evaluation, `data` contains only images that the model was trained on.
        has_evaluation_split = not dataset.splits.keys().isdisjoint(("val", "test"))
        yield "do-evaluate", ["evaluate", model, *(data if data and has_evaluation_split else [_IMAGE_FOLDER])]
        yield "do-inspect", inspect
        yield "do-finetune", ["finetune", model, _IMAGE_FOLDER, "--output", f"{output}-finetuned"]
        return
    with contextlib.suppress(UsageError):  # a model that predicts pixels has no features
        bundle.info.check_computable()
        yield "do-predict-features", ["predict", model, image_path, "--features", f"{output}-features.npz"]
    labelled_data = data or (_IMAGE_FOLDER,)
    yield "do-evaluate-features", ["evaluate", model, *labelled_data, "--protocol", "knn"]
    yield "do-inspect", inspect
    yield "do-finetune-features", ["finetune", model, *labelled_data, "--output", f"{output}-finetuned"]


def _shell_command(arguments: Iterable[str]) -> str:
    """Return a `vitrail` command with its arguments quoted for a shell."""
    return shlex.join(["vitrail", *arguments])


def _provenance_table(provenance: dict[str, Any]) -> str:
    """Return the command of the run, and a table of the data, settings and machine that it used."""
    plain = {key: value for key, value in provenance.items() if not isinstance(value, dict) and key != "command"}
    rows = [[_provenance_label(key), format_setting(value)] for key, value in plain.items()]
    if corrections := provenance.get("corrections"):
        rows.append([t("origin-corrections"), t("corrections", **corrections)])
    if source := provenance.get("finetuned_from"):
        rows.append([t("finetuned-from"), "; ".join([source["bundle"], *source["changes"]])])
    rows.append([t("machine"), f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"])
    return f"<pre>{escape(provenance.get('command') or 'Python')}</pre>{table((t('item'), t('value')), rows)}"


def _provenance_label(key: str) -> Html:
    return t(f"origin-{key}") if f"origin-{key}" in MESSAGES else escape(key.replace("_", " "))
