"""Pages of many images: a contact sheet of predictions, and the mistakes of a model.

DIR/index.html       an overview
DIR/NAME-1.html ...  all images of one group, 200 per page, so that ten thousand images still open in a browser
"""

import contextlib
import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from vitrail.core.errors import VitrailError
from vitrail.core.files import atomic_folder, escape_surrogates, write_text
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.core.natural_order import natural_key
from vitrail.evaluation.predictions.prediction_tables import PredictionRow
from vitrail.evaluation.predictions.row_sorting import Order, RowStore
from vitrail.reports.corrections import Correctable, CorrectionControls
from vitrail.reports.page_kit import bilingual_page, headline_numbers
from vitrail.reports.translations import translator

IMAGES_PER_PAGE = 200
"""Number of images on a page, which is then about one megabyte."""
_MAX_PREVIEWS = 600  # on the overview, of all groups together
_PREVIEWS_PER_GROUP = 12

t = translator(load_messages(__file__))
"""Return a message of these pages in both languages."""


def link(file: str, text: Html) -> Html:
    """Return a link to another page that keeps the language of the current page."""
    return Html(f'<a class="en" href="{file}">{text}</a><a class="ko" href="{file}#ko">{text}</a>')


def tile(image: str, name: str, caption: str, *, photo: str = "", attributes: str = "") -> Html:
    """Return an image with its caption and file name. The tooltip shows the complete path.

    `image` is a data URL, or empty for an image that could not be read. `photo` is the URL of its file, to which the
    image is a link. `attributes` are those of `Correctable`.
    """
    picture = f'<img src="{image}" alt="{escape(name)}" decoding="async">' if image else ""
    short_name = escape(name.rstrip("/").rpartition("/")[2])
    if photo and image:
        picture = f'<a href="{photo}">{picture}</a>'
    elif photo:
        short_name = Html(f'<a href="{photo}">{short_name}</a>')
    return Html(
        f'<figure title="{escape(name)}"{attributes}>{picture}<div>{escape(caption)}</div>'
        f'<div class="quiet name">{short_name}</div></figure>'
    )


def tile_grid(tiles: Iterable[Html]) -> Html:
    """Return tiles side by side."""
    return Html(f'<div class="images">{"".join(tiles)}</div>')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageGroup:
    """Images under one heading, for instance those with the same predicted class, on numbered pages."""

    stem: str
    """Start of the names of its files."""
    title: Html | str
    about: str
    """Subtitle of its pages."""
    count: int
    """Number of images."""

    @property
    def files(self) -> list[str]:
        """File names of its pages."""
        return [f"{self.stem}-{number + 1}.html" for number in range(-(-self.count // IMAGES_PER_PAGE))]

    def write_pages(self, folder: Path, tiles: Iterator[Html], controls: CorrectionControls) -> list[Html]:
        """Write the pages, with one page in memory at a time. Return the tiles of the first page."""
        first_page_tiles: list[Html] = []
        for number, file in enumerate(self.files):
            page_tiles = list(islice(tiles, IMAGES_PER_PAGE))
            first_page_tiles = first_page_tiles or page_tiles
            first = number * IMAGES_PER_PAGE + 1
            fields = {"first": first, "last": first - 1 + len(page_tiles), "count": self.count}
            position = t("position", **{name: f"{value:,}" for name, value in fields.items()})
            links = self._page_links(number)
            tiles_and_links = f"{tile_grid(page_tiles)}<nav>{links}</nav>"
            body = f'<p class="quiet">{position}</p>{controls.introduction}{tiles_and_links}{controls.bar}'
            write_text(folder / file, bilingual_page(self.title, self.about, body, links=links, script=controls.script))
        return first_page_tiles

    def _page_links(self, number: int) -> Html:
        """Return links from a page to the overview and to the previous and next page."""
        files = self.files
        links = [link("index.html", t("overview"))]
        links += [link(files[number - 1], t("previous"))] if number else []
        links += [link(files[number + 1], t("next"))] if number + 1 < len(files) else []
        return Html(" · ".join(links))


class ContactSheet:
    """Thumbnails of images, grouped by predicted class.

    `add` stores the rows in a temporary file. `write` writes the pages.
    """

    def __init__(self, rows: RowStore, classes: Sequence[str] = ()) -> None:
        self._rows, self._classes = rows, classes
        self._digest = hashlib.sha256()
        self._groups: dict[str, int] = {}
        """Group number of each predicted class, in the order of first occurrence."""
        self._group_of_row = array("q")  # -1 for an image without a prediction

    def add(self, row: PredictionRow, path: str = "", photo: str = "") -> None:
        """Add the prediction of an image, with its data URL as "thumbnail".

        `path` is the path of its file, empty for an image that is not a file, and `photo` the URL of the file.
        """
        label = row["predictions"][0]["label"] if "predictions" in row else None
        row = {**row, "path": path, "photo": photo}
        self._digest.update(escape_surrogates(f"{row['file']}\0{label}\n").encode())
        self._group_of_row.append(-1 if label is None else self._groups.setdefault(label, len(self._groups)))
        try:
            self._rows.add(row)
        except OSError as error:
            raise VitrailError(f"Writing the temporary file of the contact sheet failed ({error.strerror}).") from None

    def write(self, folder: Path, model: str, by: Order) -> None:
        """Write the pages of each predicted class, largest class first, and the overview. `by` orders the images.

        Equally large classes are sorted by name, 2 before 10.
        """
        order = np.fromiter(self._rows.order(by), np.int64, len(self._rows))
        groups = np.frombuffer(self._group_of_row, np.int64) if len(order) else np.zeros(0, np.int64)
        order = order[np.argsort(groups[order], kind="stable")]
        unread, *ends = np.searchsorted(groups[order], range(-1, len(self._groups)), side="right").tolist()
        by_label = [
            (label, order[start:end]) for label, start, end in zip(self._groups, [unread, *ends], ends, strict=False)
        ]
        by_label.sort(key=lambda pair: (-len(pair[1]), natural_key(pair[0])))
        members_by_group = [(f"answer-{number}", label, members) for number, (label, members) in enumerate(by_label, 1)]
        if unread:
            members_by_group.append(("unread", t("unread"), order[:unread]))
        selectable_labels = [(label, label) for label in self._classes]
        controls = CorrectionControls(selectable_labels=selectable_labels, key=self._digest.hexdigest()[:16])
        preview_count = min(_MAX_PREVIEWS // max(len(members_by_group), 1), _PREVIEWS_PER_GROUP)
        previews: list[tuple[ImageGroup, list[Html]]] = []
        for stem, title, members in members_by_group:
            group = ImageGroup(stem=stem, title=title, about=t("by-model", model=model), count=len(members))
            tiles = (self._tile(index) for index in members.tolist())
            first_page_tiles = group.write_pages(folder, tiles, controls)
            previews.append((group, first_page_tiles[:preview_count]))
        counts = [(t("images"), len(order)), (t("classes"), len(by_label))]
        counts += [(t("unread"), unread)] if unread else []
        headline = headline_numbers([(caption, f"{count:,}") for caption, count in counts])
        sections = [headline, *self._overview(previews, by, controls)]
        title, about = t("contact-sheet"), t("by-model", model=model)
        write_text(folder / "index.html", bilingual_page(title, about, "".join(sections), script=controls.script))

    def _overview(
        self, previews: list[tuple[ImageGroup, list[Html]]], by: Order, controls: CorrectionControls
    ) -> Iterator[Html]:
        """Yield the overview: links to all groups, and a few tiles of each group unless there are too many groups."""
        links = [Html(f"{link(group.files[0], escape(group.title))} {group.count:,}") for group, _ in previews]
        yield Html(f"<nav>{' · '.join(links)}</nav>")
        yield t(f"{by}-first", "p")
        yield controls.introduction
        for group, tiles in previews:
            if tiles:
                more = link(group.files[0], t("all", count=f"{group.count:,}")) if group.count > len(tiles) else ""
                yield Html(f"<h2>{escape(group.title)} <small>{more}</small></h2>{tile_grid(tiles)}")
        yield controls.bar

    def _tile(self, index: int) -> Html:
        """Return the tile of a stored row: the image with its two most probable classes, or with its error."""
        row = self._rows[index]
        if "error" in row:
            return tile("", row["file"], row["error"], photo=row["photo"])
        predictions = row["predictions"][:2]
        lines = [f"{entry['label']} {entry['score']:.3f}" for entry in predictions]
        correctable = Correctable(name=row["path"], guess=predictions[-1]["label"])
        caption = Html("<br>".join(map(escape, lines)))
        return tile(row["thumbnail"], row["file"], caption, photo=row["photo"], attributes=correctable.attributes)


@contextlib.contextmanager
def open_contact_sheet(
    output: Path, model: str, classes: Sequence[str] = (), *, by: Order = "uncertain", force: bool = False
) -> Generator[ContactSheet]:
    """Return a contact sheet to add rows to. Its pages are written to `output` only if the block succeeds.

    `classes` are the labels that the pages offer as corrections.
    """
    with atomic_folder(output, force=force) as folder, contextlib.closing(RowStore(folder.parent)) as rows:
        sheet = ContactSheet(rows, classes)
        yield sheet
        sheet.write(folder, model, by)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedImage:
    """An image with its true and its predicted class."""

    index: int
    """Its index in the split."""
    name: str
    photo: str
    """URL of its file, relative to the pages; empty if it is not a file."""
    correctable: Correctable
    truth: str
    prediction: str
    confidence: float
    """Probability of the predicted class."""
    truth_probability: float
    """Probability of the true class."""
    is_doubtful: bool
    """Whether its label is likely wrong: the model is as confident of another class as on that class's own images."""


def write_mistake_pages(
    output: Path,
    model: str,
    *,
    about: str,
    summary: Html,
    confusions: Html,
    mistakes: Sequence[EvaluatedImage],
    correct: Sequence[EvaluatedImage],
    thumbnails: Callable[[Sequence[EvaluatedImage]], Iterator[str]],
    controls: CorrectionControls,
    force: bool = False,
) -> None:
    """Write pages about an evaluation to the folder `output`, atomically.

    They show the `summary`, all `mistakes`, the `correct` predictions and the table of `confusions`. Images keep their
    order. `thumbnails` returns the data URLs of images.
    """
    doubtful_count = sum(image.is_doubtful for image in mistakes)
    with atomic_folder(output, force=force) as folder:
        groups, previews = [], []
        for stem, images in (("mistakes", mistakes), ("right", correct)):
            title = t(f"{stem}-title", count=f"{len(images):,}")
            group = ImageGroup(stem=stem, title=title, about=about, count=len(images))
            tiles = map(evaluated_tile, images, thumbnails(images))
            previews.append(group.write_pages(folder, tiles, controls))
            groups.append(group)
        (mistake_group, correct_group), (mistake_tiles, _) = groups, previews
        links = [link(file, t("further", number=number)) for number, file in enumerate(mistake_group.files[1:], 2)]
        nav = Html(f"<nav>{' · '.join(links)}</nav>") if links else Html("")
        sections = [
            summary,
            Html(f"<h2>{mistake_group.title}</h2>"),
            t("about-mistakes" if mistakes else "no-mistakes", "p"),
            t("about-doubtful", "p", count=f"{doubtful_count:,}") if doubtful_count else Html(""),
            controls.introduction if mistakes else Html(""),
            nav,
            tile_grid(mistake_tiles),
            nav,
        ]
        if correct:
            sections.append(Html(f"<h2>{link(correct_group.files[0], escape(correct_group.title))}</h2>"))
        sections += [confusions, controls.bar]
        page = bilingual_page(t("evaluation", model=model), about, "".join(sections), script=controls.script)
        write_text(folder / "index.html", page)


def evaluated_tile(image: EvaluatedImage, thumbnail: str) -> Html:
    """Return an image with its true class and, if that is another one, its predicted class."""
    caption = Html(escape(image.truth))
    if image.prediction == image.truth:
        caption = Html(f"{caption} {image.confidence:.3f}")
    else:
        prediction = t("predicted", prediction=image.prediction)
        caption = Html(
            f'{caption} {image.truth_probability:.3f}<br><span class="wrong">{prediction} {image.confidence:.3f}</span>'
        )
    if image.is_doubtful:
        caption = Html(f"{caption}<br><b>{t('doubtful')}</b>")
    return tile(thumbnail, image.name, caption, photo=image.photo, attributes=image.correctable.attributes)
