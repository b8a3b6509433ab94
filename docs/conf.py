"""Sphinx configuration of `make docs`, which builds a site in two languages from the Markdown pages.

    sphinx-build -c docs . site             English: every page.md
    sphinx-build -c docs -t ko . site/ko    Korean: page.ko.md, or page.md if there is no translation

Links between Markdown files become links between pages of the site. The site loads nothing from external addresses
(tests/docs/test_site.py).
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
KOREAN = tags.has("ko")  # noqa: F821 (Sphinx defines `tags`)

# Pages in the order of the navigation. Titles are those of the pages.
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
CHAPTERS = [f"notes-{number}" for number in range(1, 6)]  # of the page `notes`; each is also written as a notebook
REFERENCE = ["families", "settings", "proved", "security", "architecture", "extending", "api"]
EXPLAIN_FOLDER = "walk"  # with the page of `vitrail explain`
PAGES = [*(f"docs/{name}" for name in GUIDE + REFERENCE), "benchmarks/README", "CONTRIBUTING", "CHANGELOG"]
TRANSLATED = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.ko.md"), *ROOT.glob("docs/*.ko.md")]}

project = html_title = "Vitrail"
author = copyright = "The Vitrail authors"
release = vitrail.__version__
language = "ko" if KOREAN else "en"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md"]
exclude_patterns = [".*", "site", "dist", "tests", *sorted(TRANSLATED)]
if KOREAN:  # docstrings are English, so their pages are only on the English site
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
    """Write docs/api/*.md: one page for each subpackage, with the docstrings of its modules."""
    source = ROOT / "src"
    files = sorted((source / "vitrail").rglob("*.py"), key=lambda path: path.relative_to(source).with_suffix("").parts)
    pages: dict[str, str] = {}
    for file in files:
        name = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if name in ("vitrail", "vitrail.__main__"):
            continue
        package = ".".join(name.split(".")[:2])
        heading = f"# {package}\n" if name == package else f"\n## {name}\n"
        pages[package] = pages.get(package, "") + f"{heading}\n```{{eval-rst}}\n.. automodule:: {name}\n```\n"
    folder = ROOT / "docs" / "api"
    folder.mkdir(exist_ok=True)
    for page in folder.glob("*.md"):
        if page.stem not in pages:
            page.unlink()
    for package, text in pages.items():
        page = folder / f"{package}.md"
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Change a page before it is parsed: link the other language's site, and add navigation and notebook links."""
    page_path = ROOT / docname
    up = relpath(".." if KOREAN else ".", Path(docname).parent)  # to the root of the English site

    def other_language(link: re.Match) -> str:
        link_text, file, anchor = link.groups()
        target = relpath((page_path.parent / file).resolve(), ROOT)
        korean = target if target.endswith(".ko.md") else target.replace(".md", ".ko.md")
        if korean not in TRANSLATED or target.endswith(".ko.md") == KOREAN:
            return link.group()
        page = Path("." if KOREAN else "ko") / korean.replace(".ko.md", ".html")
        return f'<a href="{(Path(up) / page).as_posix()}{anchor or ""}">{link_text}</a>'

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+\.md)(#[^)]*)?\)", other_language, source[0])
    link_text = "이 페이지를 지금 열기(내장 모델)" if KOREAN else "Open this page for the embedded model"
    source[0] = source[0].replace(
        "<!-- live page -->", f'<p><a href="{up}/{EXPLAIN_FOLDER}/index.html">{link_text}</a></p>'
    )
    if docname == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(PAGES) + "\n```\n"
    if docname == "docs/notes":
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(CHAPTERS) + "\n```\n"
    if page_path.name in CHAPTERS:
        title, links, text = source[0].split("\n\n", 2)
        links += f' · <a href="{page_path.name}.ipynb" download>{"노트북" if KOREAN else "Notebook"}</a>'
        source[0] = "\n\n".join((title, links, text))
    if docname == "docs/api" and not KOREAN:
        source[0] += "\n```{toctree}\n:glob:\n:maxdepth: 2\n\napi/*\n```\n"


def read_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Convert a docstring to reStructuredText in place. Only `code` and indented examples are markup."""
    text, is_example = [], False
    for line in lines:
        if line.startswith("    "):
            text += [] if is_example else ["", "::", ""]
            is_example = True
        elif line:
            text += [""] if is_example else []
            is_example = False
            parts = line.split("`")
            parts[::2] = [re.sub(r"([*|\\]|_\b)", r"\\\1", part) for part in parts[::2]]
            line = "`".join(parts)
        text.append(line)
    lines[:] = text


def skip_member(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Skip members that classes inherit from scikit-learn or torch."""
    return True if str(getattr(obj, "__module__", "")).startswith(("sklearn.", "torch.")) else None


def write_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Write each chapter of the notes as a notebook beside its page.

    Code blocks become cells with the output on the page. Links are changed to pages of the site.
    """
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
        suffix, other = (r"\.ko\.md", f"../../docs/{name}.html") if KOREAN else (r"\.md", f"../ko/docs/{name}.html")
        page = page.replace(f"({name}.md)" if KOREAN else f"({name}.ko.md)", f"({other})")
        page = re.sub(rf"\]\(([\w-]+){suffix}\)", r"](\1.html)", page)
        outputs = re.findall(r"^```python\n.*?^```$(?:\n\n```text\n(.*?)^```$)?", page, re.DOTALL | re.MULTILINE)
        page = re.sub(r"^```text\n.*?^```$\n\n", "", page, flags=re.DOTALL | re.MULTILINE)
        notebook = jupytext.reads(page, {"extension": ".md", "split_at_heading": True})
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        for number, cell in enumerate(notebook.cells):
            cell["id"] = f"cell-{number}"  # the default is random
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and not cell.source.startswith("%%")]
        for cell, output in zip(cells, outputs, strict=True):
            cell.outputs = [new_output("stream", text=output)] if output else []
        jupytext.write(notebook, out / f"{name}.ipynb")


def write_index(app: Sphinx, error: Exception | None) -> None:
    """Copy the page of the README to index.html, and write the page of `vitrail explain`, which both sites link."""
    if error is None:
        (Path(app.outdir) / "index.html").write_bytes((Path(app.outdir) / "README.html").read_bytes())
        if not KOREAN:
            explain(vitrail.load("fashion"), output=Path(app.outdir) / EXPLAIN_FOLDER, force=True)


class Korean(SearchLanguage):
    """Search for Korean words by their beginning, because particles follow nouns without a space."""

    lang = "ko"
    language_name = "Korean"

    def split(self, input: str) -> list[str]:
        prefixes = []
        for word in super().split(input):
            shortest = 2 if "가" <= word[0] <= "힣" else len(word)
            prefixes += [word[:end] for end in range(shortest, len(word))] + [word]
        return prefixes


def drop_modules_without_source(_app: Sphinx, env: BuildEnvironment) -> None:
    """Remove modules without Python source, such as `builtins`, from the pages of source code."""
    modules = getattr(env, "_viewcode_modules", {})
    for name in [name for name, source in modules.items() if not source]:
        del modules[name]


def setup(app: Sphinx) -> None:
    app.add_search_language(Korean)
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("env-updated", drop_modules_without_source)
    app.connect("build-finished", write_index)
    app.connect("build-finished", write_notebooks)
