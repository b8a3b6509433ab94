"""The panels of `vitrail inspect` by name, in the order of the page. Another package adds one as `panel.NAME`."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.reports.inspect.panel import Panel

PANELS: "Registry[type[Panel]]" = Registry(
    "panel",
    {
        "answers": "vitrail.reports.inspect.panels.answers:Answers",
        "walk": "vitrail.reports.inspect.panels.walk:Walk",
        "attention": "vitrail.reports.inspect.panels.attention:Attention",
        "inside": "vitrail.reports.inspect.panels.inside:Inside",
        "maps": "vitrail.reports.inspect.panels.maps:Maps",
        "distances": "vitrail.reports.inspect.panels.distances:Distances",
        "positions": "vitrail.reports.inspect.panels.positions:Positions",
        "growth": "vitrail.reports.inspect.panels.growth:Growth",
        "filters": "vitrail.reports.inspect.panels.filters:Filters",
        "reach": "vitrail.reports.inspect.panels.reach:ReceptiveField",
        "evidence": "vitrail.reports.inspect.panels.evidence:Evidence",
        "layers": "vitrail.reports.inspect.panels.layers:Layers",
    },
    base="vitrail.reports.inspect.panel:Panel",
)
