"""The report of a bias profile: `index.html` and `profile.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import UsageError
from vitrail.core.files import atomic_folder, write_json, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.lab import perturbations
from vitrail.lab.hardware import describe_machine
from vitrail.lab.lab_report import t as lab_t
from vitrail.lab.lab_report import write_figures
from vitrail.lab.profile import BundleContrast, Measurement, Profile, profile_document
from vitrail.reports.charts import Line, line_chart, matrix_chart
from vitrail.reports.colours import sequential
from vitrail.reports.families import family_colours
from vitrail.reports.page_kit import bilingual_page, figure, table
from vitrail.reports.translations import translator

_SHARES = frozenset({"accuracy", "shift", "shuffle", "drop", "low", "high", "nearest", "first", "last", "area"})

t = translator(load_messages(__file__))
"""Return a message of the page in both languages."""


def check_profile_output(output: Path) -> None:
    """Raise UsageError unless the output is a new folder or an existing profile, which will be replaced."""
    if output.is_dir() and any(output.iterdir()) and not (output / "profile.json").is_file():
        raise UsageError(f"Output must be a new folder or an existing profile, got {str(output)!r}.")


def write_profile(
    output: Path, profiles: Sequence[Profile], pairs: Sequence[BundleContrast], *, data: str, split: Split, command: str
) -> dict[str, Any]:
    """Write `index.html` and `profile.json` and return the content of the latter."""
    figures = dict(_draw_figures(profiles))
    body = f'<section id="numbers"><h2>{t("numbers")}</h2>{t("about-numbers", "p")}{_number_table(profiles)}</section>'
    if pairs:
        body += f'<section id="pairs"><h2>{t("pairs")}</h2>{t("about-pairs", "p")}{_pair_table(pairs)}</section>'
    panes = "".join(
        figure(_figure_title(name, profiles), t(f"{name.partition('-')[0]}-note"), svg) for name, svg in figures.items()
    )
    body += f'<section id="figures"><h2>{t("figures")}</h2><div class="panes">{panes}</div></section>'
    rows = [
        (t("images"), f"{data}, {split.name}: {len(split):,}"),
        *(
            (profile.name, profile.bundle.model.config.name or profile.bundle.model.config.family)
            for profile in profiles
        ),
        *((escape(key), value) for key, value in describe_machine().items()),
    ]
    body += (
        f'<section id="protocol"><h2>{lab_t("protocol")}</h2>{table(("", ""), rows)}'
        f"<pre>{escape(command or 'Python')}</pre></section>"
    )
    numbers = profile_document(profiles, pairs, data, split)
    with atomic_folder(output, force=True) as temporary:
        write_text(temporary / "index.html", bilingual_page(t("title", data=data), t("subtitle"), body))
        write_json(temporary / "profile.json", numbers)
        write_figures(temporary / "figures", figures)
    return numbers


def _figure_title(name: str, profiles: Sequence[Profile]) -> Html:
    kind, _, number = name.partition("-")
    return t(f"{kind}-title", bundle=profiles[int(number or 0)].name)


def _number_table(profiles: Sequence[Profile]) -> str:
    names = list(dict.fromkeys(name for profile in profiles for name in profile.numbers))
    heads = [t("measure"), *(head for profile in profiles for head in (profile.name, t("reference")))]
    rows: list[list[object]] = []
    for name in names:
        row: list[object] = [t(name)]
        for profile in profiles:
            measurement = profile.numbers.get(name)
            row += (
                ["-", ""]
                if measurement is None
                else [_interval_text(name, measurement), _reference_text(name, measurement)]
            )
        rows.append(row)
    for name, digits in (("parameters", 0), ("macs", 0), ("milliseconds", 2)):
        rows.append([t(name), *(cell for profile in profiles for cell in (f"{profile.cost[name]:,.{digits}f}", ""))])
    return table(heads, rows, frozenset(range(1, len(heads))))


def _interval_text(name: str, measurement: Measurement) -> str:
    low, high = measurement.interval
    scale, digits = (100, 1) if name in _SHARES else (1, 3)
    return f"{_value_text(name, measurement.estimate.value)} ({scale * low:.{digits}f} … {scale * high:.{digits}f})"


def _value_text(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name in _SHARES else f"{value:.3f}"


def _reference_text(name: str, measurement: Measurement) -> Html:
    if measurement.reference is None:
        return Html("")
    return t(f"is-{measurement.reference_kind}", value=_value_text(name, measurement.reference))


def _pair_table(pairs: Sequence[BundleContrast]) -> str:
    rows: list[list[object]] = []
    for pair in pairs:
        low, high = pair.difference.interval(pair.level)
        scale, digits = (100, 1) if pair.measure in _SHARES else (1, 3)
        ends = [f"{scale * value:+.{digits}f}" for value in (pair.difference.value, low, high)]
        conclusion = (
            t("above" if low > 0 else "below", one=pair.first, other=pair.second)
            if pair.is_significant
            else t("unclear")
        )
        rows.append(
            [t(pair.measure), f"{pair.first} - {pair.second}", f"{ends[0]} ({ends[1]} … {ends[2]})", conclusion]
        )
    heads = [t(name) for name in ("measure", "pair", "difference", "said")]
    return table(heads, rows, frozenset({2}))


def _draw_figures(profiles: Sequence[Profile]) -> list[tuple[str, str]]:
    families = [profile.bundle.model.config.family for profile in profiles]
    colours = family_colours(families)
    percent = t("percent", "tspan")
    figures = []
    shifts = [
        _accuracy_line(profile, colour, _shift_points(profile))
        for profile, colour in zip(profiles, colours, strict=True)
    ]
    figures.append(("shifts", line_chart(shifts, t("shift-axis", "tspan"), percent, dots=True)))
    for kind in perturbations.CURVES:
        lines = [
            _accuracy_line(profile, colour, perturbations.curve_points(kind, profile.accuracies))
            for profile, colour in zip(profiles, colours, strict=True)
        ]
        x_label = t(f"{kind}-axis", "tspan")
        figures.append((f"{kind}s", line_chart(lines, x_label, percent, dots=True, log_x=kind == "shuffle")))
    for kind in ("distances", "areas"):
        lines = []
        for profile, colour in zip(profiles, colours, strict=True):
            for state, name in (("trained", profile.name), ("untrained", f"{profile.name} 0")):
                curve = getattr(profile, kind).get(state, [])
                if curve:
                    line_colour = colour if state == "trained" else 7
                    joined = kind == "areas" and state == "trained"
                    ys = [100 * y for _, y in curve]
                    lines.append(Line(name, [x for x, _ in curve], ys, line_colour, joined=joined))
        if lines:
            y_label = t(f"{kind}-axis", "tspan")
            figures.append((kind, line_chart(lines, t("depth-axis", "tspan"), y_label, dots=kind == "areas")))
    reliability = [
        Line(
            profile.name,
            [100 * confidence for count, confidence, _ in profile.bins if count],
            [100 * share for count, _, share in profile.bins if count],
            colour,
        )
        for profile, colour in zip(profiles, colours, strict=True)
    ]
    reliability.append(Line("=", [0, 100], [0, 100], 7))
    figures.append(("reliability", line_chart(reliability, t("sure-axis", "tspan"), percent, dots=True)))
    for number, profile in enumerate(profiles):
        if profile.similarity is not None:
            layers = [str(layer) for layer in range(len(profile.similarity))]
            axis = t("layer-axis", "tspan")
            figures.append(
                (
                    f"similarity-{number}",
                    matrix_chart(profile.similarity, sequential(profile.similarity), layers, layers, axis, axis),
                )
            )
    return figures


def _shift_points(profile: Profile) -> list[tuple[float, str]]:
    shifts = [(float(name.partition(" ")[2]), name) for name in profile.accuracies if name.startswith("shift ")]
    return [(0.0, ""), *sorted(shifts)]


def _accuracy_line(profile: Profile, colour: int, points: Sequence[tuple[float, str]]) -> Line:
    measurements = [profile.accuracies[name] for _, name in points]
    bars = [(100 * low, 100 * high) for low, high in (measurement.interval for measurement in measurements)]
    return Line(
        profile.name,
        [x for x, _ in points],
        [100 * measurement.estimate.value for measurement in measurements],
        colour,
        bars=bars,
    )
