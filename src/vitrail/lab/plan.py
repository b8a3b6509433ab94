"""Plan what fits a budget: training speeds are measured once, and the most informative rounds are taken first."""

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.core.errors import UsageError
from vitrail.core.terminal import format_duration
from vitrail.lab.hardware import describe_machine
from vitrail.lab.images import Images
from vitrail.lab.question import Lab, Question
from vitrail.lab.training import training_trial
from vitrail.lab.trial import VERSION, Outcome, Trial
from vitrail.lab.trial_results import Results
from vitrail.models.config import read_model
from vitrail.models.create import build
from vitrail.models.device import use_channels_last

_OVERHEAD_SECONDS = 0.4  # per trial
_SPEED_SECONDS = 1.0  # of training, to measure a family's speed


def parse_budget(text: str) -> float:
    """Parse a time such as 20m, 90s or 2h into seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"Budget must be a time such as 20m, 90s or 2h, got {text!r}.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def speed_trials(images: Images, families: Sequence[str]) -> dict[str, Trial]:
    """Return one trial per family that measures its training speed on this machine."""
    trials = {}
    for family in families:
        trial = training_trial(images, family, count=images.largest, seed=0, seen=10**6, learning_rate=1e-3)
        trials[family] = dataclasses.replace(trial, task="vitrail.lab.plan:measure_speed")
    return trials


def measure_speed(settings: dict[str, Any], images: Images, _bundles: list[Path], _folder: Path) -> Outcome:
    """Trial function: measure multiply-accumulates per second of training with one thread.

    The speed is per second of processor time, which other processes on the machine do not change.
    """
    config = read_model(settings["model"])
    model = build(config).train()
    use_channels_last(model)
    batch = torch.zeros(128, config.channels, *config.resolution)
    labels = torch.zeros(128, dtype=torch.long)
    steps, started = -2, time.process_time()
    while steps < 3 or time.process_time() - started < _SPEED_SECONDS:
        if steps == 0:
            started = time.process_time()
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        steps += 1
    return Outcome({}, {"speed": 3 * config.macs * 128 * steps / (time.process_time() - started)})


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rounds of each question that fit the budget."""

    taken: dict[str, int]
    """Number of rounds by question."""
    seconds: float
    """Estimated time."""
    dropped: tuple[str, ...]
    """Descriptions of the rounds that do not fit the budget."""


def make_plan(
    questions: Mapping[str, Question],
    results: Results,
    speeds: Mapping[str, float],
    *,
    budget: float | None,
    jobs: int,
) -> Plan:
    """Take whole rounds while they fit the budget. One question is finished before the next one is begun."""
    taken, dropped, spent = dict.fromkeys(questions, 0), [], 0.0
    planned: set[str] = set()
    rounds = {name: question.rounds() for name, question in questions.items()}
    smallest_cost = None

    def has_trials() -> bool:
        return any(round_trials for name, count in taken.items() for round_trials in rounds[name][:count])

    for name, question_rounds in rounds.items():
        for number, question_round in enumerate(question_rounds, 1):
            possible = [trial for trial in question_round if questions[name].is_needed(trial, results) is not False]
            required = _required_trials(results, possible)
            missing = [trial for key, trial in required.items() if key not in planned and results.get(trial) is None]
            cost = sum(estimate_seconds(trial, speeds) / (1 if trial.alone else jobs) for trial in missing)
            if budget is not None and spent + cost > budget:
                dropped.append(f"{name}: round {number} of {len(question_rounds)} and later ({format_duration(cost)})")
                smallest_cost = smallest_cost if has_trials() else min(smallest_cost or cost, cost)
                break
            taken[name], spent = number, spent + cost
            planned |= required.keys()
    if not has_trials():
        raise UsageError(f"Budget must be at least {(smallest_cost or 0) / 60 + 0.5:.0f}m for these questions.")
    return Plan(taken, spent, tuple(dropped))


def _required_trials(results: Results, trials: Sequence[Trial]) -> dict[str, Trial]:
    """Return the trials by id, with their inputs and the trials that choose learning rates, as far as known now."""
    parts = [part for trial in trials for part in (*trial.inputs, trial)]
    required = [required for part in parts for required in (*results.rate_trials(part), part)]
    return {trial.trial_id(""): trial for trial in required}


def estimate_seconds(trial: Trial, speeds: Mapping[str, float]) -> float:
    """Estimate the duration of a trial on one core."""
    return trial.work / speeds.get(trial.family, min(speeds.values())) + _OVERHEAD_SECONDS


def plan_document(lab: Lab, request: dict[str, Any], speeds: Mapping[str, float], plan: Plan) -> dict[str, Any]:
    """Return the content of `plan.json`."""
    return {
        "version": VERSION,
        "data": {"name": lab.images.name, "fingerprint": lab.images.fingerprint, "size": lab.images.size},
        "request": request,
        "speeds": dict(speeds),
        "machine": describe_machine(),
        "rounds": plan.taken,
        "seconds": round(plan.seconds),
        "dropped": list(plan.dropped),
    }
