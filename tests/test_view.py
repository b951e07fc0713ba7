"""The viewer of rollouts: what its page holds, and what it does in a real browser."""

import base64
import gzip
import json
import re
from pathlib import Path

import browser as browser_lib
import pytest

from zest_jax import view
from zest_jax.errors import UserError

NASTY = "</script><img src=x onerror=alert(1)>\ud800 <!-- & é"


def passage(name, gold, text="Its river is the Seine."):
    return {"query": 0, "id": name, "title": f"Title {name}", "text": text, "score": 1.5,
            "gold": gold, "holds_answer": gold}  # fmt: skip


def rollout(n, answer="Seine", em=1.0, **more):
    """A rollout whose first turn writes the Euro sign in two tokens and a byte that is no text."""
    return {
        "version": 1, "step": 4, "role": "solver", "id": f"t/{n}", "task": "t", "group": 0,
        "question": "Which river?", "golden_answers": ["Seine"], "hops": 2, "evidence": ["p1"],
        "answer": answer, "em": em, "f1": em, "reward": em, "reward_parts": {"exact match": em},
        "advantage": em - 0.5, "finish": "answered", "searches": 1, "duplicates": 0,
        "turns": [
            {"by": "policy", "action": "search", "text": "go €", "sizes": [3, 1, 2],
             "logps": [-0.5, 0.0, -2.0], "queries": ["go"]},
            {"by": "tool", "passages": [passage("p1", True), passage("p2", False)]},
            {"by": "policy", "action": "answer", "text": "a\ufffd", "hex": "61ff",
             "sizes": [1, 1], "logps": [-0.25, None]},
        ],
    } | more  # fmt: skip


LINES = [
    rollout(0),
    rollout(1, "Loire", 0.0),
    rollout(2, None, 0.0, group=1, finish="too_long", task="u", hops=3, question=NASTY),
    {"id": "q1", "question": "Old?", "golden_answers": ["x"], "hops": 1, "answer": None, "em": 0.0,
     "f1": 0.0, "searches": 1, "valid": False, "finish": "no_answer", "well_formed": False,
     "text": "<search> a</search><information> b: needle</information> end"},
    {"kind": "proposal", "label": "passed the gates", "question": "Why?", "hops": 1,
     "chain": ["a", "b"], "reward": 1.0, "reward_parts": {"format": 1.0}, "text": "<question>"},
]  # fmt: skip


def unpack(blob):
    return json.loads(gzip.decompress(base64.b64decode(blob)))


def blobs(page):
    found = re.findall(r'<script type="application/octet-stream" id="([^"]+)">([^<]*)<', page)
    return {name: unpack(blob) for name, blob in found}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_the_page_holds():
    page = view.render(LINES, "a <b>")
    assert "<title>Rollouts: a &lt;b&gt;</title>" in page and "onerror" not in page
    assert "http:" not in page and "https:" not in page and "src=" not in page
    held = blobs(page)
    index, columns = held["index"], held["index"]["columns"]
    assert [index["outcomes"][n] for n in columns["outcome"]] == [
        "right", "wrong", "forced stop", "no answer", "accepted",
    ]  # fmt: skip
    assert columns["role"] == [0, 0, 0, 0, 1] and columns["hops"] == [2, 2, 3, 1, 1]
    assert columns["advantage"] == [0.5, -0.5, -0.5, None, None]
    assert index["mixed"] == [columns["group"][0]] == [columns["group"][1]]
    assert NASTY in index["questions"]
    assert held["passages-0"] == [
        [name, f"Title {name}", "Its river is the Seine."] for name in ("p1", "p2")
    ]
    first, *_, old, _ = held["rollouts-0"]
    assert first["turns"][0]["logps"] == [500, 0, 2000]
    assert first["turns"][1]["passages"] == [[0, 0, 1.5, 1, 1], [1, 0, 1.5, 0, 0]]
    assert [turn["by"] for turn in old["turns"]] == ["policy", "tool", "policy"]
    assert page == view.render(LINES, "a <b>"), "the same rollouts make the same page"


def test_files_and_runs(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "evaluation").mkdir()
    write(run / "rollouts" / "episodes.jsonl", [rollout(0, step=5), rollout(1, step=7)])
    write(run / "rollouts" / "proposals.jsonl", [LINES[4] | {"step": 6}])
    write(run / "evaluation" / "iteration_0.jsonl", [LINES[3] | {"mode": "greedy"}])
    lines, total = view.read(str(run), 10)
    assert [line.get("step") for line in lines] == [None, 5, 6, 7] and total == 4
    assert lines[0]["source"] == "iteration_0" and lines[1]["source"] == "training"
    assert [line["step"] for line in view.read(str(run), 2)[0]] == [6, 7]
    out = tmp_path / "page.html"
    assert view.entry(["view", str(run), f"--out={out}", "--most=3"]) == 0
    assert "the last 3 of 4 rollouts" in capsys.readouterr().out
    assert blobs(out.read_text())["index"]["total"] == 4
    torn = write(tmp_path / "torn.jsonl", LINES)
    torn.write_text(torn.read_text() + '{"question": "to')
    assert view.read(str(torn), 10)[1] == len(LINES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no rollout in it yet"),
        ('{"a": 1}\n', "line 1 is no rollout"),
        ("[]\n", "line 1 is no rollout"),
        ("{\n", "is no file of rollouts or answers"),
        ('{"text": "x"}\n{\n', "line 2 is not JSON; remove the line"),
    ],
)
def test_what_is_no_file_of_rollouts(tmp_path, text, said):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        view.read(str(path), 5)


def test_odd_values_are_shown_as_far_as_they_make_sense():
    odd = {"question": None, "em": "x", "reward": float("nan"), "hops": 10**400, "answer": ["a"],
           "turns": [1, {"by": "policy", "text": 3, "sizes": [1], "logps": []}],
           "reward_parts": {"a": float("inf")}, "extra": True}  # fmt: skip
    held = blobs(view.render([odd], "odd"))
    assert held["index"]["columns"]["reward"] == held["index"]["columns"]["hops"] == [None]
    assert held["rollouts-0"][0]["turns"] == [{"by": "policy", "text": "3"}]
    assert held["rollouts-0"][0]["more"] == [["extra", True]]


# ------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = browser_lib.found()
    if program is None:
        pytest.skip(f"no browser on the PATH ({', '.join(browser_lib.NAMES)})")
    browser = browser_lib.Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def open_page(browser, path: Path):
    browser.logged.clear()
    browser.send("Page.navigate", url=path.as_uri())
    browser.wait(
        "document.documentElement?.dataset.ready && !!document.querySelector('#detail h2')"
    )


CHOSEN = "document.querySelector('.row[aria-selected=true] b').textContent"


def test_in_a_browser(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(view.render(LINES, NASTY))
    open_page(browser, path)
    assert browser.run("document.querySelectorAll('.row').length") == 5
    # Gold is told in words.
    gold = browser.run("[...document.querySelectorAll('.passage.gold h3')].map(x=>x.textContent)")
    assert gold == ["★ gold evidenceholds the answerTitle p1"]
    words = browser.run("[...document.querySelectorAll('.token')].map(x => x.textContent)")
    assert words == ["go ", "€", "a", "\ufffd"]
    browser.mouse(".token")
    assert browser.run("document.querySelector('#tip').textContent") == (
        "token 1 of 3: p = 60.7 %, log p = −0.500"
    )
    tips = browser.run("[...document.querySelectorAll('.token')].map(x => x.dataset.tip)")
    assert tips[1] == (
        "token 2 of 3: p = 100.0 %, log p = 0.000; part of a character, bytes e2\n"
        "token 3 of 3: p = 13.5 %, log p = −2.000; part of a character, bytes 82 ac"
    )
    assert tips[3] == "token 2 of 2: no log-probability"
    browser.mouse("#colour", click=True)
    assert "rgba" in browser.run("document.querySelectorAll('.token')[1].style.background")
    # Keys.
    browser.mouse(".row", click=True)
    assert browser.run(CHOSEN) == "✓ right"
    browser.key("ArrowDown")
    assert browser.run(CHOSEN) == "✗ wrong"
    browser.key("End")
    assert browser.run(CHOSEN) == "✓ accepted"
    # A hostile text stays a text.
    browser.run("$('outcome').value = '3'; $('outcome').dispatchEvent(new Event('change', "
                "{bubbles: true}))")  # fmt: skip
    browser.wait("shown.length === 1 && document.querySelector('#detail h2')"
                 ".textContent.includes('onerror')")  # fmt: skip
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.querySelector('#detail h2').textContent.charCodeAt("
                       f"{NASTY.index(chr(0xD800))})") == 0xD800  # fmt: skip
    # Filters and search.
    browser.run("$('outcome').value = ''; $('mixed').checked = true; filter()")
    assert browser.run("shown") == [0, 1]
    browser.run("$('mixed').checked = false; $('search').value = 'NEEDLE'; filter()")
    assert browser.run("shown") == []
    browser.run("$('search').value = ''; filter()")
    browser.wait("!!document.querySelector('#detail h2')")
    browser.run("$('deep').checked = true; $('search').value = 'NEEDLE'; filter()")
    assert browser.wait("shown.length && shown") == [3]
    browser.run("$('search').value = ''; $('sort').value = 'advantage up'; filter()")
    assert browser.run("shown") == [1, 2, 0, 3, 4]
    assert browser.run(
        "[...document.querySelectorAll('select, input')].every(x => x.labels.length)"
    )
    assert browser.logged == []


def test_ten_thousand_rollouts_in_a_browser(browser, tmp_path):
    lines = [
        rollout(n, em=float(n % 3 == 0), group=n // 8, step=n // 512, question=f"Which {n // 8}?")
        for n in range(10_000)
    ]
    path = tmp_path / "many.html"
    path.write_text(view.render(lines, "many"))
    open_page(browser, path)
    browser.mouse(".row", click=True)
    browser.key("End")
    browser.wait("document.querySelector('#detail h2').textContent === 'Which 1249?'")
    assert browser.run("document.querySelectorAll('.row').length") < 40, "only what is seen"
    browser.run("$('sort').value = 'reward down'; filter()")
    assert browser.run("columns.reward[shown[0]] === 1 && columns.reward[shown[9999]] === 0")
    assert browser.logged == []
