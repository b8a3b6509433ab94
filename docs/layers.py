"""Draw docs/architecture/layers.svg from the import contracts of pyproject.toml.

.venv/bin/python docs/layers.py          (part of `make format`; tests/docs/test_site.py compares figure and contracts)
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "architecture" / "layers.svg"
WIDTH, BOX, GAP = 760, 34, 12

STYLE = """
rect { fill: #ffffff; stroke: #5b6470; } rect.light { fill: #dcecf7; } path { stroke: #5b6470; fill: none; }
text { fill: #1c2127; font: 14px ui-monospace, SFMono-Regular, Menlo, monospace; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  rect { fill: #1c2025; stroke: #98a2b0; } rect.light { fill: #173a52; }
  path { stroke: #98a2b0; } text { fill: #e8eaed; }
}
"""


def draw() -> str:
    """Return the figure as SVG: rows of modules, each above those it may import. Modules without torch are coloured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    without_torch = [contract for contract in contracts if "torch" in contract.get("forbidden_modules", ())]
    light = {name for contract in without_torch for name in contract["source_modules"]}
    height = len(rows) * (BOX + GAP) - GAP + 2
    parts = []
    for row, layer in enumerate(rows):
        names = layer.split(" | ")
        width = (WIDTH - 40 - GAP * (len(names) - 1)) / len(names)
        top = row * (BOX + GAP) + 1
        for column, name in enumerate(names):
            left = 1 + column * (width + GAP)
            css_class = ' class="light"' if name in light else ""
            parts.append(f'<rect{css_class} x="{left:g}" y="{top}" width="{width:g}" height="{BOX}" rx="4"/>')
            parts.append(f'<text x="{left + width / 2:g}" y="{top + 22}">{name.removeprefix("vitrail.")}</text>')
    arrow = f'<path d="M {WIDTH - 16} 4 V {height - 6} m -6 -8 l 6 8 l 6 -8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>The parts of vitrail; each may import only what is below it</title><style>{STYLE}</style>\n"
        + "\n".join([*parts, arrow])
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(draw(), encoding="utf-8")
