"""The report of the lab: verdicts that were not run, learning rates, costs of a decision, counts, published numbers."""

import dataclasses
import json
import math
import re
import sys

import pytest

from tests.fake_lab import digits_lab
from tests.made_up import InventedResults
from vitrail.api.output import CliArguments, show_comparison
from vitrail.api.results import Report
from vitrail.core.language import messages_in
from vitrail.lab import lab_report
from vitrail.lab.published import PUBLISHED
from vitrail.lab.question import Accuracies, Question, Verdict
from vitrail.lab.recommendation import recommend
from vitrail.lab.registry import QUESTIONS
from vitrail.lab.statistics import Estimate, Training, combine, smallest

OPEN = Estimate(0.01, 0.02, 4, rates=(0.002, 0.03))


class Claims(Question):
    """A question with invented verdicts."""

    def verdicts(self):
        yield from self.invented


def report(folder, *verdicts):
    """Write the report of a question with these verdicts. Return claims.json and the page."""
    names = ("title", "about", *(name for verdict in verdicts for name in (verdict.claim, f"{verdict.claim}-rule")))
    Claims.messages = {name: {"en": f"{name} in English", "ko": f"{name} 한국어"} for name in names}
    question = Claims("claims", digits_lab(seeds=5))
    question.invented = verdicts
    document = lab_report.write_report(folder, question.lab, {"claims": question}, machines={}, commands=[])
    assert json.loads((folder / "claims.json").read_text()) == document
    return document, (folder / "index.html").read_text()


@pytest.mark.parametrize(
    ("verdict", "state"),
    [
        (Verdict("C1", "trained"), "not run"),
        (Verdict("C1", "exact"), "not run"),
        (Verdict("C1", "reported"), "not run"),
        (Verdict("C1", "trained", Estimate(0.1, math.nan, 0)), "cannot tell"),
        (Verdict("C1", "trained", OPEN), "cannot tell"),
    ],
)
def test_claims_with_missing_trials_are_not_run(tmp_path, verdict, state):
    document, page = report(tmp_path, verdict)
    (claim,) = document["claims"]
    assert claim["verdict"] == state
    assert document["counts"][state] == 1
    css_class, korean = ("not-run", "실행 안 함") if state == "not run" else ("cannot-tell", "판단 불가")
    assert f'class="verdict {css_class}"' in page
    assert korean in page


def test_range_over_learning_rates_is_shown_and_explains_an_open_claim(tmp_path):
    clear = Estimate(0.1, 0.001, 4, rates=(0.05, 0.12))
    document, page = report(
        tmp_path,
        Verdict("C1", "trained", clear),
        Verdict("C2", "trained", clear._replace(rates=(-0.01, 0.12))),
        Verdict("C3", "trained", clear._replace(rates=None)),
        Verdict("C20", "trained", Estimate(0.001, 0.001, 4, rates=(-0.004, 0.006)), margin=0.01),
    )
    claims = {claim["id"]: claim for claim in document["claims"]}
    rates = {name: claim["rates"] for name, claim in claims.items()}
    assert rates == {"C1": [0.05, 0.12], "C2": [-0.01, 0.12], "C3": None, "C20": [-0.004, 0.006]}
    assert "+5.0 … +12.0" in page
    assert claims["C2"]["why"].startswith("Cannot tell: depends on the learning rate.")
    assert [claims[name]["verdict"] for name in ("C1", "C2", "C20")] == ["supported", "cannot tell", "supported"]
    assert "over all plausible learning rates" in page


def test_open_claim_names_the_trainings_and_hours_that_would_decide(tmp_path):
    """More seeds are trained for each variant once, also if several differences share it."""
    shared, other, third = Training("a", 5, 60.0), Training("b", 5, 120.0), Training("c", 7, 60.0)
    first = OPEN._replace(trainings=frozenset((shared, other)))
    second = OPEN._replace(value=0.02, trainings=frozenset((shared, third)))
    document, page = report(tmp_path, Verdict("C1", "trained", smallest([first, second])))
    (claim,) = document["claims"]
    seeds = claim["needs"]["seeds"]
    assert seeds > 7
    assert claim["needs"]["trainings"] == 2 * (seeds - 5) + (seeds - 7)
    hours = ((seeds - 5) * 180 + (seeds - 7) * 60) / 3600
    assert claim["needs"]["cpu_hours"] == pytest.approx(hours)
    sentence = f"If the true difference equals the estimate, {seeds} seeds would decide."
    assert claim["why"].startswith(sentence)
    assert f"about {hours:.1f} CPU hours more ({claim['needs']['trainings']} trainings)" in claim["why"]
    assert f"CPU 시간으로 약 {hours:.1f}시간이 더" in page


@pytest.mark.parametrize(
    ("estimate", "needs"),
    [
        (OPEN._replace(trainings=frozenset((Training("a", 3, math.nan),))), {"seeds"}),
        (OPEN, {"seeds"}),
        (combine((1.0, Estimate(0.01, 0.02, 1999, image_error=0.02)), (1.0, Estimate(0, 0.001, 9))), {"image_factor"}),
        (Estimate(0.0, 0.02, 9), None),
    ],
)
def test_needs_of_open_claims_without_measured_seconds(tmp_path, estimate, needs):
    document, _ = report(tmp_path, Verdict("C1", "trained", estimate))
    (claim,) = document["claims"]
    assert claim.get("needs", {}).keys() == (needs or set())
    assert "hours" not in claim["why"]


def test_seconds_of_trainings_come_from_the_measurements_of_the_trials(tmp_path):
    question = QUESTIONS["size"]("size", digits_lab())
    invented = InventedResults(tmp_path, question)
    key = question.keys[0]
    for trial in question.trials[key]:
        invented.train(trial, 0.8)
    for seconds in (10.0, 20.0):
        trial = invented.results.resolve(question.trials[key][int(seconds > 10)])
        result = invented.results.get(trial)
        record = {"cell": trial.to_json(), "result": result, "measured": {"seconds": seconds}}
        invented.results.add(record)
    (training,) = Accuracies(invented.results, question.trials).estimate(key).trainings
    assert (training.seeds, training.seconds) == (2, 15.0)


def test_claims_about_any_images_are_counted_apart(tmp_path, capsys):
    document, page = report(
        tmp_path,
        Verdict("C1", "trained", Estimate(0.1, 0.001, 4)),
        Verdict("C2", "trained", Estimate(-0.1, 0.001, 4)),
        Verdict("C3", "trained", OPEN),
        Verdict("C12a", "exact", holds=True),
        Verdict("C12b", "exact", holds=False),
        Verdict("C13", "exact", holds=True),
        Verdict("C9", "trained"),
    )
    assert document["counts"] == {
        "supported": 1,
        "contradicted": 1,
        "cannot tell": 1,
        "true": 2,
        "false": 1,
        "not run": 1,
        "reported": 0,
    }
    assert "<b>2</b>" in page
    show_comparison(Report(document), CliArguments({"output": tmp_path}))
    lines = capsys.readouterr().out.splitlines()
    assert "Claims about these images: 1 supported, 1 contradicted, 1 undecided." in lines
    assert "Claims about any images: 2 proved, 1 disproved." in lines
    assert any(line.startswith("Claims not run: 1.") for line in lines)


def test_terminal_table_has_sentence_verdict_value_and_interval(tmp_path, capsys):
    document, _ = report(
        tmp_path,
        Verdict("C1", "trained", Estimate(0.1, 0.001, math.inf)),
        Verdict("C3", "trained", Estimate(-0.5, 0.01, math.inf), is_share=False),
        Verdict("C12a", "exact", holds=True),
    )
    document["claims"][0]["claim"] = QUESTIONS["data"].messages["C1"]["en"]
    show_comparison(Report(document), CliArguments({"output": tmp_path}))
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1][1:4] == [QUESTIONS["data"].messages["C1"]["en"], "supported", "+10.0 points"]
    assert lines[1][4].startswith("+9.8 … +10.")
    assert lines[2][3] == "-0.50"
    assert lines[3][2:] == ["true", "-", "-"]
    with messages_in("ko"):
        show_comparison(Report(document), CliArguments({"output": tmp_path}))
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1][1:4] == [QUESTIONS["data"].messages["C1"]["ko"], "지지됨", "+10.0 %p"]
    assert any(line[0].startswith("이 이미지에 대한 주장: 지지됨 1,") for line in lines)


@pytest.mark.parametrize(
    ("columns", "headers"),
    [
        (120, ["claim", "verdict", "value", "95 % interval"]),
        (72, ["claim", "verdict", "value", "95 % interval"]),
        (48, ["claim", "verdict", "value"]),
        (30, ["claim", "verdict"]),
    ],
)
def test_terminal_table_fits_narrow_terminals(tmp_path, capsys, monkeypatch, columns, headers):
    """The sentence is wrapped first, then the interval and the value are left out."""
    document, _ = report(tmp_path, Verdict("C1", "trained", Estimate(0.1, 0.001, math.inf)))
    document["claims"][0]["claim"] = sentence = "A strong bias (CNN) learns better from little data than ViT."
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_comparison(Report(document), CliArguments({"output": tmp_path}))
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    table = text.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= columns
    assert re.split("  +", table[0].strip()) == headers
    assert "supported" in table[1]
    cells = [re.split("  +", line.strip()) for line in table[1:]]
    assert " ".join(row[1] if row[0] == "C1" else row[0] for row in cells) == sentence


def test_published_numbers_belong_to_claims_and_agree_in_both_languages():
    claims = {claim for name in QUESTIONS for claim in QUESTIONS[name].claims}
    assert set(PUBLISHED) <= claims
    for sentence in PUBLISHED.values():
        numbers = {language: sorted(re.findall(r"\d[\d.,]*\d|\d", sentence[language])) for language in ("en", "ko")}
        assert numbers["en"] == numbers["ko"]
        assert "(" in sentence["en"]  # the source


def test_published_number_stands_beside_the_verdict(tmp_path):
    document, page = report(tmp_path, Verdict("C34b", "trained", OPEN), Verdict("X1", "trained", OPEN))
    with_number, without = document["claims"]
    assert with_number["published"] == PUBLISHED["C34b"]["en"]
    assert "Mixer 76.6 %, ViT 81.8 to 84.5 %" in page
    assert "published" not in without


# The recommendation


def recommend_for(folder, accuracies, augmentation=0.0):
    """Return the recommendation for models with these accuracies, and what augmentation adds."""
    lab = dataclasses.replace(digits_lab(seeds=4), families=tuple(accuracies))
    questions = {name: QUESTIONS[name](name, lab) for name in ("data", "augmentation")}
    invented = InventedResults(folder, None)
    for question in questions.values():
        for (name, _), trials in question.trials.items():
            gain = augmentation if name.endswith("augmented") else 0.0
            for trial in trials:
                invented.train(trial, accuracies[trial.family] + gain)
    for question in questions.values():
        question.read(invented.results)
    return recommend(questions)


def test_recommendation_names_the_best_family_augmentation_and_hybrid(tmp_path):
    advice = recommend_for(tmp_path, {"vit": 0.6, "hybrid": 0.7, "resnet": 0.8}, augmentation=0.05)
    assert [sentence.name for sentence in advice] == ["best", "hybrid-ahead", "augmentation-helps", "caveat"]
    best = advice[0].text("en")
    assert "family CNN. It is ahead of the next best, hybrid, by " in best
    lead, low, high = map(float, re.search(r"by ([\d.]+) points \(([\d.]+) … ([\d.]+)\)", best).groups())
    assert 0 < low < lead < high
    assert lead == pytest.approx(10, abs=0.5)
    assert f"하이브리드보다 {lead} %p" in advice[0].text("ko")
    assert "they help CNN by " in advice[2].text("en")


def test_recommendation_names_the_families_that_cannot_be_told_apart(tmp_path):
    advice = recommend_for(tmp_path, {"vit": 0.6, "hybrid": 0.8, "resnet": 0.8}, augmentation=-0.05)
    assert advice[0].name == "best-tied"
    text = advice[0].text("en")
    assert "cannot tell it from" in text
    assert "ahead of ViT" in text
    assert advice[-2].name in ("augmentation-hurts", "hybrid-ahead")


def test_recommendation_is_silent_if_nothing_is_decided(tmp_path):
    assert recommend_for(tmp_path, {"vit": 0.7, "resnet": 0.7}) == []
    assert recommend({}) == []
    document, page = report(tmp_path, Verdict("C1", "trained", OPEN))
    assert document["recommendation"] == {"en": [], "ko": []}
    assert "recommendation" not in page


def test_recommendation_ends_the_page_and_the_terminal_output(tmp_path, monkeypatch, capsys):
    advice = recommend_for(tmp_path, {"vit": 0.6, "resnet": 0.8})
    monkeypatch.setattr(lab_report, "recommend", lambda questions: advice)
    document, page = report(tmp_path, Verdict("C1", "trained", OPEN))
    assert page.index('id="claims"') < page.index('id="recommendation"') < page.index('id="protocol"')
    for language, heading in (("en", "For images like these:"), ("ko", "이런 이미지에는:")):
        with messages_in(language):
            show_comparison(Report(document), CliArguments({"output": tmp_path}))
        lines = capsys.readouterr().out.splitlines()
        position = lines.index(heading)
        assert lines[position + 1 : -1] == [sentence.text(language) for sentence in advice]
