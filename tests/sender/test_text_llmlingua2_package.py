"""A8 with its package: tiny random compressors, and the package's own function as the oracle. Needs kvferry[llmlingua].

The compressors are made here (``compressors`` in tests/support), and so is tiktoken's encoding.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressors
import numpy as np
import pytest
import regex
from compressors import BERT, LONG, TEXT, XLMR

from kvferry.core import container
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.engine.model import LoadedModel
from kvferry.sender import registry
from kvferry.sender.method import TextMaterial
from kvferry.sender.text.llmlingua2 import LLMLingua2

pytestmark = [
    pytest.mark.llmlingua,
    # Other people's packages, in the versions that go together, warn of each other's future.
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning", "default::UserWarning"),
]

TEXTS = {
    "prose": TEXT,
    "long": LONG,
    "one word": "warehouse",
    "unknown to both": "hi ☃",
    "one long word": "x" * 900,
    "width": "Ｔｈｅ ｃｏｄｅ ｉｓ ４４１７. ﬁnal… e\u0301te\u0301 " + TEXT,
    "control strings": "The <|endoftext|> code </s> of [SEP] the [NEW3] <unk> warehouse",
    "no stop": "the code of the plate " * 300,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home of kvferry with both compressors."""
    path = tmp_path_factory.mktemp("home")
    compressors.install(path)
    return path


@pytest.fixture(autouse=True)
def prepared(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kvferry look there, and tiktoken count bytes."""
    import tiktoken

    monkeypatch.setattr(tiktoken, "encoding_for_model", {"gpt-3.5-turbo": compressors.encoding_of_bytes()}.__getitem__)
    monkeypatch.setenv("KVFERRY_HOME", str(home))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama", context=32768)


@pytest.fixture(scope="module")
def method() -> LLMLingua2:
    return LLMLingua2()


@pytest.fixture
def compress(
    workshop: Callable[..., Any], model: LoadedModel, drain: Callable[..., Any], method: LLMLingua2
) -> Callable[..., TextMaterial]:
    """Return a function: what the method makes of a text."""
    shop = workshop(model)

    def run(text: str, name: str, budget: float) -> TextMaterial:
        parameters = registry.check_parameters(method, {"budget": budget, "model": name})
        material = drain(method.make(shop.reading(text), parameters))
        assert isinstance(material, TextMaterial)
        return material

    return run


@pytest.fixture(scope="module")
def released(home: Path) -> Callable[[str, str, float], str]:
    """Return a function: what the package makes of a text, as its README uses it."""
    loaded: dict[str, Any] = {}

    def run(name: str, text: str, rate: float) -> str:
        from llmlingua import PromptCompressor

        if name not in loaded:
            path = home / "models" / "compressors" / name
            loaded[name] = PromptCompressor(model_name=str(path), device_map="cpu", use_llmlingua2=True)
        return str(loaded[name].compress_prompt(text, rate=rate)["compressed_prompt"])

    return run


def tokens_of(model: LoadedModel, text: str) -> int:
    return len(model.prompt.prefix(text)) - len(model.prompt.prefix(""))


def words_of(text: str) -> list[str]:
    return regex.findall(r"[\w\p{M}]|[^\w\s]", text)


def is_subsequence(part: list[str], whole: list[str]) -> bool:
    rest = iter(whole)
    return all(word in rest for word in part)


@pytest.mark.parametrize("name", [XLMR, BERT])
@pytest.mark.parametrize("text", [text for text in TEXTS if text not in {"control strings", "unknown to both"}])
@pytest.mark.parametrize("budget", [0.2, 0.6, 0.97])
def test_it_is_what_the_package_returns(
    compress: Callable[..., TextMaterial],
    released: Callable[[str, str, float], str],
    model: LoadedModel,
    name: str,
    text: str,
    budget: float,
) -> None:
    document = TEXTS[text]
    source = tokens_of(model, document)
    allowed = max(1, int(source * budget))
    if name == BERT and text == "one long word":
        # Where its tokenizer knows no word at all, the package raises something of its own.
        with pytest.raises(ModelError, match="knows no word of the document"):
            compress(document, name, budget)
        return
    expected = released(name, document, allowed / source)
    if not expected.strip():
        with pytest.raises(InvalidRequestError, match="^budget: .* the compressor keeps 0 words$"):
            compress(document, name, budget)
        return
    made = compress(document, name, budget)
    assert made.text is not None
    assert expected.startswith(made.text)
    assert made.outcome["cap_hit"] is (made.text != expected)
    assert made.outcome["cap_hit"] is (tokens_of(model, expected) > allowed)
    assert tokens_of(model, made.text) == made.outcome["tokens"] <= allowed


@pytest.mark.parametrize("name", [XLMR, BERT])
def test_rate_one_keeps_every_word_and_a_little_less_does_not(
    compress: Callable[..., TextMaterial], released: Callable[[str, str, float], str], name: str
) -> None:
    assert compress(LONG, name, 1.0).text == LONG
    kept = compress(LONG, name, 0.99).text or ""
    assert len(words_of(kept)) < len(words_of(LONG))
    everything = released(name, TEXT, 1.0)
    # The package alone loses the line breaks and the spaces around some words, and no word of what it knows.
    assert is_subsequence(words_of(everything), words_of(TEXT))


# At a rate below some 0.01, and of one word or two, the rule keeps none.
NONE_KEPT = {
    1: set(TEXTS),
    40: {"long", "one long word"},
    0.5: {"one word", "unknown to both", "one long word"},
}


@pytest.mark.parametrize("name", [XLMR, BERT])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("budget", NONE_KEPT)
def test_kept_words_are_the_documents_in_order(
    compress: Callable[..., TextMaterial], model: LoadedModel, name: str, text: str, budget: float
) -> None:
    document = TEXTS[text]
    if text == "one long word" and name == BERT:
        with pytest.raises(ModelError, match="knows no word of the document"):
            compress(document, name, budget)
        return
    if text in NONE_KEPT[budget]:
        with pytest.raises(InvalidRequestError, match="^budget: .* the compressor keeps 0 words$"):
            compress(document, name, budget)
        return
    made = compress(document, name, budget)
    sent = made.text or ""
    assert made.kind == container.COMPRESSED
    assert made.outcome["tokens"] <= (budget if isinstance(budget, int) else tokens_of(model, document) * budget)
    if text != "width":
        assert is_subsequence(words_of(sent), words_of(document))
    assert made.spans == ()


@pytest.mark.parametrize("name", [XLMR, BERT])
def test_the_long_text_is_longer_than_a_passage(method: LLMLingua2, name: str, home: Path) -> None:
    compressor = method._compressors.get(name)
    for text in (LONG, TEXTS["no stop"]):
        assert len(compressor.tokens(text)) > 513
    batches = list(compressor.compress(LONG, 0.5))
    assert len(batches) > 3
    assert batches[0] == 0
    assert batches == sorted(batches)


@pytest.mark.parametrize("name", [XLMR, BERT])
@pytest.mark.parametrize("text", ["hi", "☃"])
@pytest.mark.parametrize("budget", [1, 0.5])
def test_of_a_single_word_nothing_is_kept(
    compress: Callable[..., TextMaterial], name: str, text: str, budget: float
) -> None:
    unknown = text == "☃" and name == BERT
    words = "knows no word of the document$" if unknown else "the compressor keeps 0 words$"
    with pytest.raises(ModelError if unknown else InvalidRequestError, match=words):
        compress(text, name, budget)


@pytest.mark.parametrize("name", [XLMR, BERT])
@pytest.mark.parametrize(
    ("text", "budget"),
    [*itertools.product(["", " ", "\n", ".", "The"], [1, 0.5, 1.0]), ("hi", 1.0), ("☃", 1.0)],
)
def test_short_texts_pass(compress: Callable[..., TextMaterial], name: str, text: str, budget: float) -> None:
    made = compress(text, name, budget)
    assert made.outcome["tokens"] <= made.outcome["source_tokens"]
    assert words_of(made.text or "") in (words_of(text), [])


@pytest.mark.parametrize("name", [XLMR, BERT])
def test_random_numbers_stay_as_they_were(workshop: Any, drain: Any, model: LoadedModel, name: str) -> None:
    import torch

    def state() -> tuple[Any, ...]:
        flags = torch.backends.cudnn
        numbers = (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
        return (
            *numbers,
            torch.get_rng_state().tolist(),
            flags.deterministic,
            flags.benchmark,
            os.environ.get("PYTHONHASHSEED"),
        )

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    before = state()
    fresh = LLMLingua2()
    parameters = registry.check_parameters(fresh, {"model": name})
    steps = fresh.make(workshop(model).reading(LONG), parameters)
    drain(steps)
    assert state() == before
    for _ in zip(range(6), fresh.make(workshop(model).reading(LONG), parameters), strict=False):
        assert state() == before
    assert state() == before


@pytest.mark.parametrize("name", [XLMR, BERT])
def test_the_same_text_gives_the_same_whatever_came_before(
    compress: Callable[..., TextMaterial], workshop: Any, drain: Any, model: LoadedModel, name: str
) -> None:
    first = compress(LONG, name, 0.4)
    compress(TEXT, name, 0.3)
    assert compress(LONG, name, 0.4) == first
    fresh = LLMLingua2()
    parameters = registry.check_parameters(fresh, {"model": name, "budget": 0.4})
    assert drain(fresh.make(workshop(model).reading(LONG), parameters)) == first


def test_neither_code_of_a_model_nor_a_hub_is_asked(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    shutil.copytree(home, tmp_path / "home")
    folder = tmp_path / "home" / "models" / "compressors" / XLMR
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {
        "model_type": "strange",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForTokenClassification": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n", "utf-8")
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "home"))
    with pytest.raises(ModelError, match="cannot be loaded"):
        LLMLingua2()._compressors.get(XLMR)
    assert not (tmp_path / "ran").exists()
