"""`vitrail compare`: plan, run, answer. The same command goes on where it was, and extends when asked for more.

DIR/index.html       the report
DIR/claims.json      what the lab says of each claim
DIR/plan.json        what was asked for, what fits the budget, and the machine
DIR/results.jsonl    a line for each cell: its settings, its result, what was measured
DIR/images/          the images, at one size
DIR/cells/           a bundle for each trained cell
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import DamagedError, UsageError
from vitrail.core.files import check_writable, locked, read_json, write_json
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Say, clock
from vitrail.data.dataset import Dataset
from vitrail.data.sources.registry import open_data
from vitrail.lab import plan as planning
from vitrail.lab.executor import check_backend, run_cells
from vitrail.lab.hardware import machine
from vitrail.lab.images import Images, is_stored, prepare, restore, store
from vitrail.lab.page import write_report
from vitrail.lab.question import Lab
from vitrail.lab.registry import FAMILIES, QUESTIONS
from vitrail.lab.results import Results, needs_rate
from vitrail.lab.trial import VERSION, Cell

_SEEN = {"Pico": 20_000, "Nano": 100_000, "Nano/8": 100_000}


def compare(
    data: str | Path | Dataset,
    output: Path,
    *,
    questions: Sequence[str] = (),
    families: Sequence[str] = (),
    sizes: Sequence[int] = (),
    seeds: int = 3,
    budget: str | None = None,
    jobs: int | None = None,
    backend: str = "loky",
    command: str = "",
    tell: Say,
) -> dict[str, Any]:
    """Ask the questions on these images. Returns what `claims.json` holds."""
    check_integer("seeds", seeds, low=1, high=100)
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    check_integer("jobs", jobs, low=1, high=4096)
    names = list(dict.fromkeys(questions)) or list(QUESTIONS)
    for name in names:
        QUESTIONS.check(name)
    check_backend(backend)
    if unknown := [name for name in families if name not in FAMILIES]:
        raise UsageError(f"Families must be some of {', '.join(FAMILIES)}, got {unknown[0]!r}.")
    seconds = None if budget is None else planning.parse_budget(budget)
    dataset = open_data(data)
    _check_folder(output)
    with locked(output / ".lock", lambda holder: _refuse(output, holder)):
        before = _read_plan(output)
        images = _take_images(dataset, output, before)
        for note in images.notes:
            tell(f"note: {note}")
        lab = _make_lab(images, families, sizes, seeds)
        asked = {name: QUESTIONS[name](name, lab) for name in names}
        earlier = {name: count for name, count in (before or {}).get("rounds", {}).items() if name in QUESTIONS}
        smallest = lab.sizes[0] if before is None else before["smallest"]
        results = Results(output / "results.jsonl", images.fingerprint, smallest, len(images.validation))
        speeds = dict(before["speeds"]) if before and before.get("machine") == machine() else {}
        missing = [name for name in lab.families if name not in speeds]
        if missing:
            tell(f"measuring the speed of training here: {', '.join(missing)}")
            speeds |= _measure(output, images, missing, jobs, backend)
        request = {
            "questions": names,
            "families": list(lab.families),
            "sizes": list(lab.sizes),
            "seeds": seeds,
            "budget": budget,
        }
        commands = list(dict.fromkeys([*(before or {}).get("commands", ()), command or "Python"]))
        if before is not None and before["request"] == request:
            made = planning.Plan(before["rounds"], before["seconds"], tuple(before["dropped"]))
        else:
            made = planning.make_plan(asked, results, speeds, budget=seconds, jobs=jobs)
        document = planning.document(lab, request, speeds, made) | {"smallest": smallest, "commands": commands}
        write_json(output / "plan.json", document | {"rounds": earlier | made.taken})
        for line in made.dropped:
            tell(f"dropped for the budget: {line}")
        cells = [
            cell for name, question in asked.items() for one in question.rounds()[: made.taken[name]] for cell in one
        ]
        _run(output, results, cells, speeds, jobs=jobs, backend=backend, tell=tell)
        # The report is about every question that this lab was ever asked, and its correction over all of their claims.
        told = {name: asked.get(name) or QUESTIONS[name](name, lab) for name in QUESTIONS if name in earlier | asked}
        for question in told.values():
            question.read(results)
        return write_report(output, lab, told, machines=results.machines(), commands=commands)


def _check_folder(output: Path) -> None:
    """An output is new, or a lab."""
    content = {path.name for path in output.iterdir()} - {".lock"} if output.is_dir() else set()
    is_ours = not content or content & {"plan.json", "images"}
    if (os.path.lexists(output) and not output.is_dir()) or not is_ours:
        raise UsageError(f"Output must be a new folder or one that compare wrote, got {str(output)!r}.")
    check_writable(output)


def _refuse(output: Path, holder: str) -> None:
    raise UsageError(
        f"Output must be written by one process at a time, got {str(output)!r}, which {holder} is writing."
    )


def _read_plan(output: Path) -> dict[str, Any] | None:
    path = output / "plan.json"
    if not path.exists():
        return None
    found = read_json(path)
    if not _is_plan(found):
        raise DamagedError(path=path, cause="is not a plan as written", advice="Choose another --output.")
    if found["version"] != VERSION:
        raise UsageError(
            f"Output must be of this version of the lab ({VERSION}), got {found['version']}. Choose another --output."
        )
    return found


def _is_plan(found: object) -> bool:
    """Whether a document has the fields of a plan, each of its kind."""
    kinds = {"version": int, "data": dict, "smallest": int, "request": dict, "seconds": int}
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds.items()):
        return False
    texts, numbers = (found.get("dropped"), found.get("commands", [])), (found.get("speeds"), found.get("rounds"))
    return (
        {"name", "fingerprint"} <= found["data"].keys()
        and all(isinstance(some, list) and all(isinstance(one, str) for one in some) for some in texts)
        and all(
            isinstance(some, dict) and all(isinstance(one, int | float) for one in some.values()) for some in numbers
        )
    )


def _take_images(dataset: Dataset, output: Path, before: dict[str, Any] | None) -> Images:
    """The images of the lab, prepared once."""
    fingerprint = dataset.fingerprint()
    if before is not None and before["data"]["fingerprint"] != fingerprint:
        name = before["data"]["name"]
        raise UsageError(f"Output must be a lab on the same images, got one on {name!r}. Choose another --output.")
    folder = output / "images"
    if is_stored(folder):
        with contextlib.suppress(DamagedError):
            images = restore(folder)
            if images.fingerprint == fingerprint:
                return images
    images = prepare(dataset)
    store(images, folder)
    return restore(folder)


def _make_lab(images: Images, families: Sequence[str], sizes: Sequence[int], seeds: int) -> Lab:
    """What is compared, checked before anything is trained."""
    chosen = tuple(dict.fromkeys(families)) or FAMILIES
    classes = len(images.labels)
    counts = tuple(sorted({count // classes * classes for count in sizes})) if sizes else images.sizes()
    if counts[0] < classes or counts[-1] > images.largest:
        raise UsageError(
            f"Sizes must be from {classes} (an image of each class) to {images.largest:,} (the rarest class has"
            f" {images.largest // classes:,}), got {', '.join(map(str, sizes))}."
        )
    for family in chosen:
        images.matched(family)
    return Lab(images, chosen, counts, seeds, _SEEN[images.size])


def _measure(output: Path, images: Images, families: Iterable[str], jobs: int, backend: str) -> dict[str, float]:
    cells = planning.speed_cells(images, list(families))
    by_key = {cell.key(images.fingerprint): family for family, cell in cells.items()}
    records = run_cells(output, list(cells.values()), jobs=jobs, backend=backend)
    return {by_key[record["key"]]: record["measured"]["speed"] for record in records}


def _run(
    output: Path,
    results: Results,
    cells: Sequence[Cell],
    speeds: dict[str, float],
    *,
    jobs: int,
    backend: str,
    tell: Say,
) -> None:
    """Learning rates first, beyond the usual ones where that is better; then what is trained with them, what looks at
    trained models, and, one at a time, what must not be disturbed."""
    trained, looking = _trained(cells), [cell for cell in cells if not needs_rate(cell)]
    stages: dict[str, Callable[[], Iterable[Cell | None]]] = {
        "learning rates": lambda: (trial for cell in trained for trial in results.trials(cell)),
        "rates beyond": lambda: map(results.beyond, trained),
        "training": lambda: trained,
        "measuring": lambda: (cell for cell in looking if not cell.alone),
        "timing": lambda: (cell for cell in looking if cell.alone),
    }

    def left_of(stage: str) -> dict[str, Cell]:
        wanted = (results.resolve(cell) for cell in stages[stage]() if cell is not None)
        gone = _gone(output, results, looking)
        known = [cell for cell in wanted if cell is not None]
        return {key: cell for cell in known if (key := cell.key("")) in gone or not results.has(cell)}

    for stage in stages:
        while left := left_of(stage):  # a rate beyond that is better leads to the next one
            _run_stage(output, results, stage, left, speeds, jobs=jobs, backend=backend, tell=tell)


def _run_stage(
    output: Path,
    results: Results,
    stage: str,
    left: dict[str, Cell],
    speeds: dict[str, float],
    *,
    jobs: int,
    backend: str,
    tell: Say,
) -> None:
    """Run cells, told with the time that is left."""
    at_once = 1 if stage == "timing" else jobs
    work = {key: planning.estimate(cell, speeds) for key, cell in left.items()}
    total, done, began = sum(work.values()), 0.0, time.monotonic()
    tell(f"{stage}: {len(left)} cells, about {clock(total / at_once)}")
    for number, record in enumerate(run_cells(output, list(left.values()), jobs=at_once, backend=backend), 1):
        results.add(record)
        done += work[Cell.from_json(record["cell"]).key("")]
        spent = time.monotonic() - began
        tell(f"  {number}/{len(left)}  {_describe(record)}  {clock(spent / done * (total - done))} left")


def _trained(cells: Iterable[Cell]) -> list[Cell]:
    """Cells that train, also those that others look at."""
    return [part for cell in cells for part in (cell, *cell.of) if needs_rate(part)]


def _gone(output: Path, results: Results, looking: Iterable[Cell]) -> set[str]:
    """Trained cells whose bundle somebody deleted, while cells that look at it are still to be run."""
    resolved = [one for cell in looking if (one := results.resolve(cell)) is not None and not results.has(one)]
    return {part.key("") for one in resolved for part in one.of if not results.folder(output, part).is_dir()}


def _describe(record: dict[str, Any]) -> str:
    settings, result = record["cell"]["settings"], record["result"]
    model = settings.get("model", {}).get("name") or record["cell"]["task"].rpartition(":")[2]
    parts = [model] + [f"{name} {settings[name]:,}" for name in ("count", "seed") if name in settings]
    if settings.get("learning_rate"):
        parts.append(f"lr {settings['learning_rate']:g}")
    if "validation_accuracy" in result:  # nobody shall be led by the test images while choices are made
        parts.append(f"validation {result['validation_accuracy']:.1%}")
    return "  ".join(parts)
