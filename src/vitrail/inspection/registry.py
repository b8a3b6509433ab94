"""The panels of `vitrail inspect` by name, in the order of the page. Another package adds one as `panel.NAME`."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.inspection.panel import Panel

PANELS: "Registry[type[Panel]]" = Registry(
    "panel",
    {
        "answers": "vitrail.inspection.panels.answers:Answers",
        "walk": "vitrail.inspection.panels.walk:Walk",
        "attention": "vitrail.inspection.panels.attention:Attention",
        "inside": "vitrail.inspection.panels.inside:Inside",
        "maps": "vitrail.inspection.panels.maps:Maps",
        "distances": "vitrail.inspection.panels.distances:Distances",
        "positions": "vitrail.inspection.panels.positions:Positions",
        "growth": "vitrail.inspection.panels.growth:Growth",
        "filters": "vitrail.inspection.panels.filters:Filters",
        "reach": "vitrail.inspection.panels.reach:ReceptiveField",
        "evidence": "vitrail.inspection.panels.evidence:Evidence",
        "layers": "vitrail.inspection.panels.layers:Layers",
    },
    base="vitrail.inspection.panel:Panel",
)
