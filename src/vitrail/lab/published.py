"""Published numbers about the claims of the lab, with their sources. They come from larger models and other data."""

from vitrail.core.message_files import load_messages
from vitrail.reports.translations import translator

PUBLISHED = load_messages(__file__)
"""A sentence in English and Korean by claim. A claim without a published number has no entry."""

published_t = translator(PUBLISHED)
"""Return the sentence about a claim in both languages."""
