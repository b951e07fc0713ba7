"""The report: numbers for programs, a page that stands alone for people, charts worked by hand."""

import html.parser
import json
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from zest_jax import charts
from zest_jax import report as report_lib
from zest_jax.charts import Series
from zest_jax.workdir import Workdir

SUMMARY = {
    "title": "smoke <run>",
    "notes": ["The start & the end."],
    "heldout": {
        "before": {
            "em": 0.419,
            "f1": 0.5,
            "searches": 1.5,
            "valid": 0.875,
            "by_hop": {
                1: {"em": 0.5, "f1": 0.5, "searches": 1.0, "valid": 1.0, "count": 150},
                "2": {"em": 0.25},
            },
        },
        "after": {
            "em": np.float32(0.5),
            "f1": 0.6,
            "searches": 2.0,
            "valid": float("nan"),
            "by_hop": {"1": {"em": 0.75, "count": 150}, "2": {"em": 0.5}},
        },
        "gain_ci95": (0.04, 0.12),
    },
    "wall_seconds": {"solver": 90.0, "eval": 30.0},
    "device": "cpu",
    "retraces": 0,
    "config_hash": "0123456789ab",
    "anything": {"else": np.arange(2)},
}
METRICS = [
    {
        "step": step,
        "phase": "solver",
        "time": 1.0,
        "solver/reward": step / 10,
        "solver/em_hop1": None,
    }
    for step in range(5)
] + [{"step": 0, "phase": "eval", "eval/em": 0.4, "odd/metric": 3.0}]
TRACES = [
    {
        "kind": "solver",
        "label": "before",
        "question": "What is <b>it</b>?",
        "golden_answers": ["Seine"],
        "answer": "Seine",
        "em": 1,
        "hops": 2,
        "text": "<think> capital</think><search> France</search><information> France: "
        "x < y & z</information><answer> Seine</answer>",
    },
    {
        "kind": "proposal",
        "chain": ["France", "capital", "Paris"],
        "question": "What is the capital of France?",
        "reward": 1.15,
        "reward_parts": {"format": 0.2, "gain": 0.95},
        "log_likelihoods": {"full": -0.5, "none": -3.25},
        "text": "<think> France</think><question> What",
    },
    {"kind": "proposal", "text": "no tag at all"},
]


class Checker(html.parser.HTMLParser):
    """Every tag closed in its order; nothing fetched; no script."""

    void = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs)
        if tag not in self.void and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag


@pytest.fixture
def written(tmp_path):
    with Workdir(tmp_path) as workdir:
        workdir.claim({"seed": 0, "name": "</pre><script>"})
        report_lib.write_report(workdir, SUMMARY, METRICS, TRACES)
        yield json.loads(workdir.report_json.read_text()), workdir.report_html.read_text()


def test_json_has_what_was_promised(written):
    report, _ = written
    assert report["heldout"]["before"]["em"] == 0.419 and report["heldout"]["after"]["em"] == 0.5
    assert report["heldout"]["gain_ci95"] == [0.04, 0.12]
    assert report["heldout"]["after"]["valid"] is None  # NaN is no JSON.
    assert report["heldout"]["before"]["by_hop"]["1"]["count"] == 150
    assert report["wall_seconds"] == {"solver": 90.0, "eval": 30.0}
    assert report["anything"] == {"else": [0, 1]}


@pytest.mark.parametrize("path", report_lib.REQUIRED)
def test_a_missing_number_is_named(tmp_path, path):
    summary = json.loads(json.dumps({**SUMMARY, "anything": 0}, default=float))
    *parents, last = path.split(".")
    place = summary
    for parent in parents:
        place = place[parent]
    del place[last]
    with Workdir(tmp_path) as workdir, pytest.raises(KeyError, match=path):
        report_lib.write_report(workdir, summary, METRICS)


def test_warnings_are_listed(tmp_path, written):
    assert "Warnings" not in written[1]
    text = "warning, step 40: solver/kl was 0.3 over 20 steps; usually <too> large."
    with Workdir(tmp_path / "warned") as workdir:
        report_lib.write_report(workdir, SUMMARY | {"warnings": [{"step": 40, "text": text}]}, [])
        assert json.loads(workdir.report_json.read_text())["warnings"][0]["text"] == text
        page = workdir.report_html.read_text()
    assert "<h2>Warnings</h2>" in page and "usually &lt;too&gt; large." in page


def test_page_is_well_formed_escaped_and_stands_alone(written):
    _, page = written
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert "http:" not in page and "https:" not in page and "url(" not in page
    assert "<title>smoke &lt;run&gt;</title>" in page
    assert "What is &lt;b&gt;it&lt;/b&gt;?" in page and "x &lt; y &amp; z" in page
    assert "&lt;/pre&gt;&lt;script&gt;" in page


def test_page_shows_the_numbers(written):
    _, page = written
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "0.419 → 0.500" in text and "+0.081" in text and "+0.040 to +0.120" in text
    assert "2 min 00 s" in text and "The start &amp; the end." in text
    assert "1 150 0.500 0.750 0.500 – 1.000 – 1.000 –" in text  # The row of one hop.
    assert "0.875 → –" in text
    assert "reward: format 0.200 · gain 0.950" in text and "full −0.500 · none −3.250" in text
    assert "France —capital→ Paris" in text.replace(" capital ", "capital").replace("— ", "—")


def test_behaviour_and_a_silent_teacher_are_shown(tmp_path):
    figure = {"title": "ended by a limit", "before": 0.5, "after": 0.25, "difference": -0.25}
    told = {
        "count": 8,
        "figures": {"forced_stops": figure | {"ci95": [-0.5, 0.0]},
                    "repeating": {"title": "repeats", "before": None, "after": 0.125,
                                  "difference": None, "ci95": None}},
        "rescued": {"count": 1, "questions": [
            {"question": "Who <b>?", "golden_answers": ["x"], "before": None, "after": "x"}]},
        "regressed": {"count": 0, "questions": []},
    }  # fmt: skip
    heard = {"teacher/asked": 6.0, "teacher/unanswered": 0.5, "teacher/failure_timeout": 3.0,
             "teacher/status_none": 3.0, "teacher/status_supported_answer": 3.0}  # fmt: skip
    steps = (
        heard,
        {"teacher/asked": 2.0, "teacher/unanswered": 0.0, "teacher/breach_no_reason": 1.0},
        {"teacher/asked": 0.0, "teacher/unanswered": 0.0, "teacher/failure_timeout": None},
        {"solver/em": 1.0},
    )
    metrics = [{"step": n, "phase": "solver", "time": 0.0, **each} for n, each in enumerate(steps)]
    with Workdir(tmp_path) as workdir:
        report_lib.write_report(workdir, {**SUMMARY, "behaviour": told}, metrics)
        page = workdir.report_html.read_text()
        teacher = json.loads(workdir.report_json.read_text())["teacher"]
    assert teacher == {
        "asked": 8, "unanswered": 3, "unanswered_share": 3 / 8,
        "status": {"none": 3, "supported_answer": 3}, "failure": {"timeout": 3},
        "breach": {"no_reason": 1},
    }  # fmt: skip
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    text = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert "8 held-out questions before after" in text
    assert "ended by a limit 0.500 0.250 −0.250 −0.500 to +0.000" in text
    assert "repeats – 0.125 – –" in text and "Who &lt;b&gt;? (none) → x; expected: x" in text
    assert "Unanswered 37.5 % 3 rollouts; their groups keep their zeros" in text
    assert "Failures timeout 3" in text and "the grammar no reason 1" in text


def test_charts_are_drawn_where_there_are_numbers():
    drawn, rest = report_lib.draw(METRICS)
    assert [each["title"] for each in drawn] == ["Held-out exact match", "Reward"]
    assert [each["title"] for each in rest] == ["odd/metric"]
    assert report_lib.draw([]) == ([], [])


def test_an_empty_run_has_a_page_too(tmp_path):
    with Workdir(tmp_path) as workdir:
        report_lib.write_report(workdir, SUMMARY, [], [])
        assert "Curves" not in workdir.report_html.read_text()


def test_every_key_has_one_chart():
    keys = [key for chart in report_lib.CHARTS for key in chart.keys]
    assert len(keys) == len(set(keys))


def test_turns():
    text = "x<think> a</think><search> b</search><information> c <d></information><answer> e"
    assert report_lib.turns(text) == [
        ("other", "x"),
        ("think", "a"),
        ("search", "b"),
        ("information", "c <d>"),
        ("answer", "e"),
    ]
    assert report_lib.turns("<think> a<search> b</search>") == [("think", "a"), ("search", "b")]
    assert report_lib.turns("no tag") == [("other", "no tag")] and report_lib.turns("") == []


def test_legend_names():
    assert report_lib._names(["a/reward_hop1", "a/reward_hop2"]) == ["hop1", "hop2"]
    assert report_lib._names(["a/loglik_full", "a/loglik_one_shot"]) == ["full", "one shot"]
    assert report_lib._names(["s/groups_all_right", "s/groups_all_wrong"]) == ["right", "wrong"]
    assert report_lib._names(["solver/reward", "proposer/reward"]) == [
        "solver reward",
        "proposer reward",
    ]
    assert report_lib._names(["eval/em", "eval/em_hop1"]) == ["em", "em hop1"]


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0.0, 1.0, 4, [0, 0.5, 1]),
        (0.42, 0.61, 4, [0.4, 0.45, 0.5, 0.55, 0.6, 0.65]),
        (-3.2, 0.4, 4, [-4, -3, -2, -1, 0, 1]),
        (0, 100, 5, [0, 20, 40, 60, 80, 100]),
        (5.0, 5.0, 4, [2, 4, 6, 8]),
        (0.0, 0.0, 4, [-0.5, 0, 0.5]),
        (1e-7, 3e-7, 4, [1e-7, 1.5e-7, 2e-7, 2.5e-7, 3e-7]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, about, expected):
    ticks = charts.nice_ticks(low, high, about)
    assert ticks == pytest.approx(expected)
    assert ticks[0] <= low and high <= ticks[-1]


def test_a_chart_by_hand():
    """Two points: the corners of the plot, x 46 … 410 and y 204 … 10."""
    svg = charts.line_chart([Series("a <&> b", [(0, 0.0), (10, 1.0)])], "A & B")
    tree = ElementTree.fromstring(str(svg))
    (line,) = (each for each in tree.iter("polyline"))
    assert line.get("points") == "46.0,204.0 410.0,10.0" and line.get("class") == "line"
    assert tree.get("aria-label") == "A & B"
    titles = [each.text for each in tree.iter("title")]
    assert titles == ["a <&> b: 0 at 0", "a <&> b: 1 at 10"]
    texts = [each.text for each in tree.iter("text")]
    assert texts == ["0", "0.2", "0.4", "0.6", "0.8", "1", "0", "2", "4", "6", "8", "10"]


def test_charts_of_few_and_of_many_points():
    lone = charts.line_chart([Series("x", [(3, 0.5)])], "one")
    assert 'class="dot" cx="228.0"' in lone
    placed = charts.line_chart([Series("x", [(1, 0.5)])], "one", x_range=(0, 4))
    assert 'class="dot" cx="137.0"' in placed  # 46 + 364 / 4
    tiny = charts.line_chart([Series("x", [(0, 1e-8), (1, 2e-8)])], "tiny")
    assert ">1e-8<" in tiny and ">2e-8<" in tiny
    many = charts.line_chart([Series("x", [(i, i % 2) for i in range(10_000)])], "many")
    assert many.count("<circle") == charts.MOST_POINTS and len(many) < 40_000
    assert 'class="raw"' in many and 'class="line"' in many
    with pytest.raises(ValueError, match="'none' has no point"):
        charts.line_chart([Series("x", [])], "none")


def test_thin_split_and_mean():
    points = [(0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0)]
    assert charts.thin(points, 4) == points
    assert charts.thin(points, 2) == [(0.5, 1.0), (2.5, 5.0)]
    assert charts.split_at_gaps([(0, 0), (1, 0), (2, 0), (50, 0), (51, 0)]) == [
        [(0, 0), (1, 0), (2, 0)],
        [(50, 0), (51, 0)],
    ]
    assert charts.split_at_gaps([(7, 1)]) == [[(7, 1)]]
    assert charts.running_mean(points, 3) == [(0, 1.0), (1, 2.0), (2, 4.0), (3, 5.0)]
