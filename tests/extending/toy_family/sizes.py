"""Sizes of the family `coarse`. Their names begin with the family's and a hyphen."""

from toy_family.config import CoarseConfig
from vitrail.models.sizes import Sizes

SIZES = Sizes(small=(CoarseConfig(name="coarse-large", cells=8, width=64),))
