"""From a file to a picture in memory. Any failure is one error that names the file and the cause."""

from pathlib import Path

from PIL import Image

from vitrail.errors import DamagedError, UsageError


def open_picture(path: str | Path) -> Image.Image:
    """The decoded picture in the file at `path`."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"Picture must be a file that exists, got {str(path)!r}.")
    try:
        with Image.open(path) as picture:
            picture.load()
            return picture
    except Exception as error:  # decoders raise whatever their format's parser raises
        raise DamagedError(f"{str(path)!r} cannot be decoded ({str(error) or type(error).__name__}).") from None
