"""How `make docs` turns the Markdown pages of this repository into a site in two languages.

    sphinx-build -c docs . site             English: every page.md
    sphinx-build -c docs -t ko . site/ko    Korean: page.ko.md, or page.md where there is no Korean one

A page can be read where it lies, too: links between files become links between pages of the site. Nothing that is built
loads anything from an outside address (tests/docs/test_site.py).
"""

import re
import shutil
from os.path import relpath
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.search import SearchLanguage

import vitrail
from vitrail.reports.explain.explain_page import explain

ROOT = Path(__file__).resolve().parents[1]
KOREAN = tags.has("ko")  # noqa: F821 (Sphinx puts `tags` here)

# The order of the navigation; titles are those of the pages.
GUIDE = [
    "commands",
    "data",
    "train",
    "scale",
    "finetune",
    "evaluate",
    "runs",
    "predict",
    "engines",
    "merging",
    "inspect",
    "explain",
    "lab",
    "learned",
    "notes",
    "faces",
    "weights",
    "python",
]
CHAPTERS = [f"notes-{number}" for number in range(1, 6)]  # of `notes`; each is a notebook, too
GROUND = ["families", "settings", "proved", "security", "architecture", "extending", "api"]
WALK = "walk"  # folder of the site with the page of `vitrail explain`
PAGES = [*(f"docs/{name}" for name in GUIDE + GROUND), "benchmarks/README", "CONTRIBUTING", "CHANGELOG"]
TRANSLATED = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.ko.md"), *ROOT.glob("docs/*.ko.md")]}

project = html_title = "Vitrail"
author = copyright = "The Vitrail authors"
release = vitrail.__version__
language = "ko" if KOREAN else "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md"]
exclude_patterns = [".*", "site", "dist", "tests", *sorted(TRANSLATED)]
if KOREAN:  # docstrings are English: their pages are on the English site alone
    exclude_patterns = [*(name.replace(".ko.md", ".md") for name in exclude_patterns), "docs/api/**"]
source_suffix = {".ko.md": "markdown", ".md": "markdown"} if KOREAN else {".md": "markdown"}

myst_heading_anchors = 3
default_role = "code"  # docstrings write code in single backticks, as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "fully-qualified"
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False


def write_api_pages(app: Sphinx) -> None:
    """One page for each part of the package: what the docstrings of its modules say."""
    source = ROOT / "src"
    files = sorted((source / "vitrail").rglob("*.py"), key=lambda path: path.relative_to(source).with_suffix("").parts)
    pages: dict[str, str] = {}
    for file in files:
        name = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if name in ("vitrail", "vitrail.__main__"):
            continue
        part = ".".join(name.split(".")[:2])
        heading = f"# {part}\n" if name == part else f"\n## {name}\n"
        pages[part] = pages.get(part, "") + f"{heading}\n```{{eval-rst}}\n.. automodule:: {name}\n```\n"
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        if page.stem not in pages:
            page.unlink()
    for part, text in pages.items():
        page = folder / f"{part}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to the same page in the other language lead to the other site; navigation is added to two pages."""
    here = ROOT / docname
    up = relpath(".." if KOREAN else ".", Path(docname).parent)  # to the site of English

    def other_language(link: re.Match) -> str:
        words, file, anchor = link.groups()
        target = relpath((here.parent / file).resolve(), ROOT)
        korean = target if target.endswith(".ko.md") else target.replace(".md", ".ko.md")
        if korean not in TRANSLATED or target.endswith(".ko.md") == KOREAN:
            return link.group()
        page = Path("." if KOREAN else "ko") / korean.replace(".ko.md", ".html")
        return f'<a href="{(Path(up) / page).as_posix()}{anchor or ""}">{words}</a>'

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+\.md)(#[^)]*)?\)", other_language, source[0])
    words = "이 페이지를 지금 열기(내장 모델)" if KOREAN else "Open the page here, with the embedded model"
    source[0] = source[0].replace("<!-- live page -->", f'<p><a href="{up}/{WALK}/index.html">{words}</a></p>')
    if docname == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(PAGES) + "\n```\n"
    if docname == "docs/notes":
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(CHAPTERS) + "\n```\n"
    if here.name in CHAPTERS:
        title, links, text = source[0].split("\n\n", 2)
        links += f' · <a href="{here.name}.ipynb" download>{"노트북" if KOREAN else "Notebook"}</a>'
        source[0] = "\n\n".join((title, links, text))
    if docname == "docs/api" and not KOREAN:
        source[0] += "\n```{toctree}\n:glob:\n:maxdepth: 2\n\napi/*\n```\n"


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code` and indented examples: nothing else in them is markup."""
    text, example = [], False
    for line in lines:
        if line.startswith("    "):
            text += [] if example else ["", "::", ""]
            example = True
        elif line:
            text += [""] if example else []
            example = False
            parts = line.split("`")
            parts[::2] = [re.sub(r"([*|\\]|_\b)", r"\\\1", part) for part in parts[::2]]
            line = "`".join(parts)
        text.append(line)
    lines[:] = text


def skip_member(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object) -> bool | None:
    """What scikit-learn and torch put into our classes is theirs to document."""
    return True if str(getattr(thing, "__module__", "")).startswith(("sklearn.", "torch.")) else None


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Each chapter of the notes as a notebook beside its page: blocks of code are cells, with what the page says that
    they print; links lead to pages of the site."""
    if error is not None:
        return
    import jupytext
    from nbformat.v4 import new_output

    out = Path(app.outdir) / "docs"
    for name in CHAPTERS:
        page = (ROOT / "docs" / (f"{name}.ko.md" if KOREAN else f"{name}.md")).read_text(encoding="utf-8")
        for figure in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page):
            (out / figure).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / "docs" / figure, out / figure)
        page = re.sub(r"<!-- .*? -->\n", "", page)
        own, other = (r"\.ko\.md", f"../../docs/{name}.html") if KOREAN else (r"\.md", f"../ko/docs/{name}.html")
        page = page.replace(f"({name}.md)" if KOREAN else f"({name}.ko.md)", f"({other})")
        page = re.sub(rf"\]\(([\w-]+){own}\)", r"](\1.html)", page)
        printed = re.findall(r"^```python\n.*?^```$(?:\n\n```text\n(.*?)^```$)?", page, re.DOTALL | re.MULTILINE)
        page = re.sub(r"^```text\n.*?^```$\n\n", "", page, flags=re.DOTALL | re.MULTILINE)
        notebook = jupytext.reads(page, {"extension": ".md", "split_at_heading": True})
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # drawn at random otherwise
        cells = [one for one in notebook.cells if one.cell_type == "code" and not one.source.startswith("%%")]
        for cell, output in zip(cells, printed, strict=True):
            cell.outputs = [new_output("stream", text=output)] if output else []
        jupytext.write(notebook, out / f"{name}.ipynb")


def write_index(app: Sphinx, error: Exception | None) -> None:
    """A folder opens with its `index.html`, here the page of the README. Both languages share one walk-through."""
    if error is None:
        (Path(app.outdir) / "index.html").write_bytes((Path(app.outdir) / "README.html").read_bytes())
        if not KOREAN:
            explain(vitrail.load("fashion"), output=Path(app.outdir) / WALK, force=True)


class Korean(SearchLanguage):
    """A word is found by its beginning: particles follow the noun without a space."""

    lang = "ko"
    language_name = "Korean"

    def split(self, input: str) -> list[str]:
        found = []
        for word in super().split(input):
            shortest = 2 if "가" <= word[0] <= "힣" else len(word)
            found += [word[:end] for end in range(shortest, len(word))] + [word]
        return found


def forget_sourceless(_app: Sphinx, env: BuildEnvironment) -> None:
    """Leave modules without Python source, such as that of `dict`, out of the list of sources: they have no page."""
    known = getattr(env, "_viewcode_modules", {})
    for name in [name for name, source in known.items() if not source]:
        del known[name]


def setup(app: Sphinx) -> None:
    app.add_search_language(Korean)
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("env-updated", forget_sourceless)
    app.connect("build-finished", write_index)
    app.connect("build-finished", write_notebooks)
