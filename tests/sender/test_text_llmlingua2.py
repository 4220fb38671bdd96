"""A8 without its package: what the package is given, and what is made of what it returns. A stand-in plays its part."""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import regex
from safetensors.numpy import save_file

from kvferry.core import container
from kvferry.core.digests import digest
from kvferry.core.errors import InvalidRequestError, ModelError
from kvferry.core.progress import Progress, finish
from kvferry.engine.content import ContentEncoder
from kvferry.engine.model import LoadedModel
from kvferry.engine.model_store import models_home
from kvferry.sender import registry
from kvferry.sender.method import TextMaterial
from kvferry.sender.text import llmlingua2, llmlingua_package
from kvferry.sender.text.llmlingua2 import LLMLingua2, LLMLingua2Parameters

XLMR = "llmlingua-2-xlm-roberta-large-meetingbank"
BERT = "llmlingua-2-bert-base-multilingual-cased-meetingbank"
TEXT = "The access code of the north warehouse is 4417, not 4418. Plate B-KV 2041 left at dawn.\n" * 6
BATCH = 8
WORD = regex.compile(r"[\w\p{M}]+|[^\w\s\p{M}]")


class StandIn:
    """Keeps the words that ``keep`` says, and does to the process what the package does."""

    made: list[StandIn]
    draws: list[int]
    keep: Callable[[int, str], bool]
    failure: Exception | None
    __name__ = "PromptCompressor"

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.calls: list[dict[str, Any]] = []
        self.hooks: list[Any] = []
        self.batches = 0
        self.model_name = given["model_name"]
        self.special_tokens = {"<unk>"}
        self.tokenizer = SimpleNamespace(tokenize=lambda text: ["<unk>" if w == "🚢" else w for w in text.split()])
        self.model = SimpleNamespace(register_forward_pre_hook=self._hook)
        self.oai_tokenizer = SimpleNamespace(encode=self._encode)
        type(self).made.append(self)
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002
        type(self).draws.append(42)
        os.environ["PYTHONHASHSEED"] = "42"
        sys.modules["torch"].backends.cudnn.deterministic = True
        if self.failure:
            raise self.failure

    def _encode(self, text: str, disallowed_special: Any = "all") -> list[int]:
        if disallowed_special == "all" and "<|endoftext|>" in text:
            raise ValueError("a control token")
        return list(text.encode())

    def _hook(self, hook: Any, *, with_kwargs: bool) -> Any:
        assert with_kwargs
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    def compress_prompt(self, text: str, **options: Any) -> dict[str, str]:
        self.calls.append({"text": text, **options})
        type(self).draws.append(len(self.draws))
        words = WORD.findall(text)
        self.oai_tokenizer.encode(text)
        for start in range(0, len(words), BATCH):
            mask = np.ones((1, len(words[start : start + BATCH]) + 2))
            for hook in list(self.hooks):
                hook(self.model, (), {"attention_mask": mask})
            self.batches += 1
        kept = (word for index, word in enumerate(words) if type(self).keep(index, word))
        return {"compressed_prompt": " ".join(kept)}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    """Put the stand-in, and as much of torch and tiktoken as it needs, where the package would be."""
    kind = type(
        "Fresh", (StandIn,), {"made": [], "draws": [], "keep": lambda index, _: index % 4 == 0, "failure": None}
    )
    modules = {name: ModuleType(name) for name in ("llmlingua", "torch", "tiktoken")}
    modules["llmlingua"].__dict__.update(PromptCompressor=kind, __version__="0.2.2")
    modules["torch"].__dict__.update(
        backends=SimpleNamespace(cudnn=SimpleNamespace(deterministic=False, benchmark=True)),
        get_rng_state=lambda: list(kind.draws),
        set_rng_state=lambda state: kind.draws.__setitem__(slice(None), state),
    )
    modules["tiktoken"].__dict__.update(encoding_for_model={"gpt-3.5-turbo": object()}.__getitem__)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return kind


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Return a function: put a folder with the outline of a compressor where compressors lie."""
    monkeypatch.setenv("KVFERRY_HOME", str(tmp_path / "my models"))

    def run(
        name: str = XLMR, tensor: str = "classifier.weight", kind: str = "XLMRobertaForTokenClassification"
    ) -> Path:
        path = models_home() / "compressors" / name
        path.mkdir(parents=True, exist_ok=True)
        save_file({tensor: np.zeros((2, 4), np.float32)}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"architectures": [kind]}), "utf-8")
        return path

    return run


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def method(install: Callable[..., Path]) -> LLMLingua2:
    install()
    return LLMLingua2()


@pytest.fixture
def compress(
    workshop: Callable[..., Any],
    model: LoadedModel,
    drain: Callable[..., Any],
    package: type[StandIn],
    method: LLMLingua2,
) -> Callable[..., TextMaterial]:
    """Return a function: what the method makes of a text."""
    shop = workshop(model)

    def run(text: str = TEXT, budget: float = 0.9, question: str | None = None, **others: Any) -> TextMaterial:
        parameters = registry.check_parameters(method, {"budget": budget, **others})
        material = drain(method.make(shop.reading(text, question=question), parameters))
        assert isinstance(material, TextMaterial)
        assert material.kind == container.COMPRESSED
        return material

    return run


def test_the_package_loads_from_the_folder_without_code_of_others(
    compress: Callable[..., TextMaterial], package: type[StandIn]
) -> None:
    compress()
    assert len(package.made) == 1
    assert package.made[0].given == {
        "model_name": str(models_home() / "compressors" / XLMR),
        "device_map": "cpu",
        "model_config": {"trust_remote_code": False, "local_files_only": True},
        "use_llmlingua2": True,
        "llmlingua2_config": {"max_batch_size": 1},
    }
    # The package looks for "xlm-roberta-large" in it, and a folder above may be called anything.
    assert package.made[0].model_name == XLMR


def test_the_compressor_is_loaded_once_and_the_last_one_is_kept(
    compress: Callable[..., TextMaterial], package: type[StandIn], install: Callable[..., Path]
) -> None:
    compress()
    compress(budget=0.5)
    assert len(package.made) == 1
    install(BERT, kind="BertForTokenClassification")
    compress(model=BERT)
    compress(model=BERT)
    assert [made.model_name for made in package.made] == [XLMR, BERT]


@pytest.mark.parametrize("budget", [1, 30, 0.25, 0.999])
def test_the_rate_is_the_budget_over_the_documents_tokens(
    compress: Callable[..., TextMaterial], package: type[StandIn], model: LoadedModel, budget: float
) -> None:
    compress(budget=budget)
    tokens = len(model.prompt.prefix(TEXT)) - len(model.prompt.prefix(""))
    (call,) = package.made[0].calls
    allowed = budget if isinstance(budget, int) else int(tokens * budget)
    assert call["rate"] == pytest.approx(allowed / tokens, abs=1e-12)
    # Nothing else is asked of the package: its own defaults are the method.
    assert (call["text"], set(call)) == (TEXT, {"text", "rate"})


@pytest.mark.parametrize("budget", [10**6, 1.0])
def test_a_budget_for_everything_keeps_everything_and_runs_nothing(
    compress: Callable[..., TextMaterial], package: type[StandIn], budget: float
) -> None:
    made = compress(budget=budget)
    assert (made.text, made.spans) == (TEXT, ())
    assert (made.outcome["rate"], made.outcome["cap_hit"]) == (1.0, False)
    assert package.made == []


@pytest.mark.parametrize("budget", [1, 2, 5, 17, 60, 0.1, 0.5])
@pytest.mark.parametrize("keeps", ["all", "some"])
def test_never_more_than_the_budget(
    compress: Callable[..., TextMaterial], package: type[StandIn], model: LoadedModel, budget: float, keeps: str
) -> None:
    package.keep = staticmethod({"all": lambda *_: True, "some": lambda i, _: i % 3 == 1}[keeps])
    made = compress(budget=budget)
    empty = len(model.prompt.prefix("", kind=container.COMPRESSED))
    tokens = len(model.prompt.prefix(made.text or "", kind=container.COMPRESSED)) - empty
    source = len(model.prompt.prefix(TEXT)) - len(model.prompt.prefix(""))
    assert tokens == made.outcome["tokens"] <= (budget if isinstance(budget, int) else int(source * budget))
    assert made.outcome["source_tokens"] == source
    assert made.outcome["rate"] == tokens / source
    whole = " ".join(word for index, word in enumerate(WORD.findall(TEXT)) if package.keep(index, word))
    assert whole.startswith(made.text or "")
    assert made.outcome["cap_hit"] is (made.text != whole)


def test_what_made_it_is_named(compress: Callable[..., TextMaterial], install: Callable[..., Path]) -> None:
    outcome = compress().outcome
    assert outcome["package"] == "llmlingua 0.2.2"
    assert outcome["checkpoint"] == digest((install() / "model.safetensors").read_bytes()).hex()


def test_the_question_makes_no_difference(compress: Callable[..., TextMaterial]) -> None:
    assert compress() == compress(question="Which plate?")


CASES = {
    "plates": "Plate B-KV 2041 and B-KV 2014; not HH-AB 7.\n\nPlate B-KV 2041 again.",
    "code": "if x != y:\n    return a[i] ** 2  # not 3\n" * 3,
    "chinese": "门牌号是京A·12345，不是京A·12354。主管的电话是六二〇三。",
    "width": "Ｔｈｅ ｃｏｄｅ ｉｓ ４４１７，ﬁnal… and 4417 e\u0301te\u0301 final.",
    "control strings": "a <|endoftext|> b <|im_end|> c <s> d </s> [PAD] e",
    "ships": "🚢 the 🚢 ferry 🚢 leaves 🚢 at 🚢 dawn",
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_the_package_gives_is_what_is_sent(
    compress: Callable[..., TextMaterial], package: type[StandIn], name: str, every: int
) -> None:
    document = CASES[name]
    package.keep = staticmethod(lambda index, _: index % every == 0)
    made = compress(document, budget=0.95)
    expected = " ".join(WORD.findall(document)[::every])
    assert expected.startswith(made.text or "")
    assert made.outcome["cap_hit"] is (made.text != expected)
    assert made.spans == ()


@pytest.mark.parametrize("text", ["", " ", "\n\n\t", "\u3000" * 9])
@pytest.mark.parametrize("budget", [1, 0.5])
def test_nothing_is_made_of_nothing(
    compress: Callable[..., TextMaterial], package: type[StandIn], text: str, budget: float
) -> None:
    made = compress(text, budget=budget)
    assert not (made.text or "").strip()
    assert package.made == []
    assert 0 <= made.outcome["rate"] <= 1


def test_a_text_without_a_known_word_does_not_reach_the_rule(
    compress: Callable[..., TextMaterial], package: type[StandIn]
) -> None:
    with pytest.raises(ModelError, match="^method A8: the compressor's tokenizer knows no word of the document$"):
        compress("🚢 🚢 🚢", budget=1)
    assert package.made[0].calls == []


@pytest.mark.parametrize(
    ("keep", "text", "budget", "words"),
    [
        (lambda *_: False, TEXT, 60, 0),
        (lambda *_: False, TEXT, 0.5, 0),
        (lambda *_: True, "👨\u200d👩\u200d👧\u200d👦 x", 1, 8),
    ],
)
def test_a_budget_of_which_nothing_is_left_is_refused(
    compress: Callable[..., TextMaterial],
    package: type[StandIn],
    model: LoadedModel,
    keep: Callable[[int, str], bool],
    text: str,
    budget: float,
    words: int,
) -> None:
    package.keep = staticmethod(keep)
    tokens = model.prompt.content.count(text)
    allowed = budget if isinstance(budget, int) else int(tokens * budget)
    with pytest.raises(InvalidRequestError, match=f"^budget: {allowed} tokens do not suffice for a word of ") as caught:
        compress(text, budget=budget)
    assert caught.value.fields == {"field": "budget", "value": allowed}
    assert caught.value.message.endswith(f"at that rate of its {tokens} the compressor keeps {words} words")


def test_a_budget_is_in_the_receivers_tokens(
    workshop: Callable[..., Any], model: LoadedModel, package: type[StandIn], method: LLMLingua2
) -> None:
    description = json.loads(model.prompt.content.description)
    description[0]["model"]["merges"] = []
    reading = workshop(model).reading(TEXT)
    reading.counter = ContentEncoder(json.dumps(description).encode())
    # Byte by byte, as its vocabulary is spelt without merges.
    whole = len(TEXT.encode())
    assert reading.counter.count(TEXT) == whole > 1.4 * reading.tokens
    for budget in (0.5, 20):
        made = finish(method.make(reading, LLMLingua2Parameters(budget=budget)))
        allowed = whole // 2 if budget == 0.5 else 20
        assert made.text is not None
        assert 0 < len(made.text.encode()) == made.outcome["tokens"] <= allowed
        assert made.outcome["source_tokens"] == whole
        assert package.made[-1].calls[-1]["rate"] == allowed / whole


def test_another_compressor_in_the_same_place_makes_another_message(
    workshop: Callable[..., Any], model: LoadedModel, package: type[StandIn], install: Callable[..., Path]
) -> None:
    weights = install() / "model.safetensors"
    shop = workshop(model)
    first = shop.make("A8", TEXT, budget=0.5)
    assert shop.make("A8", TEXT, budget=0.5).reused
    os.utime(weights, ns=(1, 1))
    again = shop.make("A8", TEXT, budget=0.5)
    assert (first.reused, again.reused) == (False, False)


@pytest.mark.parametrize("text", ["hi", "a <|endoftext|> b"])
def test_short_texts_and_control_strings_pass(compress: Callable[..., TextMaterial], text: str) -> None:
    assert compress(text, budget=1).outcome["tokens"] == 1


def test_random_numbers_and_settings_stay_as_they_were(
    compress: Callable[..., TextMaterial], package: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    package.draws[:] = [1, 2, 3]
    before = (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    for hash_seed in ("5", None):
        if hash_seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", hash_seed)
        compress()
        assert os.environ.get("PYTHONHASHSEED") == hash_seed
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert package.draws == [1, 2, 3]
    cudnn = sys.modules["torch"].backends.cudnn
    assert (cudnn.deterministic, cudnn.benchmark) == (False, True)


def test_closing_stops_between_batches(
    workshop: Callable[..., Any], model: LoadedModel, package: type[StandIn], method: LLMLingua2
) -> None:
    package.draws[:] = [9]
    steps = method.make(workshop(model).reading(TEXT), registry.check_parameters(method, {}))
    seen: list[Progress] = []
    while not package.made or package.made[0].batches < 2:
        seen.append(next(steps))
        # Whoever takes a turn meanwhile finds random numbers as they were.
        assert package.draws == [9]
    steps.close()
    assert package.made[0].batches == 2
    assert package.made[0].hooks == []
    assert package.draws == [9]
    assert [step.done for step in seen if step.total == seen[-1].total and step.stage == "method"][-2:] == [10, 20]
    assert all(step.done <= step.total for step in seen)


def test_two_documents_may_take_turns(
    workshop: Callable[..., Any], model: LoadedModel, package: type[StandIn], method: LLMLingua2, drain: Any
) -> None:
    shop, parameters = workshop(model), registry.check_parameters(method, {"budget": 0.5})
    texts = (TEXT, TEXT.upper())
    alone = [drain(method.make(shop.reading(text), parameters)) for text in texts]
    running: dict[int, Any] = {i: method.make(shop.reading(text), parameters) for i, text in enumerate(texts)}
    made: dict[int, TextMaterial] = {}
    while running:
        for index, steps in list(running.items()):
            try:
                next(steps)
            except StopIteration as stop:
                made[index] = stop.value
                del running[index]
    assert [made[0], made[1]] == alone


@pytest.mark.parametrize("missing", ["llmlingua", "torch", "tiktoken"])
def test_a_missing_package_says_what_to_install(
    compress: Callable[..., TextMaterial], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModelError, match=rf"needs the package {missing}\. Run: pip install 'kvferry\[llmlingua\]'$"):
        compress()


def test_a_missing_model_says_which_command_fetches_it(compress: Callable[..., TextMaterial]) -> None:
    path = models_home() / "compressors" / BERT
    with pytest.raises(ModelError) as caught:
        compress(model=BERT)
    assert caught.value.message == (
        f"compressor {BERT} is not installed. Run: hf download microsoft/{BERT} --local-dir '{path}'"
    )
    assert caught.value.fields == {"model": BERT, "path": str(path)}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "model.safetensors").write_bytes(b"\x10"),
        lambda path: os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 4),
        lambda path: (path / "config.json").unlink(),
        lambda path: (path / "config.json").write_text("[]"),
        lambda path: (path / "config.json").write_text("{"),
    ],
)
def test_half_a_model_is_not_loaded(
    compress: Callable[..., TextMaterial], package: type[StandIn], install: Callable[..., Path], damage: Any
) -> None:
    path = install()
    damage(path)
    with pytest.raises(ModelError, match=rf"is damaged: .+\. Remove the folder and run: hf download microsoft/{XLMR}"):
        compress()
    assert package.made == []


@pytest.mark.parametrize("changed", [{"tensor": "roberta.pooler"}, {"kind": "XLMRobertaModel"}])
def test_a_model_without_its_classifier_is_not_filled_in_at_random(
    compress: Callable[..., TextMaterial], package: type[StandIn], install: Callable[..., Path], changed: dict[str, str]
) -> None:
    install(**changed)
    with pytest.raises(ModelError, match="is damaged: it is no token classifier"):
        compress()
    assert package.made == []


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("hash mismatch")])
def test_an_encoding_that_cannot_be_fetched_says_so(
    compress: Callable[..., TextMaterial], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def offline(_: str) -> None:
        raise error

    monkeypatch.setattr(sys.modules["tiktoken"], "encoding_for_model", offline)
    with pytest.raises(ModelError, match=rf"tiktoken downloads once, and that failed: {error}\. .*TIKTOKEN_CACHE_DIR"):
        compress()


def test_a_model_that_does_not_load_is_named_and_tried_anew(
    compress: Callable[..., TextMaterial], package: type[StandIn]
) -> None:
    package.failure = OSError("tokenizer.json is missing")
    with pytest.raises(ModelError, match=f"{XLMR} cannot be loaded: tokenizer.json is missing"):
        compress()
    package.failure = None
    assert compress().text


def test_a_passage_that_the_package_cannot_rank_is_an_error(
    compress: Callable[..., TextMaterial], package: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(index: int, word: str) -> bool:
        raise IndexError("index -1 is out of bounds")

    package.keep = staticmethod(fails)
    with pytest.raises(ModelError, match="cannot rank a passage of the document, .*: index -1 is out of bounds"):
        compress()
    assert package.made[0].hooks == []


@pytest.mark.parametrize("name", ["xlm-roberta-large", "../elsewhere", ""])
def test_only_the_released_models_are_taken(compress: Callable[..., TextMaterial], name: str) -> None:
    with pytest.raises(InvalidRequestError, match="^model: "):
        compress(model=name)


@pytest.mark.parametrize("module", [llmlingua2, llmlingua_package])
def test_the_modules_can_be_imported_without_the_extra(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    for name in ("llmlingua", "torch", "tiktoken", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert module.__file__
    assert set(runpy.run_path(module.__file__)) >= {name for name in vars(module) if not name.startswith("_")}
