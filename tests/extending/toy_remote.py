"""A source of weights, `attic:NAME`: folders of a disk that the environment variable ATTIC names."""

import os
from pathlib import Path

from vitrail.bundles.remote.base import Download, Remote, check_sha256
from vitrail.core.errors import UsageError
from vitrail.core.files import checksum


class Attic(Remote):
    def fetch(self, address: str, sha256: str | None) -> Download:
        folder = Path(os.environ["ATTIC"]) / address.removeprefix("attic:")
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise UsageError(f"Source must be a folder in the attic, got {address!r}.")
        digest = checksum(weights)
        check_sha256(sha256, digest, weights)
        return Download(path=folder, address=address, weights={weights.name: digest}, discard=lambda: None)
