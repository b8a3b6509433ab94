"""Pages of many images: a contact sheet of answers, and the mistakes of a model.

DIR/index.html       an overview
DIR/NAME-1.html ...  all images of one kind, some hundred on each page, so that ten thousand still open
"""

import contextlib
import dataclasses
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from vitrail.core.errors import VitrailError
from vitrail.core.files import atomic_folder, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.evaluation.predictions.prediction_tables import PredictionRow
from vitrail.evaluation.predictions.row_sorting import Order, RowStore
from vitrail.reports.page_kit import bilingual_page, headline_numbers
from vitrail.reports.translations import translator

ON_PAGE = 200
"""Images on a page: about a megabyte."""
_PREVIEWED, _PREVIEWS = 600, 12  # images of the overview altogether, and of one answer

t = translator(load_messages(__file__))
"""A sentence of these pages, in both languages."""


def link(file: str, text: Html) -> Html:
    """A link to another page in the language of this one."""
    return Html(f'<a class="en" href="{file}">{text}</a><a class="ko" href="{file}#ko">{text}</a>')


def tile(image: str, name: str, caption: str) -> Html:
    """An image with its caption and, below it, the end of its file's name; all of it under the pointer."""
    shown = f'<img src="{image}" alt="{escape(name)}" decoding="async">' if image else ""
    short = name.rstrip("/").rpartition("/")[2]
    return Html(
        f'<figure title="{escape(name)}">{shown}<div>{escape(caption)}</div>'
        f'<div class="quiet">{escape(short)}</div></figure>'
    )


def tiles(some: Iterable[Html]) -> Html:
    """Images side by side."""
    return Html(f'<div class="images">{"".join(some)}</div>')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePages:
    """All images of one kind, on as many pages as they need."""

    stem: str
    """How the names of its files begin."""
    title: Html | str
    about: str
    count: int

    @property
    def files(self) -> list[str]:
        """The names of its pages."""
        return [f"{self.stem}-{number + 1}.html" for number in range(-(-self.count // ON_PAGE))]

    def write(self, folder: Path, every: Iterator[Html]) -> list[Html]:
        """Write its pages, of which only one is in memory at a time, from all of its tiles; returns those of the first
        page."""
        opening: list[Html] = []
        for number, file in enumerate(self.files):
            some = list(islice(every, ON_PAGE))
            opening = opening or some
            first = number * ON_PAGE
            place = t("place", first=f"{first + 1:,}", last=f"{first + len(some):,}", count=f"{self.count:,}")
            links = self._links(number)
            body = f'<p class="quiet">{place}</p>{tiles(some)}<nav>{links}</nav>'
            write_text(folder / file, bilingual_page(self.title, self.about, body, links=links))
        return opening

    def _links(self, number: int) -> Html:
        files = self.files
        parts = [link("index.html", t("overview"))]
        parts += [link(files[number - 1], t("previous"))] if number else []
        parts += [link(files[number + 1], t("next"))] if number + 1 < len(files) else []
        return Html(" · ".join(parts))


class ContactSheet:
    """Images of a folder by the answer that a model gave. They are kept on disk until the pages are written."""

    def __init__(self, spool: RowStore) -> None:
        self._spool, self._labels, self._group = spool, dict[str, int](), array("q")

    def add(self, row: PredictionRow) -> None:
        """Add an answer, with its "thumbnail"."""
        label = row["predictions"][0]["label"] if "predictions" in row else None
        self._group.append(-1 if label is None else self._labels.setdefault(label, len(self._labels)))
        try:
            self._spool.add(row)
        except OSError as error:
            raise VitrailError(f"The page needs room for a temporary file ({error.strerror}).") from None

    def write(self, folder: Path, model: str, by: Order) -> None:
        """Write its pages: an answer each, the least certain images first (or the most certain)."""
        order = np.fromiter(self._spool.order(by), np.int64, len(self._spool))
        group = np.frombuffer(self._group, np.int64) if len(order) else np.zeros(0, np.int64)
        order = order[np.argsort(group[order], kind="stable")]
        unread, *ends = np.searchsorted(group[order], range(-1, len(self._labels)), side="right").tolist()
        found = [
            (label, order[start:end]) for label, start, end in zip(self._labels, [unread, *ends], ends, strict=False)
        ]
        found.sort(key=lambda pair: -len(pair[1]))
        kinds = [(f"answer-{number}", label, members) for number, (label, members) in enumerate(found, 1)]
        if unread:
            kinds.append(("unread", t("unread"), order[:unread]))
        each = min(_PREVIEWED // max(len(kinds), 1), _PREVIEWS)
        galleries: list[tuple[ImagePages, list[Html]]] = []
        for stem, title, members in kinds:
            gallery = ImagePages(stem=stem, title=title, about=t("by-model", model=model), count=len(members))
            opening = gallery.write(folder, (self._tile(index) for index in members.tolist()))
            galleries.append((gallery, opening[:each]))
        counts = [(t("images"), len(order)), (t("answers"), len(found))]
        counts += [(t("unread"), unread)] if unread else []
        shown = headline_numbers([(name, f"{count:,}") for name, count in counts])
        write_text(folder / "index.html", self._overview(model, shown, galleries, by))

    def _overview(self, model: str, shown: Html, galleries: list[tuple[ImagePages, list[Html]]], by: Order) -> str:
        names = [Html(f"{link(one.files[0], escape(one.title))} {one.count:,}") for one, _ in galleries]
        sections = [shown, Html(f"<nav>{' · '.join(names)}</nav>"), t(f"{by}-first", "p")]
        for one, some in galleries:
            if some:  # not of each of a thousand answers
                more = link(one.files[0], t("all", count=f"{one.count:,}")) if one.count > len(some) else ""
                sections.append(Html(f"<h2>{escape(one.title)} <small>{more}</small></h2>{tiles(some)}"))
        return bilingual_page(t("contact-sheet"), t("by-model", model=model), "".join(sections))

    def _tile(self, index: int) -> Html:
        row = self._spool[index]
        if "error" in row:
            return tile("", row["file"], row["error"])
        words = [f"{one['label']} {one['score']:.3f}" for one in row["predictions"][:2]]
        return tile(row["thumbnail"], row["file"], Html("<br>".join(map(escape, words))))


@contextlib.contextmanager
def open_contact_sheet(
    output: Path, model: str, *, by: Order = "uncertain", force: bool = False
) -> Generator[ContactSheet]:
    """A contact sheet to fill; its pages are in the folder `output` only if the block succeeds."""
    with atomic_folder(output, force=force) as folder, contextlib.closing(RowStore(folder.parent)) as spool:
        sheet = ContactSheet(spool)
        yield sheet
        sheet.write(folder, model, by)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedImage:
    """An image, its answer and its truth."""

    index: int
    """Its place in the data."""
    name: str
    truth: str
    answer: str
    score: float
    own: float
    """The model's probability of the truth."""
    is_doubtful: bool
    """Whether its label is likely wrong: the model is as sure of another class as of that class's own images."""


def write_mistake_pages(
    output: Path,
    model: str,
    *,
    about: str,
    summary: Html,
    confusions: Html,
    mistakes: Sequence[EvaluatedImage],
    right: Sequence[EvaluatedImage],
    thumbnails: Callable[[Sequence[EvaluatedImage]], Iterator[str]],
    force: bool = False,
) -> None:
    """Write an evaluation: its `summary`, the mistakes, all of them, the right answers that were least certain, in the
    order given, and which classes are confused."""
    doubtful = sum(one.is_doubtful for one in mistakes)
    with atomic_folder(output, force=force) as folder:
        galleries, openings = [], []
        for stem, some in (("mistakes", mistakes), ("right", right)):
            gallery = ImagePages(
                stem=stem, title=t(f"{stem}-title", count=f"{len(some):,}"), about=about, count=len(some)
            )
            openings.append(gallery.write(folder, map(evaluated_tile, some, thumbnails(some))))
            galleries.append(gallery)
        (mistaken, sure), (opening, _) = galleries, openings
        more = [link(file, t("further", number=number)) for number, file in enumerate(mistaken.files[1:], 2)]
        sections = [
            summary,
            Html(f"<h2>{mistaken.title}</h2>"),
            t("about-mistakes" if mistakes else "no-mistakes", "p"),
            t("about-doubtful", "p", count=f"{doubtful:,}") if doubtful else Html(""),
            Html(f"<nav>{' · '.join(more)}</nav>") if more else Html(""),
            tiles(opening),
            Html(f"<nav>{' · '.join(more)}</nav>") if more else Html(""),
        ]
        if right:
            sections.append(Html(f"<h2>{link(sure.files[0], escape(sure.title))}</h2>"))
        sections.append(confusions)
        title = t("evaluation", model=model)
        write_text(folder / "index.html", bilingual_page(title, about, "".join(sections)))


def evaluated_tile(one: EvaluatedImage, image: str) -> Html:
    """An image with its truth and its answer."""
    caption = Html(escape(one.truth))
    if one.answer == one.truth:
        caption = Html(f"{caption} {one.score:.3f}")
    else:
        caption = Html(
            f'{caption} {one.own:.3f}<br><span class="wrong">{t("called", answer=one.answer)} {one.score:.3f}</span>'
        )
    if one.is_doubtful:
        caption = Html(f"{caption}<br><b>{t('doubtful')}</b>")
    return tile(image, one.name, caption)
