"""The message files of the command line: every English text has a translation, and every translation a text."""

import ast
import errno
import functools
import itertools
import os
import re

import pytest

from tests.messages.english_texts import SOURCE, collect_messages
from vitrail.api.commands import COMMANDS, Group
from vitrail.api.help import _describe
from vitrail.api.listings import recipes
from vitrail.api.output import CLAIMS
from vitrail.core.language import FILES, load_templates, messages_in, translate
from vitrail.core.message_files import load_messages
from vitrail.data.sources.registry import source_descriptions

NAMES = ("cells", "errors", "headings", "help", "notes", "phrases", "settings")
PLACEHOLDER = re.compile(r"\{(\w+)(?::\w+\??)?\}")

UNTRANSLATED = {
    "only Python functions raise it, which are always in English": (
        "Activations must be the result of look",
        "Array must be uint8 of shape",
        "Bundle must be a path or a vitrail.Bundle",
        "Bundle must be a path, a name or a vitrail.Bundle",
        "Bundle must have a model from vitrail.create",
        "Callback must return True",
        "Embeddings must be unit vectors",
        "Embeddings must have shape",
        "Engine x1 must be given the path of a bundle",
        "Fine-tuning must have epochs, minutes or a recipe",
        "Head layers must be a text",
        "Head must be created by make_head",
        "Head must be layers of torch.nn",
        "Image must be a path, a Pillow image",
        "Image of x1 bands",
        "Images must be a list",
        "Images must be a tensor",
        "Images must be several",
        "Images must have shape",
        "Keyword of x1",
        "Labels must be a list of strings",
        "Model must be a name that `vitrail models` lists, got x1. To train an existing model",
        "Model must be as its configuration says",
        "Muon must be called without a closure",
        "Name must be a text",
        "Output format must be NCHW or NLC",
        "Pattern must be a text",
        "Pixels must be uint8",
        "Provenance must be a dictionary",
        "Resolution must be an integer or a pair",
        "Runs must be paths",
        "Settings must have strings as keys",
        "ViTClassifier requires y",
        "X must be images",
        "module 'vitrail",
        "module 'x1'",
        "x1 has no setting",
        "x1 must be x1, got",
        "x1s must be a list of integers",
    ),
    "the language is not known yet": ("VITRAIL_LANG must be",),
    "it is caught and not shown": ("no network here", "no threshold"),
    "it is written into the README of an export": ("Load a .pt2 file only", "This folder is a model repository"),
    "it has commands": ("Next:\n",),
    "its end is one of several texts, each of which has a template": ("12 images are x1",),
}


@functools.cache
def load_entries(name):
    return load_messages(str(SOURCE / "messages" / f"{name}.toml"))


def entries():
    return [(f"{name}/{key}", message) for name in NAMES for key, message in load_entries(name).items()]


def is_korean(text):
    """Return whether every sentence with a word has Korean letters."""
    sentences = re.split(r"(?<=[^.][.?!])\s+", text)
    return all(re.search("[가-힣]", sentence) for sentence in sentences if re.search(r"[a-z가-힣]", sentence))


def has_translation(text, role):
    text = f"'x.png' {text}." if role == "cause" else text
    translations = [translate(text, category) for category in ("messages", "phrases", "cells", "help", CLAIMS)]
    return any(translation and is_korean(translation) for translation in translations)


def test_every_message_has_a_korean_translation():
    prefixes = tuple(prefix for prefixes in UNTRANSLATED.values() for prefix in prefixes)
    missing = [
        f"{text.place}: {variant!r}"
        for text in collect_messages()
        for variant in text.variants
        if not variant.startswith(prefixes) and not has_translation(variant, text.role)
    ]
    assert not missing, "\n".join(missing)


def test_every_exception_is_needed():
    texts = [(variant, text.role) for text in collect_messages() for variant in text.variants]
    prefixes = [prefix for prefixes in UNTRANSLATED.values() for prefix in prefixes]
    assert [
        prefix
        for prefix in prefixes
        if not any(variant.startswith(prefix) and not has_translation(variant, role) for variant, role in texts)
    ] == []


def test_every_help_text_has_a_korean_translation():
    groups = [group for group in COMMANDS.values() if isinstance(group, Group)]
    commands = [*COMMANDS.values(), *(command for group in groups for command in group.commands.values())]
    texts = [paragraph for command in commands for paragraph in _describe(command).split("\n\n")]
    for command in commands:
        if not isinstance(command, Group):
            texts += [text for flag in command.cli_parameters for text in (flag.flag.help, flag.flag.group) if text]
    names = {"Oxford Flowers", "Oxford Pets", "Tiny-ImageNet", "digits", "fashion-40", "fashion-mnist"}
    texts += [text for text in source_descriptions() if text not in names]
    missing = [text for text in map(" ".join, map(str.split, texts)) if not is_korean(translate(text, "help") or text)]
    assert not missing, "\n".join(missing)


def test_every_recipe_and_setting_has_a_korean_meaning():
    texts = [recipe["purpose"] for recipe in recipes()]
    texts += [setting["meaning"] for setting in recipes("small")["settings"]]
    missing = []
    for text in texts:
        for sentence in re.split(r"(?<=[.?])\s+", translate(text, "settings") or text):
            choices = re.sub(r"^[a-z, ]+: ", "", sentence)  # such as "vit, hybrid: cls, gap, map."
            if re.search("[a-z]{2} [a-z]{2}", choices) and not is_korean(sentence):
                missing.append(sentence)
    assert not missing, "\n".join(missing)


def test_every_heading_has_a_korean_translation():
    """Headings are the first argument of print_table, and the names in rows of facts in `api/output*.py`."""
    headings = set()
    for path in (SOURCE / "api").glob("output*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print_table":
                headings |= {part.value for part in getattr(node.args[0], "elts", ()) if isinstance(part, ast.Constant)}
    assert len(headings) > 25
    assert {heading for heading in headings if not translate(heading, "headings")} == {"F1"}


def test_languages_have_the_same_placeholders():
    for key, message in entries():
        english, korean = (set(PLACEHOLDER.findall(message[language])) for language in ("en", "ko"))
        assert english == korean, key
        assert "}{" not in message["en"], f"{key}: two values without a text between them cannot be told apart"
        assert "{" not in PLACEHOLDER.sub("", message["en"] + message["ko"]), key


def test_templates_name_categories_that_exist():
    for key, message in entries():
        for category in re.findall(r"\{\w+:(\w+)\??\}", message["en"]):
            assert category in (*FILES, "number"), key


def test_korean_texts_are_written_in_one_style():
    """Sentences end in -니다, -세요 or a question, and no particle follows a value whose last sound is unknown."""
    for key, message in entries():
        korean = message["ko"]
        literals = PLACEHOLDER.sub("", korean)
        assert re.search("[가-힣]", literals) or not re.search("[a-z]{2} [a-z]{2}", literals), key
        if key.startswith("errors/"):
            for sentence in re.split(r"(?<=[^.][.?])\s+", PLACEHOLDER.sub("x", korean)):
                ending = re.sub(r"\([^()]*(\([^()]*\))?[^()]*\)", "", sentence).rstrip(" .:?")
                assert re.search(r"(니다|세요|[나가]요|중단됨|x|\))$|:|경고|참고|^$", ending), f"{key}: {sentence}"
        assert not re.search(r"\}(을|를|은|는|과|와)(?=[ ,.]|$)|을\(를\)|은\(는\)|이\(가\)|와\(과\)", korean), key


def split_into_words(text):
    return re.findall(r"[A-Za-z][\w'-]*", text)


def test_every_translation_belongs_to_an_english_text():
    """At least half of the pairs of neighbouring words of a template, without its values, are in the source."""
    constants = [
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    families = "vit, hybrid, mixer, lstm, igpt"
    texts = [*constants, families, *(path.read_text(encoding="utf-8") for path in SOURCE.glob("recipes/*.toml"))]
    source = "".join(f" {' '.join(split_into_words(text))} \n" for text in texts)
    system_messages = {os.strerror(number) for number in errno.errorcode}
    unused = []
    for key, message in entries():
        parts = re.split(r"\0|(?<=[.?:;])\s|\s{2,}", PLACEHOLDER.sub("\0", message["en"]))
        pairs = [" ".join(pair) for part in parts for pair in itertools.pairwise(split_into_words(part))]
        if len(pairs) < 4:  # too few to tell
            pairs = split_into_words(" ".join(parts))
        if message["en"] not in system_messages and sum(f" {pair} " in source for pair in pairs) < len(pairs) / 2:
            unused.append(f"{key}: {message['en']}")
    assert not unused, "\n".join(unused)


def test_templates_translate_their_own_english_text():
    """A template that is hidden by a more general one would never be used."""
    for category in ("messages", "phrases", "cells", "headings", "settings"):
        for template in load_templates(category)[1]:
            sample = PLACEHOLDER.sub(lambda field: "12" if "number" in field[0] else "x1", template.english)
            if not re.search(r":(phrases|messages|settings)\}", template.english):
                assert translate(sample, category), template.english


def test_no_message_file_is_read_in_english(monkeypatch):
    monkeypatch.setattr("vitrail.core.language.load_messages", lambda _: pytest.fail("a message file was read"))
    with messages_in("en"):
        from vitrail.core.language import localise

        assert localise("interrupted") == "interrupted"
