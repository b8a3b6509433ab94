"""`report.html`: the course and the scores of a run, in one file.

While the run trains, the first rank rewrites it after evaluations and checkpoints, and a browser that shows it loads it
again. At the end, or when the run is interrupted, it no longer does.
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
_REFRESH = 10  # seconds after which a browser loads the report of a run that trains again
_PAUSE, _SHARE = 5.0, 0.01  # least seconds between two reports of a run that trains; most of its time they may take
_DOTTED = 40  # evaluations that are drawn with dots
_IMAGE, _IMAGES = "photo.jpg", "other-photos"  # what stands for a user's own in commands

t = translator(MESSAGES)
"""A sentence of the report, in both languages."""


class RunReport(Observer):
    """The report of a run, from its first evaluation (`update`) to its end (`finish`). If the run ends by an error, the
    last report says so (`fail`)."""

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._due, self._is_silent = 0.0, False

    def update(self, position: RunProgress) -> None:
        """Write the course of the run so far, unless that was done a moment ago. A failure is only a warning."""
        began = time.monotonic()
        if began >= self._due:
            self._write_course(position, None)
            now = time.monotonic()
            self._due = now + max(_PAUSE, (now - began) / _SHARE)

    def fail(self, position: RunProgress, error: BaseException) -> None:
        self._write_course(position, error)

    def finish(self, outcome: FinishedRun) -> None:
        """Write the report of the finished run."""
        info, events, bundle, judgement = self._info, self._events(), outcome.bundle, outcome.judgement
        shown = [] if judgement is None else registry.summary(judgement)
        parts = [
            _notes(events, bundle.provenance),
            _summary(bundle.provenance, shown, events),
            _curves(events, info, is_over=True) if bundle.provenance["steps"] else "",
            _illustration(outcome.illustrate(), info.korean),
            "" if judgement is None else registry.sections(judgement),
            f"<h2>{t('next')}</h2>{_next(info.folder, info.data, info.dataset, outcome.split, bundle)}",
            f"<h2>{t('again')}</h2>{_origin(bundle.provenance)}",
        ]
        try:
            self._write(t("finished", time=_now()), "\n".join(parts))
        except OSError as error:
            raise VitrailError(f"Writing {str(info.folder / 'report.html')!r} failed ({error.strerror}).") from None

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self._info.folder / "metrics.jsonl")

    def _write_course(self, position: RunProgress, error: BaseException | None) -> None:
        """The report of a run that is not at its end, and of one that was ended by an error."""
        try:
            events, info = self._events(), self._info
            done = {"step": position.step, "total": position.total, "time": _now()}
            if error is None:
                state = t("training", "p", left=_left(events, position.total), seconds=_REFRESH, **done)
                news = f'<div class="news" role="status">{state}</div>'
            else:
                # A signal is said by `interrupted` itself; what is no error of ours has words of its own elsewhere.
                why = str(error) if isinstance(error, VitrailError) else type(error).__name__
                why = "" if isinstance(error, Interrupted) else f"<p>{escape(why)}</p>"
                going_on = f"<pre>{escape(_resumed(info.command))}</pre>"
                news = f'<div class="warn">{t("interrupted", "p", **done)}{why}{going_on}</div>'
            curves = _curves(events, info, is_over=False)
            parts = [news, _course(events, info, position), curves]
            parts.append(f"<h2>{t('again')}</h2><pre>{escape(info.command or 'Python')}</pre>")
            refresh = _REFRESH if error is None else 0
            self._write(t("in-training" if error is None else "not-finished"), "\n".join(parts), refresh=refresh)
        except Exception as failure:  # whatever it is, a page is not worth a run
            if not self._is_silent:
                self._is_silent = True
                reason = getattr(failure, "strerror", None) or str(failure)
                self._info.say(f"warning: report.html cannot be written ({reason}). Training goes on.")

    def _write(self, state: str, body: str, *, refresh: int = 0) -> None:
        config = self._info.model
        title = t("title", model=config.name or config.family, data=self._info.dataset.name)
        subtitle = Html(f"{t('size', parameters=config.parameters, macs=config.macs)} · {state}")
        document = bilingual_page(title, subtitle, body, refresh=refresh)
        replace_text(self._info.folder / "report.html", document)


def _now() -> str:
    return datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def _resumed(command: str) -> str:
    """The command that resumes an interrupted run; in Python, the argument."""
    if not command.startswith("vitrail "):  # nothing, or a call that no shell could take apart
        return "resume=True"
    words = [t for t in shlex.split(command) if t != "--force"]  # it would start from scratch
    resumes = any(t.partition("=")[0] == "--resume" for t in words)
    return shlex.join(words if resumes else [*words, "--resume", "auto"])


# The parts of the page


def _left(events: Events, total: int) -> str:
    """The time that is left, at the speed since the run last started."""
    since = max((at for at, event in enumerate(events) if event["event"] == "resume"), default=0)
    timed = [one for one in select_events(events[since:], "step") if is_number(one.get("seconds"))]
    if len(timed) < 2 or timed[-1]["step"] == timed[0]["step"]:
        return "?"
    steps, seconds = (timed[-1][key] - timed[0][key] for key in ("step", "seconds"))
    return format_duration(max(seconds / steps * (total - timed[-1]["step"]), 0))


def _course(events: Events, info: RunInfo, position: RunProgress) -> str:
    """The main numbers of a run that is not at its end."""
    steps, seen = select_events(events, "step"), select_events(events, "evaluate")
    pairs = []
    if seen and is_number(seen[-1].get(info.watched)):
        name = with_korean(info.watched_name, info.korean)
        pairs.append((t("held-out-now", metric=name, count=seen[-1]["count"]), f"{seen[-1][info.watched]:.1%}"))
    if steps and steps[-1]["loss"] is not None:
        pairs.append((t("training-loss"), f"{steps[-1]['loss']:.3f}"))
    pairs += [
        (t("steps-of", total=position.total), f"{position.step:,}"),
        (t("epochs"), _epochs(position.step / info.steps_per_epoch)),
        (t("time"), format_duration(position.seconds)),
    ]
    return headline_numbers(pairs)


def _epochs(epochs: float) -> str:
    """With one digit; less than one with two that say something."""
    return f"{epochs:.2g}" if epochs < 1 else f"{epochs:,.1f}".removesuffix(".0")


def _summary(provenance: dict[str, Any], judged: list[tuple[str, str]], events: Events) -> str:
    """The main numbers of a finished run; `judged` are those of its final evaluation."""
    pairs = list(judged)
    fitted = provenance.get("scores", {}).get("training_accuracy")
    pairs += [(t("training-accuracy"), f"{fitted:.1%}")] if fitted is not None else []
    pairs += [
        (t("probe", count=event["count"]), f"{event['accuracy']:.1%}") for event in select_events(events, "probe")
    ]
    pairs += [
        (t("steps"), f"{provenance['steps']:,}"),
        (t("epochs"), _epochs(provenance["epochs"])),
        (t("time"), format_duration(provenance["seconds"])),
    ]
    return headline_numbers(pairs)


def _notes(events: Events, provenance: dict[str, Any]) -> str:
    """What a reader of the numbers must know: which model was kept, interruptions, images that could not be read."""
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
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in list(files.values())[:50])
        notes += t(
            "damaged", "p", n=len(files), images=pluralise(len(files), "image"), policy=provenance["damaged"]["policy"]
        )
        notes += f"<ul>{listed}</ul>"
    return notes


def _curves(events: Events, info: RunInfo, *, is_over: bool) -> str:
    """Loss, held-out metric, learning rate and speed, over steps and over seconds. A single step is no curve: its
    numbers are in the title."""
    training, held_out = t("in-training-images", "tspan"), t("held-out", "tspan")
    loss = training_curve(events, "step", "loss", training, 0)
    seen = training_curve(events, "evaluate", "loss", held_out, 1)
    if not loss.steps and not seen.steps:
        return t("no-steps-yet", "p")
    lasts = {name: f"{one.values[-1]:.3f}" if one.values else "-" for name, one in (("loss", loss), ("held", seen))}
    title = t("loss-both" if seen.values else "loss-at-end", **lasts)
    has_course = len({*loss.steps, *seen.steps}) > 1
    content = draw_curves([loss, seen] if seen.values else [loss], t("loss", "tspan")) if has_course else ""
    drawn = [figure(title, t("loss-note"), content)]
    watched = training_curve(events, "evaluate", info.watched, held_out, 1, factor=100)
    if watched.values:
        name = with_korean(info.watched_name, info.korean)
        label = t("percent", "tspan", metric=with_korean(info.watched_name, info.korean, "tspan"))
        best = int(np.argmax(watched.values))
        count = select_events(events, "evaluate")[-1]["count"]
        note = t("watched-note", count=count, best=f"{watched.values[best]:.1f}%", step=watched.steps[best])
        dots = len(watched.values) < _DOTTED
        curve = draw_curves([watched], label, dots=dots) if len(watched.values) > 1 else ""
        title = "watched-title" if is_over else "watched-so-far"
        drawn.append(figure(t(title, metric=name, value=f"{watched.values[-1]:.1f}%"), note, curve))
    rate = training_curve(events, "step", "learning_rate", "", 7)
    speed = training_curve(events, "step", "images_per_second", "", 2)
    if len(rate.values) > 1:
        note = t("rate-note", peak=f"{info.peak_learning_rate:.3g}")
        drawn.append(figure(t("rate-title"), note, draw_curves([rate], t("rate", "tspan"))))
    if speed.values:
        title = t("speed-title", speed=f"{statistics.median(speed.values):,.0f}")
        curve = draw_curves([speed], t("speed", "tspan")) if len(speed.values) > 1 else ""
        drawn.append(figure(title, t("speed-note"), curve))
    return with_axis_choice(f'<div class="panes">{"".join(drawn)}</div>')


def _illustration(illustration: IllustrationArrays | None, korean: Mapping[str, str]) -> str:
    """What the objective makes of some images, row by row."""
    if illustration is None:
        return ""
    lines = []
    for caption, pixels_BHWC in illustration.rows:
        tiles = "".join(f"<figure>{image(tile, caption)}</figure>" for tile in pixels_BHWC)
        lines.append(f'<p class="quiet">{with_korean(caption, korean)}</p><div class="images">{tiles}</div>')
    return f"<h2>{with_korean(illustration.title, korean)}</h2>{''.join(lines)}"


def _next(folder: Path, data: str | None, dataset: Dataset, split: Split, bundle: Bundle) -> str:
    """Commands for what one does with a model, with the paths of this run."""
    commands = list(_commands(folder, data, dataset, split, bundle))
    lines = "".join(f"{t(name, 'p')}<pre>{escape(_typed(words))}</pre>" for name, words in commands)
    placeholders = [one for one in (_IMAGE, _IMAGES) if any(one in words for _, words in commands)]
    notes = "".join(t(f"placeholder-{one}", "p") for one in placeholders)
    return f'<div class="next">{lines}</div><div class="quiet">{t("where", "p")}{notes}</div>'


def _commands(
    folder: Path, data: str | None, dataset: Dataset, split: Split, bundle: Bundle
) -> Iterator[tuple[str, list[str]]]:
    """Each command with the name of the sentence that introduces it."""
    model, output = str(folder / "bundle"), str(folder)
    shown = _IMAGE if split.in_memory is not None or not len(split) else str(split.images[0])
    inspect = ["inspect", model, shown, "--output", f"{output}-inspect"]
    if bundle.info.classifies:
        yield "do-predict", ["predict", model, shown]
        # Data without splits would be judged by images that the model was trained on.
        is_apart = not dataset.splits.keys().isdisjoint(("val", "test"))
        yield "do-evaluate", ["evaluate", model, data if data is not None and is_apart else _IMAGES]
        yield "do-inspect", inspect
        yield "do-finetune", ["finetune", model, _IMAGES, "--output", f"{output}-finetuned"]
        return
    with contextlib.suppress(UsageError):  # what predicts pixels has no features for a file
        bundle.info.check_computable()
        yield "do-predict-features", ["predict", model, shown, "--features", f"{output}-features.npz"]
    taught = _IMAGES if data is None else data
    yield "do-evaluate-features", ["evaluate", model, taught, "--protocol", "knn"]
    yield "do-inspect", inspect
    yield "do-finetune-features", ["finetune", model, taught, "--output", f"{output}-finetuned"]


def _typed(words: Iterable[str]) -> str:
    """A command of vitrail for a shell."""
    return shlex.join(["vitrail", *words])


def _origin(provenance: dict[str, Any]) -> str:
    plain = {key: value for key, value in provenance.items() if not isinstance(value, dict) and key != "command"}
    rows = [[_name_of(key), format_setting(value)] for key, value in plain.items()]
    if source := provenance.get("finetuned_from"):
        rows.append([t("finetuned-from"), "; ".join([source["bundle"], *source["changes"]])])
    rows.append([t("machine"), f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"])
    return f"<pre>{escape(provenance.get('command') or 'Python')}</pre>{table((t('what'), t('value')), rows)}"


def _name_of(key: str) -> Html:
    return t(f"origin-{key}") if f"origin-{key}" in MESSAGES else escape(key.replace("_", " "))
