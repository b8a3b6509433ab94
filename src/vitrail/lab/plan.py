"""What fits a budget: speeds are measured once, rounds of questions are taken from the most informative on."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.core.errors import UsageError
from vitrail.core.terminal import clock
from vitrail.lab.hardware import machine
from vitrail.lab.images import Images
from vitrail.lab.question import Lab, Question
from vitrail.lab.results import Results
from vitrail.lab.training import training_cell
from vitrail.lab.trial import VERSION, Cell, Outcome
from vitrail.models.config import read_model
from vitrail.models.create import build
from vitrail.models.device import use_channels_last

_OVERHEAD = 0.4  # seconds of a cell besides its work
_MEASURED = 1.0  # seconds of training that tell a family's speed


def parse_budget(text: str) -> float:
    """Seconds from words like 20m, 90s, 2h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text.strip())
    if not found or not float(found[1]):
        raise UsageError(f"Budget must be a time such as 20m, 90s or 2h, got {text!r}.")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def speed_cells(images: Images, families: Sequence[str]) -> dict[str, Cell]:
    """Cells that measure how much work a second each family gets done here."""
    found = {}
    for family in families:
        cell = training_cell(images, family, count=images.largest, seed=0, seen=10**6, learning_rate=1e-3)
        found[family] = dataclasses.replace(cell, task="vitrail.lab.plan:measure_speed")
    return found


def measure_speed(settings: dict[str, Any], images: Images, _of: list[Path], _folder: Path) -> Outcome:
    """Multiply-accumulates a second of training steps, one thread. Seconds are the processor's: what else the machine
    does now may be over soon."""
    config = read_model(settings["model"])
    model = build(config).train()
    use_channels_last(model)
    batch = torch.zeros(128, config.channels, *config.resolution)
    labels = torch.zeros(128, dtype=torch.long)
    steps, began = -2, time.process_time()
    while steps < 3 or time.process_time() - began < _MEASURED:
        if steps == 0:
            began = time.process_time()
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        steps += 1
    return Outcome({}, {"speed": 3 * config.macs * 128 * steps / (time.process_time() - began)})


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which rounds of which questions are run."""

    taken: dict[str, int]
    """For each question, how many of its rounds."""
    seconds: float
    """How long they should take."""
    dropped: tuple[str, ...]
    """What does not fit, in words."""


def make_plan(
    questions: Mapping[str, Question],
    results: Results,
    speeds: Mapping[str, float],
    *,
    budget: float | None,
    jobs: int,
) -> Plan:
    """Take rounds in turns, the first of every question first, while they fit; a round is taken whole or dropped."""
    taken, dropped, spent = dict.fromkeys(questions, 0), [], 0.0
    planned: set[str] = set()
    rounds = {name: question.rounds() for name, question in questions.items()}
    least = None

    def runs_something() -> bool:
        return any(some for name, count in taken.items() for some in rounds[name][:count])

    for turn in range(max(map(len, rounds.values()), default=0)):
        for name, some in rounds.items():
            if turn >= len(some) or taken[name] < turn:
                continue
            cost, keys = 0.0, set()
            for cell in some[turn]:
                parts = (*cell.of, cell)
                for one in (one for part in parts for one in _steps(results, part)):
                    key = one.key("")
                    if key not in planned and key not in keys and results.get(one) is None:
                        cost += estimate(one, speeds) / (1 if one.alone else jobs)
                    keys.add(key)
            if budget is not None and spent + cost > budget:
                dropped.append(f"{name}: round {turn + 1} of {len(some)} and what follows ({clock(cost)})")
                least = least if runs_something() else min(least or cost, cost)
                continue
            taken[name], spent = turn + 1, spent + cost
            planned |= keys
    if not runs_something():
        raise UsageError(f"Budget must be at least {(least or 0) / 60 + 0.5:.0f}m for these questions.")
    return Plan(taken, spent, tuple(dropped))


def _steps(results: Results, cell: Cell) -> list[Cell]:
    """What is run for a cell: trials of its learning rate, as far as they are known now, and the cell."""
    beyond = results.beyond(cell)
    return [*results.trials(cell), *([] if beyond is None else [beyond]), cell]


def estimate(cell: Cell, speeds: Mapping[str, float]) -> float:
    """Seconds that a cell should take on one core."""
    return cell.work / speeds.get(cell.family, min(speeds.values())) + _OVERHEAD


def document(lab: Lab, request: dict[str, Any], speeds: Mapping[str, float], plan: Plan) -> dict[str, Any]:
    """What `plan.json` holds."""
    return {
        "version": VERSION,
        "data": {"name": lab.images.name, "fingerprint": lab.images.fingerprint, "size": lab.images.size},
        "smallest": lab.sizes[0],
        "request": request,
        "speeds": dict(speeds),
        "machine": machine(),
        "rounds": plan.taken,
        "seconds": round(plan.seconds),
        "dropped": list(plan.dropped),
    }
