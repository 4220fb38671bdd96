"""A loaded model: weights, tokenizer, prompt, and the profile that manifests are made from and judged by."""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from kvferry.core import limits
from kvferry.core.compat import LayerGeometry, Profile
from kvferry.core.errors import ContextOverflowError, ModelError
from kvferry.core.manifest import Model, Tokenizer
from kvferry.engine import attention as attention_hook
from kvferry.engine import fingerprint, head, rope
from kvferry.engine.backend import check_compiler
from kvferry.engine.cache import PrefixCache
from kvferry.engine.constrained import Constraint, GrammarCompiler
from kvferry.engine.generate import Answer, Sampling, Token, forward, generate, last_logits
from kvferry.engine.layers import AttendingBranch, Branch
from kvferry.engine.prefill import DEFAULT_PREFILL_CHUNK, prefill, read, snapshot
from kvferry.engine.prompt import PROMPT_VERSION, PromptBuilder
from kvferry.engine.ragged import RaggedLayer, heads_of
from kvferry.engine.speed import Speed, trial
from kvferry.engine.tensors import dtype_name, scalar

_DEFAULT_CONTEXT = 2048
# No code: a checkpoint that needs its own Python files is refused by mlx-lm.
_MODEL_FILES = ("*.json", "model*.safetensors", "tokenizer.model", "*.txt", "*.jinja")
# Rows that an answer's branch begins with; a longer answer grows it.
_ANSWER_ROOM = 512
_SELF_TEST_IDS = (3, 1)
# What mlx-lm and transformers raise for files that are missing, broken or contradictory.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
)
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class LoadedModel:
    """Everything that reading a document and answering from a cache needs. Use from one thread."""

    model: Any
    tokenizer: Any
    prompt: PromptBuilder
    profile: Profile
    prefill_chunk: int
    rotations: tuple[rope.Rotation, ...] = ()
    speed: Speed = field(default_factory=Speed)

    def prefill(self, ids: Sequence[int]) -> Generator[int, None, PrefixCache]:
        """Read a prefix to keep it; see ``kvferry.engine.prefill.prefill``.

        Raises:
            ModelError: when the model's caches are not plain.
            ContextOverflowError: when the prefix leaves no room in the context.
        """
        if self.profile.unsupported:
            raise ModelError(f"model: the cache of {self.profile.model.id} cannot be kept: {self.profile.unsupported}")
        self.check_context(len(ids), 0, 1)
        return self.speed.timing(prefill(self.model, ids, self.prefill_chunk), len(ids))

    def read(self, ids: Sequence[int]) -> Generator[int, None, list[Any]]:
        """Read a prefix for one answer, with any model; see ``kvferry.engine.prefill.read``.

        Raises:
            ContextOverflowError: when the prefix leaves no room in the context.
        """
        self.check_context(len(ids), 0, 1)
        return self.speed.timing(read(self.model, ids, self.prefill_chunk), len(ids))

    def forward(self, ids: Sequence[int], caches: Sequence[Branch]) -> mx.array:
        """Return logits [N, V] for fresh tokens on a branch."""
        return forward(self.model, ids, caches)

    def last_logits(self, ids: Sequence[int], caches: Sequence[Branch]) -> mx.array:
        """Return logits [V] after fresh tokens on a branch, as an answer's first token is chosen from."""
        return last_logits(self.model, ids, caches)

    def answer(
        self,
        ids: Sequence[int],
        prefix: PrefixCache | Sequence[Any],
        prefix_tokens: int,
        sampling: Sampling,
        constraint: Constraint | None = None,
    ) -> Generator[Token, None, Answer]:
        """Answer from a prefix; see ``kvferry.engine.generate.generate``.

        Yields tokens that are no news while a question longer than ``prefill_chunk`` is read.

        Args:
            ids: the question's ids.
            prefix: a kept cache, which is branched and never written, or what ``read`` made, which is used up.
            prefix_tokens: logical length of the prefix.
            sampling: how tokens are chosen.
            constraint: what the answer must keep to, made for it by ``grammars``.

        Raises:
            ContextOverflowError: when prefix, question and answer exceed the context.
        """
        self.check_context(prefix_tokens, len(ids), sampling.max_tokens)
        room = len(ids) + min(sampling.max_tokens, _ANSWER_ROOM)
        branch = prefix.branch(room) if isinstance(prefix, PrefixCache) else prefix
        return generate(
            self.model, self.tokenizer, ids, branch, sampling, constraint=constraint, chunk=self.prefill_chunk
        )

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What makes constraints for answers. The first use takes a second or two."""
        return GrammarCompiler(self.tokenizer, self.prompt.content)

    def check_context(self, prefix_tokens: int, fresh_tokens: int, max_tokens: int) -> None:
        """Refuse what does not fit the context.

        Raises:
            ContextOverflowError: naming every part and the limit.
        """
        total = prefix_tokens + fresh_tokens + max_tokens
        if total > self.profile.context_length:
            raise ContextOverflowError(
                f"context: {prefix_tokens} prefix + {fresh_tokens} question + {max_tokens} answer tokens = {total}, "
                f"the model takes {self.profile.context_length}",
                value=total,
                limit=self.profile.context_length,
            )

    def check_length(self, *contents: str) -> None:
        """Refuse, before they are encoded, contents of one prompt that certainly do not fit the context.

        Raises:
            ContextOverflowError: naming their characters and the limit.
        """
        self.prompt.check_length(self.profile.context_length, *contents)


def load(
    source: str,
    *,
    adapter: str = "",
    revision: str = "",
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    try_speed: bool = False,
) -> LoadedModel:
    """Load an mlx-lm model and prove what its caches are.

    On a CPU floating-point weights become float32: MLX multiplies bf16 and f16 tens of times slower there.

    Args:
        source: a model directory, or a hub id.
        adapter: directory of a LoRA adapter, or "".
        revision: of a hub id, or "".
        prefill_chunk: tokens a forward pass while reading.
        max_payload_bytes: largest payload that this node takes.
        try_speed: find out at once how fast it is, in a few forward passes.

    Raises:
        ModelError: when the model cannot be found, loaded or used.
    """
    check_compiler()
    path = _locate(source, revision)
    model, config = _load_weights(path, source)
    if adapter:
        model = _apply_adapter(model, adapter)
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
    model.eval()
    mx.eval(model.parameters())
    tokenizer = _load_tokenizer(path, config)
    identity = Model(
        id=path.absolute().name if Path(source).expanduser().is_dir() else source,
        revision=revision,
        type=str(config.get("model_type", "unknown")),
        weights=fingerprint.weights_digest(path),
        config=fingerprint.config_digest(config),
        quantization=fingerprint.quantization(config),
        adapter=fingerprint.adapter_digest(Path(adapter)) if adapter else None,
    )
    prompt = PromptBuilder(tokenizer)
    tokens = fingerprint.tokenizer_identity(prompt.content.description, tokenizer.chat_template)
    profile, rotations = _attach(
        model, config, identity, tokens, ids=len(tokenizer), max_payload_bytes=max_payload_bytes
    )
    speed = trial(model, profile.vocabulary, profile.context_length, prefill_chunk) if try_speed else Speed()
    return LoadedModel(model, tokenizer, prompt, profile, prefill_chunk, rotations, speed)


def _locate(source: str, revision: str) -> Path:
    path = Path(source).expanduser()
    if source and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: {source} has no config.json", model=source)
        return path
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise ModelError(
            f"model: {source!r} is neither a directory nor a hub id (owner/name); "
            "`kvferry models list` shows what can be added by name",
            model=source,
        )
    try:
        return Path(snapshot_download(source, revision=revision or None, allow_patterns=list(_MODEL_FILES)))
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {source} could not be fetched: {error}", model=source) from error


def _load_weights(path: Path, source: str) -> tuple[Any, dict[str, Any]]:
    try:
        return load_model(path)
    except _LOAD_ERRORS as error:
        raise ModelError(f"model: {source} could not be loaded: {_reason(error)}", model=source) from error


def _apply_adapter(model: Any, adapter: str) -> Any:
    try:
        return load_adapters(model, adapter)
    except _LOAD_ERRORS as error:
        raise ModelError(f"adapter: {adapter} could not be loaded: {_reason(error)}", adapter=adapter) from error


def _load_tokenizer(path: Path, config: dict[str, Any]) -> Any:
    try:
        return load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    except _LOAD_ERRORS as error:
        raise ModelError(f"tokenizer: {path} could not be loaded: {_reason(error)}", path=str(path)) from error


def _reason(error: Exception) -> str:
    """Return an error's type and text on one line. With hundreds of weights missing, mlx-lm names them all."""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text if len(text) <= _REASON_CHARACTERS else f"{text[:_REASON_CHARACTERS]} …"


def _attach(
    model: Any, config: dict[str, Any], identity: Model, tokens: Tokenizer, *, ids: int, max_payload_bytes: int
) -> tuple[Profile, tuple[rope.Rotation, ...]]:
    """Run the attach-time proofs and describe the model by what they measured; ``ids`` counts the tokenizer's."""
    context = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    probe, cache = rope.probe(model, ids)
    layers = tuple(_geometry(layer) for layer in cache)
    attention = attention_hook.install(model)
    unsupported = probe.unsupported or _row_bound(model)
    if not unsupported:
        unsupported, hooked = _self_test(model, cache)
        attention = attention or hooked
    vocabulary = _install_head(model)
    profile = Profile(
        model=identity,
        tokenizer=tokens,
        prompt_version=PROMPT_VERSION,
        rope=tuple(rotation.rope for rotation in probe.rotations),
        layers=layers,
        probe_error=probe.error,
        context_length=int(context or _DEFAULT_CONTEXT),
        max_payload_bytes=max_payload_bytes,
        unsupported=unsupported,
        vocabulary=vocabulary,
        attention=attention,
    )
    return profile, probe.rotations


def _geometry(cache: Any) -> LayerGeometry:
    if type(cache) is not KVCache:
        return LayerGeometry(type(cache).__name__, 0, 0, 0, "none")
    keys, values = cache.keys_and_values()
    return LayerGeometry("KVCache", keys.shape[1], keys.shape[3], values.shape[3], dtype_name(keys))


def _row_bound(model: Any) -> str:
    """Return which layer takes a row's index for its position (phi3small), which no removed row survives, or ""."""
    for index, layer in enumerate(model.layers):
        if any(getattr(part, "block_sparse", False) for _, part in layer.named_modules()):
            return f"layer {index}: block-sparse attention goes by a row's index, so rows cannot be removed"
    return ""


def _install_head(model: Any) -> int:
    """Have the model compute its last logits alone, where these are then the same. Return how many they are."""
    ids = mx.array([_SELF_TEST_IDS], dtype=mx.uint32)
    logits = model(ids)[0]
    head.install(model)
    with head.last_row_only(model):
        last = model(ids)[0]
    if _compare(logits[-1:], last, "the last row alone"):
        head.remove(model)
    return int(logits.shape[-1])


def _self_test(model: Any, cache: list[Any]) -> tuple[str, str]:
    """Compare two tokens on a branch with the same two on the model's own cache, and with a branch that attends itself.

    Returns:
        What is wrong with carried caches, and with attention head by head; "" for nothing.
    """
    prefix = snapshot(cache)
    try:
        carried = forward(model, _SELF_TEST_IDS, prefix.branch(len(_SELF_TEST_IDS)))
    except ModelError as error:
        return error.message, ""
    own = model(mx.array([_SELF_TEST_IDS], dtype=mx.uint32), cache=cache)[0]
    unsupported = _compare(own, carried, "a carried cache")
    return unsupported, "" if unsupported else _test_ragged(model, prefix, carried)


def _test_ragged(model: Any, prefix: PrefixCache, expected: mx.array) -> str:
    split = PrefixCache(tuple(RaggedLayer(heads_of(layer)) for layer in prefix.layers), prefix.offset)
    branches = split.branch(len(_SELF_TEST_IDS))
    try:
        ragged = forward(model, _SELF_TEST_IDS, branches)
    except (ValueError, ModelError) as error:
        return f"attention head by head: {_reason(error)}"
    for index, branch in enumerate(branches):
        if isinstance(branch, AttendingBranch) and branch.owed:
            return f"layer {index}: its attention does not go through mlx-lm's function"
    return _compare(expected, ragged, "attention head by head")


def _compare(expected: mx.array, actual: mx.array, what: str) -> str:
    scale = scalar(mx.max(mx.abs(expected.astype(mx.float32)))) or 1.0
    difference = scalar(mx.max(mx.abs((expected - actual).astype(mx.float32)))) / scale
    tolerance = rope.TOLERANCE.get(expected.dtype, 0.0)
    return "" if difference <= tolerance else f"{what} gives other logits: relative error {difference:.2g}"
