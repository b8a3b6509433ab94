"""The commands of `vitrail`. Large packages are imported only by the commands that need them."""

from collections.abc import Callable

from vitrail.api.answers import evaluate, predict
from vitrail.api.delivery import bench, convert, export
from vitrail.api.faces import FACES
from vitrail.api.flags import Group
from vitrail.api.insights import compare, explain, inspect
from vitrail.api.listings import info, models, recipes, weights
from vitrail.api.training import demo, doctor, finetune, runs, train

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
