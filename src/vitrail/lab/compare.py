"""`vitrail compare`: plan trials, run them, and write a report. The same command resumes a lab or extends it.

DIR/index.html       the report
DIR/claims.json      the verdict on each claim
DIR/plan.json        the request, the rounds that fit the budget, and the machine
DIR/results.jsonl    one line per trial: its settings, result and measurements
DIR/images/          the images, resized to one resolution
DIR/cells/           a bundle for each trained model
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import check_writable, file_lock, read_json, write_json
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Say, format_duration
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.lab import plan as planning
from vitrail.lab.executor import check_backend, run_trials
from vitrail.lab.hardware import describe_machine
from vitrail.lab.images import Images, is_stored, prepare, restore, store
from vitrail.lab.lab_report import write_report
from vitrail.lab.question import Lab
from vitrail.lab.registry import FAMILIES, QUESTIONS
from vitrail.lab.trial import VERSION, Trial
from vitrail.lab.trial_results import Results, needs_rate

_IMAGES_SEEN = {"Pico": 20_000, "Nano": 100_000, "Nano/8": 100_000}


def compare(
    data: str | Path | Dataset,
    output: Path,
    *,
    questions: Sequence[str] = (),
    families: Sequence[str] = (),
    sizes: Sequence[int] = (),
    seeds: int = 5,
    budget: str | None = None,
    jobs: int | None = None,
    backend: str = "loky",
    command: str = "",
    tell: Say,
) -> dict[str, Any]:
    """Run the questions on a data set, write the report, and return the content of `claims.json`."""
    check_integer("seeds", seeds, low=1, high=100)
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    check_integer("jobs", jobs, low=1, high=4096)
    names = list(dict.fromkeys(questions)) or list(QUESTIONS)
    for name in names:
        QUESTIONS.check(name)
    check_backend(backend)
    if unknown := [name for name in families if name not in FAMILIES]:
        raise UsageError(f"Families must be from {', '.join(FAMILIES)}, got {unknown[0]!r}.")
    seconds = None if budget is None else planning.parse_budget(budget)
    dataset = open_data(data)
    _check_folder(output)
    with file_lock(output / ".lock", lambda holder: _raise_locked(output, holder)):
        earlier_plan = _read_plan(output)
        images = _prepare_images(dataset, output, earlier_plan)
        for note in images.notes:
            tell(f"note: {note}")
        lab = _make_lab(images, families, sizes, seeds)
        selected = {name: QUESTIONS[name](name, lab) for name in names}
        earlier_rounds = {
            name: count for name, count in (earlier_plan or {}).get("rounds", {}).items() if name in QUESTIONS
        }
        results = Results(output / "results.jsonl", images.fingerprint)
        speeds = _training_speeds(output, lab, earlier_plan, jobs=jobs, backend=backend, tell=tell)
        request = {
            "questions": names,
            "families": list(lab.families),
            "sizes": list(lab.sizes),
            "seeds": seeds,
            "budget": budget,
        }
        commands = list(dict.fromkeys([*(earlier_plan or {}).get("commands", ()), command or "Python"]))
        if earlier_plan is not None and earlier_plan["request"] == request:
            plan = planning.Plan(earlier_plan["rounds"], earlier_plan["seconds"], tuple(earlier_plan["dropped"]))
        else:
            plan = planning.make_plan(selected, results, speeds, budget=seconds, jobs=jobs)
        document = planning.plan_document(lab, request, speeds, plan) | {"commands": commands}
        write_json(output / "plan.json", document | {"rounds": earlier_rounds | plan.taken})
        for line in plan.dropped:
            tell(f"dropped for the budget: {line}")

        def needed_trials() -> list[Trial]:
            return [
                trial
                for name, question in selected.items()
                for question_round in question.rounds()[: plan.taken[name]]
                for trial in question_round
                if question.is_needed(trial, results)
            ]

        _run_stages(output, results, needed_trials, speeds, jobs=jobs, backend=backend, tell=tell)
        # The report covers every question that this lab has ever run, and Holm's correction covers all of their claims.
        reported = {
            name: selected.get(name) or QUESTIONS[name](name, lab)
            for name in QUESTIONS
            if name in earlier_rounds | selected
        }
        for question in reported.values():
            question.read(results)
        return write_report(output, lab, reported, machines=results.machines(), commands=commands)


def _check_folder(output: Path) -> None:
    """Raise UsageError unless the output is a new folder or an existing lab."""
    content = {path.name for path in output.iterdir()} - {".lock"} if output.is_dir() else set()
    is_ours = not content or content & {"plan.json", "images"}
    if (os.path.lexists(output) and not output.is_dir()) or not is_ours:
        raise UsageError(f"Output must be a new folder or an existing lab, got {str(output)!r}.")
    check_writable(output)


def _raise_locked(output: Path, holder: str) -> None:
    raise UsageError(
        f"Output must be written by one process at a time, got {str(output)!r}, which {holder} is writing."
    )


_PLAN_FIELDS = {"version", "data", "request", "speeds", "rounds", "seconds", "dropped"}


def _read_plan(output: Path) -> dict[str, Any] | None:
    """Return the content of `plan.json`. None for a new lab."""
    path = output / "plan.json"
    if not path.exists():
        return None
    plan = read_json(path)
    if not isinstance(plan, dict) or not plan.keys() >= _PLAN_FIELDS:
        raise CorruptFileError(path=path, cause="is not a valid plan", advice="Choose another --output.")
    if plan["version"] != VERSION:
        raise UsageError(
            f"Output must be of this version of the lab ({VERSION}), got {plan['version']}. Choose another --output."
        )
    return plan


def _prepare_images(dataset: Dataset, output: Path, earlier_plan: dict[str, Any] | None) -> Images:
    """Return the images of the lab, prepared on the first run and read from disk afterwards."""
    fingerprint = dataset.fingerprint()
    if earlier_plan is not None and earlier_plan["data"]["fingerprint"] != fingerprint:
        name = earlier_plan["data"]["name"]
        raise UsageError(f"Output must be a lab on the same images, got one on {name!r}. Choose another --output.")
    folder = output / "images"
    if is_stored(folder):
        with contextlib.suppress(CorruptFileError):
            images = restore(folder)
            if images.fingerprint == fingerprint:
                return images
    images = prepare(dataset)
    store(images, folder)
    return restore(folder)


def _make_lab(images: Images, families: Sequence[str], sizes: Sequence[int], seeds: int) -> Lab:
    """Check families and sizes before anything is trained, and return the lab."""
    selected = tuple(dict.fromkeys(families)) or FAMILIES
    classes = len(images.labels)
    counts = tuple(sorted({count // classes * classes for count in sizes})) if sizes else images.sizes()
    if counts[0] < classes or counts[-1] > images.largest:
        raise UsageError(
            f"Sizes must be from {classes} (one image per class) to {images.largest:,} (the rarest class has"
            f" {images.largest // classes:,}), got {', '.join(map(str, sizes))}."
        )
    for family in selected:
        images.matched_config(family)
    return Lab(images, selected, counts, seeds, _IMAGES_SEEN[images.size])


def _training_speeds(
    output: Path, lab: Lab, earlier_plan: dict[str, Any] | None, *, jobs: int, backend: str, tell: Say
) -> dict[str, float]:
    """Return the training speed of each family. Speeds of an earlier plan are reused on the same machine."""
    is_same_machine = earlier_plan is not None and earlier_plan.get("machine") == describe_machine()
    speeds = dict(earlier_plan["speeds"]) if earlier_plan is not None and is_same_machine else {}
    missing = [name for name in lab.families if name not in speeds]
    if not missing:
        return speeds
    tell(f"measuring the training speed of {', '.join(missing)}")
    trials = planning.speed_trials(lab.images, missing)
    families = {trial.trial_id(lab.images.fingerprint): family for family, trial in trials.items()}
    records = run_trials(output, list(trials.values()), jobs=jobs, backend=backend)
    return speeds | {families[record["key"]]: record["measured"]["speed"] for record in records}


def _run_stages(
    output: Path,
    results: Results,
    needed_trials: Callable[[], Sequence[Trial]],
    speeds: dict[str, float],
    *,
    jobs: int,
    backend: str,
    tell: Say,
) -> None:
    """Run all trials in stages and write their results: learning rates, training, measurements, and timings last.

    Timings run one at a time, because other processes would disturb them. A stage is repeated while its results call
    for more trials: the next rate if the rate at the end of the range is best, or trials that a question now needs.
    """

    def remaining_trials(stage: str) -> dict[str, Trial]:
        trials = needed_trials()
        training, measurements = _training_trials(trials), [trial for trial in trials if not needs_rate(trial)]
        stages: dict[str, Iterable[Trial]] = {
            "learning rates": (rate_trial for trial in training for rate_trial in results.rate_trials(trial)),
            "training": training,
            "measuring": (trial for trial in measurements if not trial.alone),
            "timing": (trial for trial in measurements if trial.alone),
        }
        candidates = (results.resolve(trial) for trial in stages[stage])
        missing = _without_bundle(output, results, measurements)
        resolved = [trial for trial in candidates if trial is not None]
        return {key: trial for trial in resolved if (key := trial.trial_id("")) in missing or not results.has(trial)}

    for stage in ("learning rates", "training", "measuring", "timing"):
        while remaining := remaining_trials(stage):
            _run_stage(output, results, stage, remaining, speeds, jobs=jobs, backend=backend, tell=tell)


def _run_stage(
    output: Path,
    results: Results,
    stage: str,
    remaining: dict[str, Trial],
    speeds: dict[str, float],
    *,
    jobs: int,
    backend: str,
    tell: Say,
) -> None:
    """Run trials and report progress with the estimated time left."""
    workers = 1 if stage == "timing" else jobs
    work = {key: planning.estimate_seconds(trial, speeds) for key, trial in remaining.items()}
    total, done, started = sum(work.values()), 0.0, time.monotonic()
    tell(f"{stage}: {len(remaining)} trials, about {format_duration(total / workers)}")
    for number, record in enumerate(run_trials(output, list(remaining.values()), jobs=workers, backend=backend), 1):
        results.add(record)
        done += work[Trial.from_json(record["cell"]).trial_id("")]
        spent = time.monotonic() - started
        remaining_time = format_duration(spent / done * (total - done))
        tell(f"  {number}/{len(remaining)}  {_describe_trial(record)}  {remaining_time} left")


def _training_trials(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that train a model, including those that measurements need."""
    return [part for trial in trials for part in (trial, *trial.inputs) if needs_rate(part)]


def _without_bundle(output: Path, results: Results, measurements: Iterable[Trial]) -> set[str]:
    """Return the ids of training trials whose bundle was deleted although a pending measurement needs it."""
    pending = [
        measurement
        for trial in measurements
        if (measurement := results.resolve(trial)) is not None and not results.has(measurement)
    ]
    return {
        part.trial_id("")
        for measurement in pending
        for part in measurement.inputs
        if not results.folder(output, part).is_dir()
    }


def _describe_trial(record: dict[str, Any]) -> str:
    settings, result = record["cell"]["settings"], record["result"]
    model = settings.get("model", {}).get("name") or record["cell"]["task"].rpartition(":")[2]
    parts = [model] + [f"{name} {settings[name]:,}" for name in ("count", "seed") if name in settings]
    if settings.get("learning_rate"):
        parts.append(f"lr {settings['learning_rate']:g}")
    if "validation_accuracy" in result:  # do not print test accuracy while learning rates are being chosen
        parts.append(f"validation {result['validation_accuracy']:.1%}")
    return "  ".join(parts)
