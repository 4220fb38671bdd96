"""Fixtures for every folder of tests: nobody's real files, and tiny models that need no network.

===================  ===================================================================================================
isolated_home        autouse; every directory of the user's is a temporary one, and KVFERRY_* variables are gone
users_models         where the user's own converted models lie; only tests marked ``real_model`` look there
tiny_model_dir       factory of model directories, as ``mlx_lm.load`` and ``kvferry.engine.model.load`` take them
tiny_model           factory of loaded tiny models (``kvferry.engine.model.LoadedModel``)
random_model         factory of bare mlx-lm models of any architecture, seeded weights, nothing on disk; never shared
tiny_tokenizer_dir   tokenizer.json and tokenizer_config.json, shared by the tiny models
grammar_tokenizer    that tokenizer loaded by mlx-lm, with ``grammar_steps.ENDS`` as its ends
compiler             a compiler of grammars for it (``kvferry.engine.constrained.GrammarCompiler``)
spelling, single     the bytes of each of its tokens, and its token of each byte
masked_logits        function: what a model says on mlx-lm's full cache where rows are masked out, head by head
own_answer           function: the ids that a model chooses greedily on mlx-lm's own caches
*_oracles            the modules of tests/oracles: selector, attention, budget, qfilter, quantisation
===================  ===================================================================================================

A tiny model has random weights: it answers with noise, but with the same noise every time, and with noise that depends
on the whole prompt. Same arguments, same directory; other ``seed``, other weights of equal shapes::

    path = tiny_model_dir()                                        # llama, 2 layers, 4 query and 2 KV heads
    other = tiny_model_dir(seed=1)                                 # another checkpoint with the same shapes
    wide = tiny_model_dir("qwen2", layers=3, heads=14, kv_heads=2, head_dim=8)
    model = tiny_model("qwen3", tied=False)                        # loaded; use it, do not change it

The directories are shared by all tests of a run: to change a file, copy the directory first (``shutil.copytree``).

The tokenizer is a byte-level BPE with fewer than 400 entries, so every text can be encoded. It has a ChatML template,
three special tokens (``<|endoftext|>``, ``<|im_start|>``, ``<|im_end|>``), and ``<think>``, which is added but *not*
special. An answer ends with ``<|im_end|>`` or ``<|endoftext|>``.

Nothing here is imported before a fixture needs it: the tests of core and client run without MLX.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import platformdirs
import pytest
from hypothesis import settings

import kvferry.engine  # noqa: F401  (loads a real BLAS before any test file imports MLX)

if TYPE_CHECKING:
    from kvferry.engine.constrained import GrammarCompiler
    from kvferry.engine.model import LoadedModel

    TinyModelDir = Callable[..., Path]
    TinyModel = Callable[..., LoadedModel]
    RandomModel = Callable[..., Any]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
UNSPECIAL_TOKEN = "<think>"  # noqa: S105
# Read before the fixture below takes the variables away.
USERS_MODELS = Path(os.environ.get("KVFERRY_HOME") or platformdirs.user_data_dir("kvferry")) / "models"
VOCABULARY = 380
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINING_TEXT = (
    "You answer questions about a document. Use only what the document says. Answer briefly and copy names, "
    "codes, numbers and dates exactly. The access code of the north warehouse is 4417. The south warehouse "
    "opens at 7:30 and closes at 18:00; its keys are with Ada Lindqvist. Every crate that arrives is weighed, "
    "counted and entered in the ledger before noon. The ferry leaves at dawn, carries eleven crates of paper, "
    "and returns when the tide allows it. What is the access code of the north warehouse? Who keeps the keys?"
)


def pytest_configure() -> None:
    """Cut the model hub off before any test module imports its client, which reads this once."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The same examples every time, and no time limit on one: a busy machine is no defect. `make test-fuzz` varies.
    settings.register_profile("steady", deadline=None, derandomize=True)
    settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def isolated_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Turn every directory of the user's into a temporary one, for this process and those that it starts."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [key for key in os.environ if key.startswith("KVFERRY_")]:
            patch.delenv(name)
        # HOME as well: older versions of platformdirs follow no XDG variable on macOS.
        patch.setenv("HOME", str(home))
        for name in ("CACHE", "CONFIG", "DATA", "STATE"):
            folder = home / name.lower()
            folder.mkdir()
            patch.setenv(f"XDG_{name}_HOME", str(folder))
        yield home


@pytest.fixture(scope="session")
def users_models() -> Path:
    """Where the user's own converted models lie. Read only, and only in tests marked ``real_model``."""
    return USERS_MODELS


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the tiny models' tokenizer.json and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS) - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.add_tokens([AddedToken(UNSPECIAL_TOKEN, normalized=False, special=False)])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
    return path


@pytest.fixture(scope="session")
def grammar_tokenizer(tiny_tokenizer_dir: Path) -> Any:
    """Return the tiny models' tokenizer with ends of its own."""
    from grammar_steps import ENDS
    from mlx_lm import tokenizer_utils

    return tokenizer_utils.load(tiny_tokenizer_dir, eos_token_ids=list(ENDS))


@pytest.fixture(scope="session")
def compiler(grammar_tokenizer: Any) -> GrammarCompiler:
    """Return a compiler of grammars for that tokenizer."""
    from kvferry.engine.constrained import GrammarCompiler
    from kvferry.engine.content import ContentEncoder

    return GrammarCompiler(grammar_tokenizer, ContentEncoder.of(grammar_tokenizer))


@pytest.fixture(scope="session")
def spelling(grammar_tokenizer: Any) -> list[bytes]:
    """Return every token's bytes."""
    from grammar_steps import spellings

    return spellings(grammar_tokenizer)


@pytest.fixture(scope="session")
def single(spelling: list[bytes]) -> dict[int, int]:
    """Return the token of every byte."""
    from grammar_steps import byte_tokens

    return byte_tokens(spelling)


@pytest.fixture(scope="session")
def random_model() -> RandomModel:
    """Return a factory of bare mlx-lm models: ``random_model(config, seed=0, dtype="float32")``.

    ``config`` is that of the architecture's ``config.json`` and names its ``model_type``. The scale of the weights
    gives logits with a standard deviation of a few units and attention that is neither flat nor on one row.
    """
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    def scaled(name: str, old: mx.array, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        noise = rng.standard_normal(old.shape, dtype=np.float32)
        if name.endswith("bias"):
            return 0.3 * noise
        if old.ndim == 1:
            return np.array(old) + 0.1 * noise
        outer = any(word in name for word in ("embed", "wte", "lm_head"))
        return (3.0 if outer else 1.5) * noise / np.sqrt(old.shape[-1])

    def build(config: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Any:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
        rng = np.random.default_rng(seed)
        parameters = sorted(tree_flatten(model.parameters()))
        model.load_weights([(name, mx.array(scaled(name, old, rng))) for name, old in parameters])
        model.set_dtype(getattr(mx, dtype))
        model.eval()
        mx.eval(model.parameters())
        return model

    return build


@pytest.fixture(scope="session")
def tiny_model_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path, random_model: RandomModel
) -> TinyModelDir:
    """Return a factory of model directories: config.json, model.safetensors, tokenizer files.

    Args of the factory, all but the first by name only:
        model_type: "llama", "qwen2", "qwen3", or another of mlx-lm's with what it needs in ``config``.
        seed: of the weights.
        layers, heads, kv_heads, head_dim: the shape; the hidden size is heads x head_dim.
        tied: whether the output layer is the embedding.
        dtype: of the stored weights, "float32", "bfloat16" or "float16".
        context: max_position_embeddings.
        config: more keys of config.json, over those that follow from the above.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    root = tmp_path_factory.mktemp("models")

    def write(path: Path, config: dict[str, Any], seed: int, dtype: str) -> None:
        path.mkdir()
        shutil.copytree(tiny_tokenizer_dir, path, dirs_exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
        weights = dict(tree_flatten(random_model(config, seed, dtype).parameters()))
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})

    def build(
        model_type: str = "llama",
        *,
        seed: int = 0,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        tied: bool = True,
        dtype: str = "float32",
        context: int = 4096,
        config: dict[str, Any] | None = None,
    ) -> Path:
        full = _tiny_config(model_type, layers, heads, kv_heads, head_dim) | {
            "tie_word_embeddings": tied,
            "max_position_embeddings": context,
            "torch_dtype": dtype,
            **(config or {}),
        }
        key = json.dumps([full, seed, dtype], sort_keys=True)
        path = root / f"{model_type}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        if not path.exists():
            write(path, full, seed, dtype)
        return path

    return build


def _tiny_config(model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    hidden = heads * head_dim
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "eos_token_id": [VOCABULARY - 4, VOCABULARY - 2],
    }


@pytest.fixture(scope="session")
def tiny_model(tiny_model_dir: TinyModelDir) -> TinyModel:
    """Return a factory of loaded tiny models; arguments as of ``tiny_model_dir``. All tests share them."""
    from kvferry.engine.model import load

    loaded: dict[Path, LoadedModel] = {}

    def build(model_type: str = "llama", **options: Any) -> LoadedModel:
        path = tiny_model_dir(model_type, **options)
        if path not in loaded:
            loaded[path] = load(str(path))
        return loaded[path]

    return build


def _oracles(name: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def module() -> ModuleType:
        from loading import load

        return load(f"oracles/{name}.py")

    return module


selector_oracles = _oracles("selector_oracles")
attention_oracles = _oracles("attention_oracles")
budget_oracles = _oracles("budget_oracles")
qfilter_oracles = _oracles("qfilter_oracles")
quantisation_oracles = _oracles("quantisation_oracles")


@pytest.fixture(scope="session")
def masked_logits() -> Callable[..., Any]:
    """Return a function: ``masked_logits(model, ids, fresh, kept)`` for an mlx-lm model of llama's structure.

    ``kept`` says for every layer and KV head which rows of ``ids`` are seen. MLX takes masks over query heads.
    """

    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import make_prompt_cache

    def run(model: Any, ids: Sequence[int], fresh: Sequence[int], kept: Any) -> Any:
        inner = model.model
        cache = make_prompt_cache(model)
        model(mx.array([list(ids)]), cache=cache)
        total, count = len(ids), len(fresh)
        hidden = inner.embed_tokens(mx.array([list(fresh)]))
        for layer, layer_cache, rows in zip(inner.layers, cache, kept, strict=True):
            heads = layer.self_attn.n_heads
            visible = np.zeros((1, heads, count, total + count), dtype=bool)
            for head in range(heads):
                visible[0, head, :, rows[head * len(rows) // heads]] = True
            visible[..., total:] = np.tril(np.ones((count, count), dtype=bool))
            hidden = layer(hidden, mx.array(visible), layer_cache)
        return np.array(inner.embed_tokens.as_linear(inner.norm(hidden))[0])

    return run


@pytest.fixture(scope="session")
def own_answer() -> Callable[..., tuple[int, ...]]:
    """Return a function: ``own_answer(model, prefix, fresh, max_tokens)``, greedy on mlx-lm's own caches.

    The prefix is read in the model's chunks, what is fresh in one pass; the end of turn is left out.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    def answer(model: LoadedModel, prefix: Sequence[int], fresh: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        cache = make_prompt_cache(model.model)
        for start in range(0, len(prefix), model.prefill_chunk):
            mx.eval(model.model(mx.array([prefix[start : start + model.prefill_chunk]]), cache=cache))
        chosen: list[int] = []
        step = fresh
        while len(chosen) < max_tokens:
            token = int(mx.argmax(model.model(mx.array([step]), cache=cache)[0, -1]).item())
            if token in model.tokenizer.eos_token_ids:
                break
            chosen.append(token)
            step = [token]
        return tuple(chosen)

    return answer
