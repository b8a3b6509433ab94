"""The English texts of the command line, read from the syntax trees of `src/vitrail`."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "vitrail"
VALUE, NUMBER, MESSAGE = "x1", "12", "Use float32."
"""Sample values: of a name, of a number, and of an error message in a message."""

_SPEAKERS = {"say", "tell", "_tell", "_print", "print_line", "localise", "_exit_with_message", "_in_language"}
_NUMBER_FORMAT = re.compile(r"[,.\d]*[dfge%]|,")
_MAX_VARIANTS = 32


class Text(NamedTuple):
    """A text in the source with sample values."""

    place: str
    """Module and line."""
    role: str
    """`message`, or `cause` (of an error about a file, after its name)."""
    variants: tuple[str, ...]
    """The text with each alternative of its conditional parts."""


def collect_messages() -> Iterator[Text]:
    """Yield the texts of errors, notes, warnings, progress and findings."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for role, expression in _message_expressions(node):
                for part in _elements(expression):
                    texts = (text.strip() for text in _variants(part, module))
                    if variants := tuple(text for text in texts if re.search("[a-z]{2} [a-z]{2}", text)):
                        yield Text(f"{module}:{part.lineno}", role, variants)


def _message_expressions(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Call():
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if re.fullmatch(r"[A-Z]\w*Error|Unverified|_Interrupted", name):
                yield from (("message", argument) for argument in node.args[:1])
                yield from (("message", keywords[role]) for role in ("message", "advice") if role in keywords)
                yield from (("cause", keywords[role]) for role in ("cause",) if role in keywords)
            elif name in _SPEAKERS or (name == "append" and "note" in ast.unparse(node.func)):
                yield from (("message", argument) for argument in node.args[:1])
            elif name == "Finding":
                yield from (("message", argument) for argument in node.args[3:4])
            elif "notes" in keywords:
                yield "message", keywords["notes"]
        case ast.Assign(targets=[target], value=value) | ast.AugAssign(target=target, value=value):
            if re.search(r"note\b|notes\b", ast.unparse(target)):
                yield "message", value


def _elements(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the texts of an expression that is a text, or a list of texts."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            for part in parts:
                yield from _elements(part)
        case ast.JoinedStr() | ast.Constant() | ast.BinOp():
            yield node
        case ast.IfExp(body=body, orelse=orelse):
            yield from (part for branch in (body, orelse) for part in _elements(branch))


def _variants(node: ast.expr, module: str) -> list[str]:
    """Return the texts that an expression can have, with sample values; at most 32."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            products = itertools.product(*(_variants(part, module) for part in parts))
        case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
            if conversion == ord("r"):
                return [repr(VALUE)]
            if spec is not None and _NUMBER_FORMAT.fullmatch(ast.unparse(spec)[2:-1]):
                return [NUMBER]
            return _variants(value, module)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            products = itertools.product(_variants(left, module), _variants(right, module))
        case ast.IfExp(body=body, orelse=orelse):
            return [*_variants(body, module), *_variants(orelse, module)]
        case _:
            return [_sample(ast.unparse(node), module)]
    return ["".join(product) for product in itertools.islice(products, _MAX_VARIANTS)]


_SAMPLES = {
    "api/output_predictions.py": {"counts": "12 of 12 images"},
    "bundles/parity.py": {"reason": "timm does not take the model (x1)"},
    "bundles/remote/hub.py": {"error.reason": "HF_HUB_OFFLINE is set"},
    "core/settings.py": {"rule": "a number from 0 to 1"},
    "data/doctor.py": {"are": "images are", "have": "images have"},
    "data/sources/cifar.py": {"language": "binary", "counts": "12 training and 12 test images"},
    "data/sources/published.py": {"rule": "a number below 12", "title": "Tiny-ImageNet"},
    "evaluation/run_reader.py": {"reason": "which does not exist"},
    "faces/pairs.py": {"rule": "must be NAME I J (two images of a person) or NAME I OTHER J (images of two people)"},
    "faces/thresholds.py": {"rule": "at least 12", "unit": "impostor pairs"},
    "inference/model_files.py": {"_find_flaw": "is corrupt"},
    "lab/compare.py": {"line": "x1: round 12 of 12 and later (0:12)"},
    "models/config.py": {"got": "got height 12", "geometry": "patch 4"},
    "training/finetune.py": {
        "_describe_probe": "has mAP 12 on 12 training images, each left out in turn",
        "reason": "default for the head of the bundle",
    },
    "training/resume.py": {"_advise_on_more_training": "To train on: x1"},
    "training/run.py": {"held_out_count": ""},
    "training/trainer_checkpoint.py": {"_describe_newest": "no checkpoint exists yet"},
}
"""Sample values of the expressions of a module whose values are translated, too."""


def _sample(expression: str, module: str) -> str:
    """Return a sample value of an expression."""
    if (sample := _SAMPLES.get(module, {}).get(expression.partition("(")[0])) is not None:
        return sample
    if re.search(r"suggest|did_you_mean|near$|remark|advice", expression):
        return ""
    if unit := re.search(r"^pluralise\(.*'(\w+)'\)$", expression):
        return f"{NUMBER} {unit[1]}s"
    if re.fullmatch(r"[A-Z_]+|scale \* .*|max\(.*|2 \* .*", expression):
        return NUMBER
    return MESSAGE if re.fullmatch(r"(str\()?\w*error\)?|note|message", expression) else VALUE
