"""`train` and `finetune` of `vitrail.training` with the run report, which `vitrail.api` passes to them."""

import functools

from vitrail.reports.run_report import RunReport
from vitrail.training import finetune as tuning
from vitrail.training import run as running

train = functools.partial(running.train, observers=(RunReport,))
finetune = functools.partial(tuning.finetune, observers=(RunReport,))
