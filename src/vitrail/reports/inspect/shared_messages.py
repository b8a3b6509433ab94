"""Messages of the page of `vitrail inspect` and of several panels, and meanings of the symbols of equations."""

from pathlib import Path

from vitrail.core.message_files import load_messages

SHARED_MESSAGES = load_messages(__file__)
SYMBOL_MEANINGS = load_messages(str(Path(__file__).with_name("symbols.toml")))
