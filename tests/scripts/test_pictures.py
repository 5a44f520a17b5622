"""The pictures of the first page: small, up to date, and without names of a machine."""

import re
import socket
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pictures import bars
from pictures.terminal import Screen, draw

REPO = Path(__file__).resolve().parents[2]
IMAGES = REPO / ".github" / "images"


def test_the_first_page_shows_each_picture_and_each_is_small():
    shown = set(re.findall(r"\.github/images/([\w.-]+)", (REPO / "README.md").read_text()))
    assert shown == {path.name for path in IMAGES.iterdir()}
    for path in IMAGES.iterdir():
        assert path.stat().st_size < (150_000 if path.suffix == ".svg" else 250_000), path


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_xml_and_names_no_machine_and_no_folder(path):
    text = path.read_text()
    ElementTree.fromstring(text)
    assert not re.search(r"/(home|root|tmp|Users)/", text)
    assert str(REPO) not in text and socket.gethostname() not in text
    assert "<script" not in text and set(re.findall(r"https?://[^\"]+", text)) == {
        "http://www.w3.org/2000/svg"
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_bars_are_those_of_the_newest_results(theme):
    """The bars show the newest results; to update them: python scripts/pictures --only bars."""
    wanted = bars.draw(bars.newest("latency"), bars.newest("prefill"), theme)
    assert (IMAGES / f"bars-{theme}.svg").read_text() == wanted


def test_a_result_without_the_peers_is_passed_over(tmp_path):
    row = '{"engine": "%s", "batch": 1, "context": 512, "tokens_per_s": 2.0}'
    for name, engines in (("2026-01-01", bars.ENGINES), ("2026-01-02", ["ours", "vllm"])):
        rows = ", ".join(row % engine for engine in engines)
        text = f'a table\n{{"date": "{name}", "rows": [{rows}]}}\n'
        (tmp_path / f"{name}-cpu-1b-latency.txt").write_text(text)
    assert bars.newest("latency", tmp_path)["date"] == "2026-01-01"
    with pytest.raises(ValueError, match="no result of prefill"):
        bars.newest("prefill", tmp_path)


def test_a_recording_shows_each_character_when_it_came():
    screen = Screen(columns=20, rows=4)
    screen.feed("$ a <b>\r\n", 1.0)
    screen.feed("\x1b[2mfaint\x1b[0m", 2.0)
    screen.feed(" then\r\n> x\b", 3.0)
    drawn = draw(screen, 4.0)
    pieces = re.findall(r'<tspan( class="dim")? style="animation-name:(k\d+)">([^<]*)<', drawn)
    assert [(bool(dim), unescape(text)) for dim, _, text in pieces] == [
        (False, "$ a <b>"), (True, "faint"), (False, " then"), (False, "> x")
    ]  # fmt: skip
    assert [name for _, name, _ in pieces][2:] == [pieces[2][1]] * 2  # both came at 3.0
    # 3 s of 9 (four of the recording and five in which its end is shown)
    assert f"@keyframes {pieces[2][1]}{{0%{{visibility:hidden}}33.33%" in drawn
    with pytest.raises(ValueError, match="more than 4 rows"):
        screen.feed("\r\n\r\ny", 4.0)
