"""The commands of `vitrail`. Large packages are imported only by the commands that need them."""

from collections.abc import Callable

from vitrail.commands.answers import evaluate, predict
from vitrail.commands.delivery import bench, convert, export
from vitrail.commands.insights import compare, explain, inspect
from vitrail.commands.listings import info, models, recipes, weights
from vitrail.commands.training import demo, doctor, finetune, runs, train
from vitrail.faces.commands import FACES
from vitrail.flags import Group

COMMANDS: dict[str, Callable[..., None] | Group] = {
    "models": models,
    "info": info,
    "recipes": recipes,
    "doctor": doctor,
    "train": train,
    "finetune": finetune,
    "evaluate": evaluate,
    "runs": runs,
    "predict": predict,
    "inspect": inspect,
    "explain": explain,
    "weights": weights,
    "convert": convert,
    "bench": bench,
    "export": export,
    "compare": compare,
    "faces": FACES,
    "demo": demo,
}
