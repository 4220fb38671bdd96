"""Protobuf messages to our own types and back. Nothing outside the wire layer sees a protobuf type."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.core.compat import Profile, Reason, ReasonCode, Verdict
from kvferry.core.digests import DIGEST_BYTES
from kvferry.core.errors import InvalidRequestError
from kvferry.core.manifest import Scalar
from kvferry.proto.v1 import common_pb2, receiver_service_pb2, sender_service_pb2


@dataclass(frozen=True)
class MethodInfo:
    """A method as people see it.

    Attributes:
        id: such as "B1".
        name: such as "serialised".
        form: what crosses the wire: text, evidence, references or kv.
        label: official, faithful, adapted, inspired or custom.
        aware: whether it sees the question.
        source: where the rule comes from.
        summary: one line.
    """

    id: str
    name: str
    form: str
    label: str
    aware: bool
    source: str
    summary: str


@dataclass(frozen=True)
class NodeInfo:
    """What a daemon is and runs. Digests are hexadecimal.

    ``unix_time`` is its clock as it answered, 0 if unknown. ``prefill_tokens_per_second`` is how fast its model reads a
    prompt there, as last measured; 0 when it was not.
    """

    role: str
    kvferry_version: str
    mlx_version: str
    mlx_lm_version: str
    device: str
    blas: str
    model: str
    weights: str
    tokenizer: str
    chat_template: str
    dtype: str
    layers: int
    context_length: int
    dense_bytes_per_token: int
    unix_time: float = 0.0
    prefill_tokens_per_second: float = 0.0


def verdict_to_message(verdict: Verdict) -> common_pb2.Verdict:
    """Return the protocol's form of a verdict."""
    return common_pb2.Verdict(
        accepted=verdict.accepted,
        reasons=[
            common_pb2.Reason(
                code=f"REASON_CODE_{reason.code}",
                field=reason.field,
                artifact_value=reason.artifact,
                receiver_value=reason.receiver,
            )
            for reason in verdict.reasons
        ],
    )


def verdict_from_message(message: common_pb2.Verdict) -> Verdict:
    """Return a verdict from a receiver. A code that this version does not know reads as UNKNOWN_METHOD."""
    return Verdict(
        tuple(
            Reason(_reason_code(reason.code), reason.field, reason.artifact_value, reason.receiver_value)
            for reason in message.reasons
        )
    )


def _reason_code(number: int) -> ReasonCode:
    names = {value: name.removeprefix("REASON_CODE_") for name, value in common_pb2.ReasonCode.items()}
    name = names.get(number, "")
    return ReasonCode(name) if name in ReasonCode.__members__ else ReasonCode.UNKNOWN_METHOD


def node_to_message(
    role: str, profile: Profile, versions: Mapping[str, str], prefill_tokens_per_second: float
) -> common_pb2.NodeDescription:
    """Describe a daemon."""
    return common_pb2.NodeDescription(
        role=role,
        kvferry_version=versions["kvferry"],
        mlx_version=versions["mlx"],
        mlx_lm_version=versions["mlx_lm"],
        device=versions["device"],
        blas=versions["blas"],
        model=common_pb2.ModelDescription(
            id=profile.model.id,
            weights=profile.model.weights.hex(),
            tokenizer=profile.tokenizer.vocab.hex(),
            chat_template=profile.tokenizer.chat_template.hex(),
            dtype=profile.layers[0].dtype,
            layers=len(profile.layers),
            context_length=profile.context_length,
            dense_bytes_per_token=profile.dense_bytes_per_token,
        ),
        unix_time=time.time(),
        prefill_tokens_per_second=prefill_tokens_per_second,
    )


def node_from_message(message: common_pb2.NodeDescription) -> NodeInfo:
    """Return a daemon's description."""
    model = message.model
    return NodeInfo(
        role=message.role,
        kvferry_version=message.kvferry_version,
        mlx_version=message.mlx_version,
        mlx_lm_version=message.mlx_lm_version,
        device=message.device,
        blas=message.blas,
        model=model.id,
        weights=model.weights,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        dtype=model.dtype,
        layers=model.layers,
        context_length=model.context_length,
        dense_bytes_per_token=model.dense_bytes_per_token,
        unix_time=message.unix_time,
        prefill_tokens_per_second=message.prefill_tokens_per_second,
    )


def method_to_message(info: MethodInfo) -> common_pb2.MethodDescription:
    """Return the protocol's form of a method's description."""
    return common_pb2.MethodDescription(**info.__dict__)


def method_from_message(message: common_pb2.MethodDescription) -> MethodInfo:
    """Return a method's description."""
    return MethodInfo(
        message.id, message.name, message.form, message.label, message.aware, message.source, message.summary
    )


def parameters_to_message(parameters: Mapping[str, Scalar]) -> dict[str, sender_service_pb2.ParameterValue]:
    """Return method parameters for a request.

    Raises:
        InvalidRequestError: when a value has a type that does not travel.
    """
    packed: dict[str, sender_service_pb2.ParameterValue] = {}
    for name, value in parameters.items():
        if isinstance(value, bool):
            packed[name] = sender_service_pb2.ParameterValue(flag=value)
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise InvalidRequestError(f"{name}: {value} does not fit 64 bits", field=name)
            packed[name] = sender_service_pb2.ParameterValue(integer=value)
        elif isinstance(value, float):
            packed[name] = sender_service_pb2.ParameterValue(number=value)
        elif isinstance(value, str):
            packed[name] = sender_service_pb2.ParameterValue(text=value)
        elif value is not None:
            raise InvalidRequestError(f"{name}: a {type(value).__name__} cannot be a parameter", field=name)
    return packed


def parameters_from_message(message: Mapping[str, sender_service_pb2.ParameterValue]) -> dict[str, Scalar]:
    """Return method parameters from a request."""
    plain: dict[str, Scalar] = {}
    for name, value in message.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidRequestError(f"{name}: no value given", field=name)
        plain[name] = getattr(value, kind)
    return plain


def ranges_to_message(ranges: Iterable[tuple[int, int]]) -> list[receiver_service_pb2.ChunkRange]:
    """Return half-open chunk ranges for a response."""
    return [receiver_service_pb2.ChunkRange(start=start, end=end) for start, end in ranges]


def ranges_from_message(message: Iterable[receiver_service_pb2.ChunkRange]) -> list[tuple[int, int]]:
    """Return half-open chunk ranges from a response."""
    return [(item.start, item.end) for item in message]


def check_digest(value: bytes, field: str) -> bytes:
    """Return a digest from a request.

    Raises:
        InvalidRequestError: when it has the wrong length.
    """
    if len(value) != DIGEST_BYTES:
        raise InvalidRequestError(
            f"{field}: {len(value)} bytes, a digest has {DIGEST_BYTES}",
            field=field,
            value=len(value),
            expected=DIGEST_BYTES,
        )
    return value
