"""The commands of `vitrail`. Large packages are imported only by the commands that need them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vitrail.api import delivery, faces, insights, listings, output, output_faces, predictions, training_commands
from vitrail.api.output import Given

_JSON = "Print one JSON document instead of a table."
_LINES = "Print a JSON line for each image instead of a table."


class Command(NamedTuple):
    """A public function as a command, and what only the command line has of it."""

    function: Callable[..., Any]
    show: Callable[[Any, Given], None]
    """Prints the result."""
    json: str | None = None
    """Help of the flag --json, if there is one."""
    open: str | None = None
    """Help of the flag --open, if there is one."""
    receiver: Callable[[Given], Callable[..., Any]] | None = None
    """Makes the function's `receiver`, which gets each result as soon as it is computed."""


class Group(NamedTuple):
    """Commands that belong together, as `vitrail faces enroll` and `vitrail faces identify` do."""

    about: str
    """Text of --help."""
    commands: Mapping[str, Command]


FACES = Group(
    "Recognise faces: train and evaluate an embedding, keep a gallery of people, verify and identify them.",
    {
        "train": Command(faces.train, output.show_run),
        "evaluate": Command(faces.evaluate, output_faces.show_evaluation, _JSON),
        "enroll": Command(faces.enroll, output_faces.show_enrolled, _JSON),
        "remove": Command(faces.remove, output_faces.show_removed, _JSON),
        "verify": Command(faces.verify, output_faces.show_verified, _JSON),
        "identify": Command(
            faces.identify, output_faces.show_identified, _LINES, receiver=output_faces.receive_identified
        ),
        "calibrate": Command(faces.calibrate, output_faces.show_calibrated, _JSON),
    },
)

COMMANDS: dict[str, Command | Group] = {
    "models": Command(listings.models, output.show_models, _JSON),
    "info": Command(listings.info, output.show_info, _JSON),
    "recipes": Command(listings.recipes, output.show_recipes, _JSON),
    "doctor": Command(training_commands.doctor, output.show_doctor, _JSON),
    "train": Command(training_commands.train, output.show_run),
    "finetune": Command(training_commands.finetune, output.show_run),
    "evaluate": Command(predictions.evaluate, output.show_evaluation, _JSON),
    "runs": Command(training_commands.runs, output.show_runs, _JSON),
    "predict": Command(predictions.predict, output.show_predictions, _LINES, receiver=output.receive_predictions),
    "inspect": Command(insights.inspect, output.show_inspection, "Print the content of inspect.json."),
    "explain": Command(insights.explain, output.show_explain, open="Open the page in a browser."),
    "weights": Command(delivery.weights, output.show_weights, _JSON),
    "convert": Command(delivery.convert, output.show_conversion, _JSON),
    "bench": Command(delivery.bench, output.show_bench, _JSON),
    "export": Command(delivery.export, output.show_export, _JSON),
    "compare": Command(insights.compare, output.show_comparison, _JSON),
    "faces": FACES,
    "demo": Command(training_commands.demo, output.show_demo, open="Open the report in a browser."),
}
