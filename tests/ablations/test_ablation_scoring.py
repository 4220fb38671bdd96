"""Scores: SQuAD's own rules on plain English, and what was changed for everything else."""

from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.ablations.report.scoring import Score, contains, score, tokens

WORDS = st.sampled_from(["key", "keys", "pier", "door", "open", "a", "an", "the", "atlas", "then"])
# A text that ends with an article is the one thing that SQuAD reads in another way.
TEXTS = st.lists(WORDS, max_size=6).map(lambda words: " ".join([*words, "crane"]))


def squad_normalise(text: str) -> str:
    """The evaluation script of SQuAD 1.1, in its order: lower case, punctuation, articles, white space."""
    plain = "".join(char for char in text.lower() if char not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def squad_f1(prediction: str, truth: str) -> float:
    given, wanted = squad_normalise(prediction).split(), squad_normalise(truth).split()
    same = sum((Counter(given) & Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(given), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


@given(TEXTS, TEXTS)
def test_plain_english_is_judged_as_squad_does(prediction: str, truth: str) -> None:
    prediction = prediction.capitalize() + "."
    found = score(prediction, [truth])
    assert found.exact == (squad_normalise(prediction) == squad_normalise(truth))
    assert found.f1 == pytest.approx(squad_f1(prediction, truth))
    assert found.contains == (f" {squad_normalise(truth)} " in f" {squad_normalise(prediction)} ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The rent is EUR 11,750.00 a month.", ["rent", "is", "eur", "11750.00", "month"]),
        ("-24 °C, \u221224°C, 4-5, 4–5, x-7", ["-24", "c", "-24", "c", "4", "5", "4", "5", "x", "7"]),
        ("40kg w3/w4 06:15", ["40", "kg", "w", "3", "w", "4", "06:15"]),
        ("1,284.5 and 12,34", ["1284.5", "and", "12", "34"]),
        ("Berth A. A crane; a-b, The Hague", ["berth", "a", "crane", "a", "b", "hague"]),
        ("Vitamin A is not A", ["vitamin", "a", "is", "not", "a"]),
        ("5️⃣0️⃣2️⃣6️⃣ 1️⃣", ["5026", "1"]),
        ("to 🇫🇮, cod 🐟 # 1", ["to", "🇫🇮", "cod", "🐟", "1"]),
        ("电话是6203-4471。", ["电", "话", "是", "6203", "4471"]),
        ("九十七冊のカメラ", ["九", "十", "七", "冊", "の", "カ", "メ", "ラ"]),
        ("يدفع مفتاحًا ٣٥٠ دينـــارًا", ["يدفع", "مفتاحا", "350", "دينارا"]),
        ("๓-๕ B-๔๕ ด๔๕", ["3", "5", "b", "45", "ด", "45"]),
        ("\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd Ka\u034f\u0308fer", ["\u05e9\u05dc\u05d5\u05dd", "käfer"]),
        ("ＡＢＣ１２ ﬁne", ["abc", "12", "fine"]),
        ("Straße É e\u0301", ["strasse", "é", "é"]),
        ("zero\u200bwidth soft\u00adhyphen", ["zerowidth", "softhyphen"]),
        ("温度-18度, x-18 3-18", ["温", "度", "-18", "度", "x", "18", "3", "18"]),
        ("March 31st, the 3rd; first, 4thly", ["march", "31", "3", "first", "4", "thly"]),
        ("", []),
        ("?! … —", []),
    ],
)
def test_tokens(text: str, expected: list[str]) -> None:
    assert tokens(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "fits", "f1"),
    [
        ("Kestrel Trust", ["Kestrel Trust"], "exact contains", 1.0),
        ("Kestrel Trust holds it.", ["Kestrel Trust"], "contains", 2 / 3),
        ("Trust, Kestrel", ["Kestrel Trust"], "", 1.0),
        ("", ["Kestrel Trust"], "", 0.0),
        ("1420", ["14.20"], "", 0.0),
        ("24", ["-24"], "", 0.0),
        ("117", ["17"], "", 0.0),
        ("温度是零下十八度。", ["零下十八", "零下十八度"], "contains", 10 / 13),
        ("二十八度", ["零下十八度"], "", 6 / 9),
        ("十四番の鍵", ["四番"], "", 4 / 7),
        ("四番の鍵", ["四番"], "contains", 4 / 6),
        ("九十七冊、百九十七冊", ["九十七"], "contains", 6 / 12),
        ("百九十七冊", ["九十七"], "", 6 / 8),
        # A code is right or wrong, and may be read without its hyphens.
        ("PX-815", ["PX-411"], "", 0.0),
        ("BK-207", ["BK-270"], "", 0.0),
        ("IM-2209-A", ["IM-2209-B"], "", 0.0),
        ("PX411", ["PX-411"], "exact contains", 1.0),
        ("the code is k-5f21", ["k-5f21"], "contains", 2 / 4),
        ("34.5 kg", ["34.5kg"], "exact contains", 1.0),
        ("40kg of w3", ["40 kg"], "contains", 4 / 6),
        # Every measure takes its own best answer.
        ("the plot 31", ["31", "plot 31"], "exact contains", 1.0),
        ("key key", ["key"], "contains", 2 / 3),
    ],
)
def test_scores(prediction: str, answers: list[str], fits: str, f1: float) -> None:
    found = score(prediction, answers)
    assert found == Score(exact="exact" in fits, contains="contains" in fits, f1=pytest.approx(f1))


def test_an_answer_without_a_token_stands_in_nothing() -> None:
    assert not contains("Anything at all", "…")
    assert score("…", ["…"]).contains is False


@given(st.text(max_size=60), st.text(max_size=20))
def test_any_text_can_be_judged(prediction: str, answer: str) -> None:
    found = score(prediction, [answer])
    assert 0.0 <= found.f1 <= 1.0
    assert found.contains or not found.exact or not tokens(answer)
    itself = score(answer, [answer])
    assert (itself.exact, itself.f1) == (True, 1.0 if tokens(answer) else 0.0)
