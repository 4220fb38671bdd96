"""Our types to protobuf messages and back, without a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import wire
from kvferry.core.compat import Profile, Reason, ReasonCode, Verdict
from kvferry.core.errors import InvalidRequestError
from kvferry.core.wire import MethodInfo
from kvferry.proto.v1 import common_pb2, receiver_service_pb2, sender_service_pb2

VERSIONS = {"kvferry": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2", "device": "cpu", "blas": "libopenblas.so.0"}
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()


def through_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


def test_every_reason_has_its_number_in_the_protocol() -> None:
    protocol = {name.removeprefix("REASON_CODE_") for name in common_pb2.ReasonCode.keys()}  # noqa: SIM118  (no dict)
    assert protocol == {code.value for code in ReasonCode} | {"UNSPECIFIED"}


@pytest.mark.parametrize("code", list(ReasonCode))
def test_a_refusal_survives_the_wire(code: ReasonCode) -> None:
    verdict = Verdict((Reason(code, "layout[3].dtype", "BF16", "F32 · é門"), Reason(code, "x", "", "")))
    message = through_the_wire(wire.verdict_to_message(verdict))
    assert not message.accepted
    assert wire.verdict_from_message(message) == verdict


def test_an_acceptance_survives_the_wire() -> None:
    message = through_the_wire(wire.verdict_to_message(Verdict()))
    assert message.accepted
    assert wire.verdict_from_message(message).accepted


@pytest.mark.parametrize("number", [0, 999])
def test_a_reason_from_a_newer_receiver_still_refuses(number: int) -> None:
    reason = common_pb2.Reason(code=number, field="future", artifact_value="a", receiver_value="b")
    verdict = wire.verdict_from_message(through_the_wire(common_pb2.Verdict(reasons=[reason])))
    assert verdict == Verdict((Reason(ReasonCode.UNKNOWN_METHOD, "future", "a", "b"),))
    assert not verdict.accepted


def test_a_daemon_describes_its_own_profile(kv_example: Callable[..., Any], profile_of: Callable[..., Profile]) -> None:
    profile = profile_of(kv_example().manifest)
    node = wire.node_from_message(through_the_wire(wire.node_to_message("receiver", profile, VERSIONS, 123.5)))
    assert node.prefill_tokens_per_second == 123.5
    assert (node.role, node.kvferry_version, node.mlx_version, node.mlx_lm_version) == (
        "receiver",
        "0.1.0",
        "0.32.4",
        "0.32.2",
    )
    assert (node.device, node.blas) == ("cpu", "libopenblas.so.0")
    assert (node.model, node.weights) == (profile.model.id, profile.model.weights.hex())
    assert (node.tokenizer, node.chat_template) == (
        profile.tokenizer.vocab.hex(),
        profile.tokenizer.chat_template.hex(),
    )
    assert (node.layers, node.dtype) == (len(profile.layers), profile.layers[0].dtype)
    assert (node.context_length, node.dense_bytes_per_token) == (
        profile.context_length,
        profile.dense_bytes_per_token,
    )


@given(st.builds(MethodInfo, *[st.text()] * 4, st.booleans(), *[st.text()] * 2))
def test_a_method_survives_the_wire(info: MethodInfo) -> None:
    assert wire.method_from_message(through_the_wire(wire.method_to_message(info))) == info


@given(st.dictionaries(st.text(min_size=1), SCALARS))
def test_parameters_keep_value_and_type(parameters: dict[str, Any]) -> None:
    start = sender_service_pb2.SendStart(parameters=wire.parameters_to_message(parameters))
    got = wire.parameters_from_message(through_the_wire(start).parameters)
    assert got == parameters
    # True == 1 == 1.0 in Python, and a method that asks for an integer must not get a flag.
    assert {name: type(value) for name, value in got.items()} == {
        name: type(value) for name, value in parameters.items()
    }


def test_a_parameter_without_a_value_is_left_out() -> None:
    assert wire.parameters_to_message({"level": None}) == {}


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, [1], b"bytes", {"a": 1}])
def test_a_value_that_cannot_travel_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^budget: ") as caught:
        wire.parameters_to_message({"budget": value})
    assert caught.value.fields["field"] == "budget"


def test_an_empty_parameter_from_a_stranger_is_refused_by_name() -> None:
    start = sender_service_pb2.SendStart(parameters={"budget": sender_service_pb2.ParameterValue()})
    with pytest.raises(InvalidRequestError, match=r"^budget: no value"):
        wire.parameters_from_message(start.parameters)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))))
def test_ranges_survive_the_wire(ranges: list[tuple[int, int]]) -> None:
    response = receiver_service_pb2.OfferResponse(missing=wire.ranges_to_message(ranges))
    assert wire.ranges_from_message(through_the_wire(response).missing) == ranges


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_a_digest_has_its_length(length: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^artifact_id: {length} bytes, a digest has 32") as caught:
        wire.check_digest(bytes(length), "artifact_id")
    assert caught.value.fields == {"field": "artifact_id", "value": length, "expected": 32}


def test_a_good_digest_is_returned() -> None:
    assert wire.check_digest(bytes(range(32)), "artifact_id") == bytes(range(32))
