"""Table of the commands of `vitrail`. Large packages are imported only by the commands that need them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vitrail.api import (
    delivery,
    faces,
    insights,
    listings,
    output,
    output_faces,
    output_predictions,
    predictions,
    training_commands,
)
from vitrail.api.output import CliArguments
from vitrail.api.parameters import Parameter
from vitrail.core.flags import flag

_JSON = "Print one JSON document instead of a table."
_JSON_LINES = "Print one line of JSON per image instead of a table."


@dataclasses.dataclass(frozen=True)
class Command:
    """A public function as a command of the command line."""

    function: Callable[..., Any]
    show: Callable[[Any, CliArguments], None]
    """Print the result."""
    json: str | None = None
    """Help of the flag --json; None if the command lacks it."""
    open: str | None = None
    """Help of the flag --open; None if the command lacks it."""
    receiver: Callable[..., Callable[[Any], object]] | None = None
    """The function's `receiver`, called with the `CliArguments` first. It returns a function that prints a result."""
    computes: bool = False
    """Whether it computes with torch for long enough to compete with other programs for the processors."""
    parameters: tuple[Parameter, ...] = dataclasses.field(init=False)
    """All parameters of the function, also those that only Python has."""
    cli_parameters: tuple[Parameter, ...] = dataclasses.field(init=False)
    """Parameters of the command line."""

    def __post_init__(self) -> None:
        parameters = self.function.__dict__["parameters"]
        flags = {"json": self.json, "open": self.open}
        own_flags = (
            Parameter(name, bool, default=False, is_keyword=True, flag=flag(text), cli_type=bool, cli_default=False)
            for name, text in flags.items()
            if text is not None
        )
        object.__setattr__(self, "parameters", parameters)
        in_cli = (parameter for parameter in parameters if parameter.flag.in_cli)
        object.__setattr__(self, "cli_parameters", (*in_cli, *own_flags))


class Group(NamedTuple):
    """Commands with a common first word, such as `vitrail faces enroll` and `vitrail faces identify`."""

    about: str
    """Description for --help."""
    commands: Mapping[str, Command]


FACES = Group(
    "Recognise faces: train an embedding, keep a gallery, identify people.",
    {
        "train": Command(faces.train, output.show_run, computes=True),
        "evaluate": Command(faces.evaluate, output_faces.show_evaluation, _JSON, computes=True),
        "enroll": Command(faces.enroll, output_faces.show_enrolled, _JSON),
        "remove": Command(faces.remove, output_faces.show_removed, _JSON),
        "verify": Command(faces.verify, output_faces.show_verified, _JSON),
        "identify": Command(
            faces.identify, output_faces.show_identified, _JSON_LINES, receiver=output_faces.receive_identified
        ),
        "calibrate": Command(faces.calibrate, output_faces.show_calibrated, _JSON),
    },
)

COMMANDS: dict[str, Command | Group] = {
    "models": Command(listings.models, output.show_models, _JSON),
    "info": Command(listings.info, output.show_info, _JSON),
    "recipes": Command(listings.recipes, output.show_recipes, _JSON),
    "doctor": Command(training_commands.doctor, output.show_doctor, _JSON),
    "train": Command(training_commands.train, output.show_run, computes=True),
    "finetune": Command(training_commands.finetune, output.show_run, computes=True),
    "evaluate": Command(predictions.evaluate, output.show_evaluation, _JSON, computes=True),
    "runs": Command(training_commands.runs, output.show_runs, _JSON),
    "predict": Command(
        predictions.predict,
        output_predictions.show_predictions,
        _JSON_LINES,
        receiver=output_predictions.receive_predictions,
    ),
    "inspect": Command(insights.inspect, output.show_inspection, "Print the content of inspect.json."),
    "explain": Command(insights.explain, output.show_explain, open="Open the page in a browser."),
    "weights": Command(delivery.weights, output.show_weights, _JSON),
    "convert": Command(delivery.convert, output.show_conversion, _JSON),
    "rename": Command(delivery.rename, output.show_renamed, _JSON),
    "bench": Command(delivery.bench, output.show_bench, _JSON),
    "export": Command(delivery.export, output.show_export, _JSON),
    "compare": Command(insights.compare, output.show_comparison, _JSON),
    "faces": FACES,
    "demo": Command(training_commands.demo, output.show_demo, open="Open the report in a browser.", computes=True),
}
