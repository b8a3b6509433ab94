"""The panels of `vitrail inspect` by name, in the order of the page. Another package adds one as `panel.NAME`."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.reports.inspect.panel import Panel

PANELS: "Registry[type[Panel]]" = Registry(
    "panel",
    {
        "answers": "vitrail.reports.inspect.panels.answers_panel:PredictionsPanel",
        "walk": "vitrail.reports.inspect.panels.walk_panel:WalkthroughPanel",
        "attention": "vitrail.reports.inspect.panels.attention_panel:AttentionPanel",
        "inside": "vitrail.reports.inspect.panels.inside_panel:InsideLayerPanel",
        "maps": "vitrail.reports.inspect.panels.maps_panel:MapsPanel",
        "distances": "vitrail.reports.inspect.panels.distances_panel:DistancesPanel",
        "positions": "vitrail.reports.inspect.panels.positions_panel:PositionsPanel",
        "growth": "vitrail.reports.inspect.panels.growth_panel:GrowthPanel",
        "filters": "vitrail.reports.inspect.panels.filters_panel:FiltersPanel",
        "reach": "vitrail.reports.inspect.panels.reach_panel:ReceptiveFieldPanel",
        "evidence": "vitrail.reports.inspect.panels.evidence_panel:EvidencePanel",
        "layers": "vitrail.reports.inspect.panels.layers_panel:LayersPanel",
    },
    base="vitrail.reports.inspect.panel:Panel",
)
