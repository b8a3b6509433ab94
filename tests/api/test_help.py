"""`vitrail --help`, `vitrail COMMAND --help` and `vitrail help data`."""

import subprocess
import sys

import pytest

from vitrail.api.commands import COMMANDS
from vitrail.api.help import format_command_help, format_overview
from vitrail.data.sources.registry import source_descriptions

FACES = COMMANDS["faces"].commands
COMMAND_NAMES = [
    *([name] for name in COMMANDS if name != "faces"),
    *(["faces", name] for name in FACES),
]


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize(("program", "commands"), [("vitrail", COMMANDS), ("vitrail faces", FACES)])
def test_overview_has_one_line_of_80_columns_for_each_command(program, commands):
    lines = format_overview(program, "A description.", commands).splitlines()
    assert max(map(len, lines)) <= 80
    rows = lines[lines.index("commands:") + 1 :][: len(commands)]
    assert [row.split()[0] for row in rows] == list(commands)
    assert all(len(row.split()) > 2 for row in rows)


@pytest.mark.parametrize("command", COMMAND_NAMES, ids=" ".join)
def test_help_of_a_command_lists_each_flag_once(call, command):
    done = call(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"usage: vitrail {' '.join(command)}")
    function = FACES[command[1]] if len(command) == 2 else COMMANDS[command[0]]
    for parameter in function.cli_parameters:
        if not parameter.flag.is_positional:
            flag = f"--{(parameter.flag.cli_name or parameter.name).replace('_', '-')}"
            assert sum(line.split()[:1] in ([flag], [f"{flag},"]) for line in lines) == 1, flag
    assert len(done.stdout.split("`vitrail help data`")) <= 2


def test_common_flags_come_before_rare_ones():
    text = format_command_help("vitrail", "train", COMMANDS["train"])
    headings = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["arguments:", "flags:", "speed and hardware:", "checkpoints and records:"]
    places = [text.index(f"  {flag}") for flag in ("--model", "--epochs", "--threads", "--checkpoint-seconds")]
    assert places == sorted(places)


def test_a_command_with_few_flags_has_no_further_headings():
    assert "speed and hardware:" not in format_command_help("vitrail", "bench", COMMANDS["bench"])


def test_help_shows_required_flags_in_the_usage_line_and_several_values_by_dots():
    text = format_command_help("vitrail", "inspect", COMMANDS["inspect"])
    assert text.startswith("usage: vitrail inspect BUNDLE IMAGE ... --output DIR [flags]\n")
    assert "  --layers L ..." in text


def test_help_data_lists_every_form_of_data(call):
    done = call("help", "data")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"\n  {description}\n" in done.stdout for description in source_descriptions())


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["help", "data"]], ids=" ".join)
def test_help_imports_neither_torch_nor_the_parser(arguments):
    script = (
        "import sys\nfrom vitrail.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'PIL', 'tyro')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
