"""The language of the command line: selection, templates, and commands in Korean."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

import vitrail
from vitrail.cli import find_language
from vitrail.core import language
from vitrail.core.errors import UsageError
from vitrail.core.language import Template, localise, messages_in, translate

KOREAN = {"VITRAIL_LANG": "ko"}


def run(*words, environ, **options):
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("VITRAIL_LANG", "LC_", "LANG"))}
    command = [sys.executable, "-m", "vitrail", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=False, encoding="utf-8", env={**variables, **environ})


# Selection


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({}, "en"),
        ({"VITRAIL_LANG": "ko"}, "ko"),
        ({"VITRAIL_LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_GB.UTF-8", "LC_MESSAGES": "ko_KR.UTF-8"}, "ko"),
        ({"LANG": "ko_KR.UTF-8", "VITRAIL_LANG": "en"}, "en"),
        ({"LANG": "ko_KR.UTF-8", "VITRAIL_LANG": ""}, "ko"),
        ({"LANG": "fr_FR.UTF-8"}, "en"),
    ],
    ids=str,
)
def test_the_environment_selects_the_language(environ, code):
    assert find_language(environ) == code


@pytest.mark.parametrize("value", ["fr", "korean", "../ko", " "])
def test_an_unknown_language_is_rejected(value):
    with pytest.raises(UsageError, match=r"^VITRAIL_LANG must be en or ko, got "):
        find_language({"VITRAIL_LANG": value})


def test_messages_are_english_outside_of_the_block():
    assert localise("interrupted") == "interrupted"
    with messages_in("ko"):
        assert localise("interrupted") == "중단됨"
        results = []
        thread = threading.Thread(target=lambda: results.append(localise("interrupted")))
        thread.start()
        thread.join()
        assert results == ["중단됨"]
    assert localise("interrupted") == "interrupted"


def test_python_functions_raise_english_errors():
    with messages_in("ko"), pytest.raises(vitrail.VitrailError, match="Model must be a name that `vitrail models`"):
        vitrail.create("ViT-B/61")


# Templates


@pytest.mark.parametrize(
    ("text", "translation"),
    [
        ("Bundle must be a folder that exists, got 'x'.", "번들은 존재하는 폴더여야 합니다(입력: 'x')."),
        # A path may have braces, the end of a sentence, a quote, or the text of another message.
        ("Bundle must be a folder that exists, got '{path}'.", "번들은 존재하는 폴더여야 합니다(입력: '{path}')."),
        ("Bundle must be a folder that exists, got 'a. b'.", "번들은 존재하는 폴더여야 합니다(입력: 'a. b')."),
        (
            "Bundle must be a folder that exists, got 'a. Use float32.'.",
            "번들은 존재하는 폴더여야 합니다(입력: 'a. Use float32.').",
        ),
        ('Bundle must be a folder that exists, got "it\'s".', '번들은 존재하는 폴더여야 합니다(입력: "it\'s").'),
        ("'my photos/a.png' cannot be read (x).", "'my photos/a.png': 읽을 수 없습니다(x)."),
        (
            "'a cannot be read (b).png' cannot be read (No such file or directory).",
            "'a cannot be read (b).png': 읽을 수 없습니다(그런 파일이나 폴더가 없음).",
        ),
        ("my new photos/a.png cannot be read (x).", "my new photos/a.png: 읽을 수 없습니다(x)."),
        # Several sentences, and one without a translation.
        ("Use float32. Use test or val.", "float32를 쓰세요. test나 val을 쓰세요."),
        ("Use float32. Something new happened.", "float32를 쓰세요. Something new happened."),
        ("Something new happened. Use float32.", "Something new happened. float32를 쓰세요."),
        ("vitrail: Use float32.", "vitrail: float32를 쓰세요."),
        ("note: features are not cached: Use float32.", "참고: 특징을 캐시에 저장하지 않습니다: float32를 쓰세요."),
        # A number is required, and a phrase must have a translation.
        ("loss high", None),
        ("'a.png' looks fine.", None),
        ("", None),
        ("Something new happened.", None),
    ],
)
def test_messages_are_translated_sentence_by_sentence(text, translation):
    assert translate(text) == translation


def test_a_template_keeps_the_order_of_the_translation():
    template = Template("{count:number} of {name} in {path}", "{path}: {name} {count}")
    assert template.translate("1,200 of cats in 'a of b in c'") == "'a of b in c': cats 1,200"
    assert template.translate("many of cats in 'a'") is None
    assert template.translate("3 of cats in 'a") is None  # the quote is not closed


@pytest.mark.parametrize(
    "text",
    [
        ". " * 2000,
        "a. " * 1333,
        " " * 4000,
        "'" * 4000,
        "' \"" * 1333,
        "a; " * 1333,
        "{path}" * 666,
        " (in recipe " * 300,
        "note: " * 666,
        "vitrail: " * 444,
        ", got " * 600,
        "x must be one of " * 230,
        "a (" * 1000 + ").",
        "a (b; c. " * 20 + "x" * 3800,
        "\0" * 4000,
        "가. " * 1333,
        "\udcff. '" * 900,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_hostile_texts_take_little_time(text):
    assert translate("Use float32.") == "float32를 쓰세요."  # the message files are read
    start = time.process_time()
    translate(text)
    assert time.process_time() - start < 0.2  # a few milliseconds; the margin is for slow machines


def test_a_failure_leaves_the_english_text(monkeypatch):
    def fail(*_):
        raise OSError("the file is missing")

    monkeypatch.setattr(language, "translate", fail)
    with messages_in("ko"):
        assert localise("interrupted") == "interrupted"


# Commands


def test_help_is_korean_and_imports_no_torch():
    script = (
        "import sys, time\nstart = time.perf_counter()\nfrom vitrail.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as leaving:\n    assert not leaving.code\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'PIL', 'safetensors', 'rich')))\n"
    )
    environ = {**os.environ, **KOREAN}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False, encoding="utf-8", env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("사용법: vitrail COMMAND ...\n")
    assert "  train     모델을 처음부터 학습합니다\n" in done.stdout


def test_help_of_a_command_fits_into_the_terminal():
    from vitrail.core.terminal import display_width

    done = run("train", "--help", environ={**KOREAN, "COLUMNS": "80"})
    assert "학습률" in done.stdout
    assert "usage" not in done.stdout
    assert max(map(display_width, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["info", "ViT-B/61"],
            "vitrail: 모델은 `vitrail models`에 나오는 이름이거나 존재하는 번들이어야 합니다(입력: 'ViT-B/61'). 혹시 ",
        ),
        (["predict", "nothing", "a.png"], "vitrail: "),
        (["models", "--foo"], "vitrail: 플래그는 --help에 나오는 것이어야 합니다(입력: --foo)."),
        (["train", "digits"], "vitrail: vitrail train: "),
    ],
)
def test_errors_are_korean(arguments, error):
    done = run(*arguments, environ=KOREAN)
    assert done.returncode == 2
    assert done.stderr.startswith(error)
    assert done.stderr.count("\n") == 1
    assert any("가" <= letter <= "힣" for letter in done.stderr)


def test_tables_and_notes_are_korean_and_json_is_not(tmp_path):
    done = run("models", "ViT-Pico*", environ=KOREAN)
    assert done.stdout.split()[:3] == ["이름", "계열", "파라미터"]
    assert run("models", "--json", environ=KOREAN).stdout == run("models", "--json", environ={}).stdout
    done = run("info", "vit_base_patch16_224", environ=KOREAN)
    assert done.stderr.startswith("참고: vit_base_patch16_224: timm에서 ViT-B/16")
    assert done.stdout.startswith("이름      ViT-B/16\n계열")
    assert set(json.loads(run("info", "ViT-B/16", "--json", environ=KOREAN).stdout)) >= {"name", "family"}


def test_an_unknown_language_is_an_error_of_one_line():
    done = run("models", environ={"VITRAIL_LANG": "fr"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vitrail: VITRAIL_LANG must be en or ko, got 'fr'.\n"


@pytest.mark.parametrize("environ", [{}, {"LANG": "C.UTF-8"}, {"LANG": "ko_KR.UTF-8", "VITRAIL_LANG": "en"}], ids=str)
def test_english_is_the_default(environ):
    done = run("foo", environ=environ)
    assert done.stderr.startswith("vitrail: Command must be one of models, ")


def test_a_korean_locale_selects_korean():
    assert run("foo", environ={"LANG": "ko_KR.UTF-8"}).stderr.startswith("vitrail: 명령은 models, ")


def test_streams_without_korean_letters_stay_english():
    done = run("foo", environ={**KOREAN, "PYTHONIOENCODING": "ascii"})
    assert done.stderr.startswith("vitrail: Command must be one of models, ")
